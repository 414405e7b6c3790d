# SPDX-License-Identifier: Apache-2.0
"""Models whose visual tokens are compared with words in the language model's own space."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.video_utils import VideoMetadata

from tests.support.reference.base import Reference, is_image
from tests.support.reference.selection import Tokens, normalised
from tests.support.reference.timestamps import text_that_stays


class WordMatchingReference(Reference):
    """A candidate is as relevant as its best match among the words of the question.

    An item may have text among its rows. transformers' own processor writes it.
    """

    row_tokens: tuple[str, ...] = ()
    """What stands for a row there; default: what stands for an item in a prompt as it arrives."""
    frame_end = ""
    """What stands behind the rows of a frame, in videos with text between frames."""

    @abstractmethod
    def received_attention(self, media: Any) -> np.ndarray:
        """Importance of each candidate: [N]."""

    def unpruned(self, media: Any) -> int:
        return sum(self.unit_sizes(media))

    def tower_size(self, media: Any) -> int:
        raise NotImplementedError("no test compares it for models of the general adapter")

    def method_signals(self, media: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("no test compares them for this model")

    def _tokens(self, media: Any) -> Tokens:
        features = normalised(self._rows(media).double().numpy())
        sizes = self.unit_sizes(media)
        return Tokens(
            importance=self.received_attention(media),
            features=features,
            context=features,
            units=np.repeat(np.arange(len(sizes)), sizes),
        )

    def _rows(self, media: Any) -> Tensor:
        """Candidates in the space of words: [N, H]."""
        return self.embed(media)

    def _relevance(self, tokens: Tokens, question: str) -> np.ndarray:
        return self._matches(tokens, question).max(axis=1)

    def _matches(self, tokens: Tokens, question: str) -> np.ndarray:
        """Cosines [N, words]."""
        ids = self.tokenizer(question, add_special_tokens=False).input_ids
        words = self.model.get_input_embeddings()(torch.tensor(ids)).double().numpy()
        return tokens.features @ normalised(words).T

    # -- text among the rows of an item ----------------------------------------------------------

    def _inputs(self, media: Any) -> Any:
        """What transformers' processor makes of an item."""
        asked = self.placeholders[not is_image(media)]
        given = {"images": [media]} if is_image(media) else self._video_arguments(media)
        return self.processor(text=[asked], add_special_tokens=False, return_tensors="pt", **given)

    def _video_arguments(self, media: Any) -> dict[str, Any]:
        frames, metadata = media
        known = {key: value for key, value in metadata.items() if key != "do_sample_frames"}
        return {
            "videos": [frames],
            "video_metadata": [VideoMetadata(**known)],
            "do_sample_frames": metadata["do_sample_frames"],
            "fps": 2.0 if metadata["do_sample_frames"] else None,  # Qwen's default
        }

    def _written(self, media: Any) -> list[int]:
        """Unpruned tokens of an item, its text included."""
        return self._once(media, self._inputs).input_ids[0].tolist()

    def _text_that_stays(self, media: Any, kept: list[int]) -> list[int]:
        """Places of the text that stays of an item if these candidates are kept.

        All of an image's. Of a video's, as much as frames could keep rows.
        """
        written, rows = self._once(media, self._written), self._places_of(media)
        text = sorted({*range(len(written))} - {*rows})
        if is_image(media):
            return text
        frames = self._frames_of(written)
        of_frames: list[list[int]] = [[] for _ in self.unit_sizes(media)]
        for place in text:
            of_frames[frames[place]].append(place)
        return text_that_stays(of_frames, {frames[rows[i]] for i in kept}, len(kept))

    def _frames_of(self, written: list[int]) -> list[int]:
        """Frame of each token of a video: what closes the rows of a frame is its last."""
        end = self.tokenizer.convert_tokens_to_ids(self.frame_end)
        return [written[:place].count(end) for place in range(len(written))]

    def _places_of(self, media: Any) -> list[int]:
        tokens = [*(self.row_tokens or self.placeholders)]
        rows = self.tokenizer.convert_tokens_to_ids(tokens)
        written = self._once(media, self._written)
        return [place for place, token in enumerate(written) if token in rows]

    def _ids_of(self, media: Any, token: int) -> list[int]:
        return self._once(media, self._written)

    def _places_that_stay(self, media: Any, kept: list[int]) -> list[int]:
        rows, text = super()._places_that_stay(media, kept), self._text_that_stays(media, kept)
        return sorted([*rows, *text]) if text else rows  # rows of some methods are in other orders

    def _rows_of(self, media: Any, kept: list[int]) -> Tensor:
        rows = dict(zip(self._places_of(media), self._once(media, self.embed), strict=True))
        text = self.embed_words(torch.tensor(self._once(media, self._written)))
        chosen = self._places_that_stay(media, kept)
        return torch.stack([rows.get(place, text[place]) for place in chosen])
