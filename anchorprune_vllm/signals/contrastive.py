# SPDX-License-Identifier: Apache-2.0
"""Find and use the text tower that a model's vision tower was trained with (CLIP or SigLIP).

The vision tower is already in the model. The paired checkpoint provides the text tower, and the
layers that put a patch into the space that both towers share.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

from anchorprune_vllm.config import Similarity
from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.signals.features import MediaFeatures

_CACHED_QUERIES = 1024
_SEGMENTS_PER_CALL = 64


@dataclass(frozen=True)
class ContrastiveFamily:
    """A kind of pair, such as CLIP, with the checkpoints of known vision towers."""

    name: str
    model_type: str
    sizes: tuple[str, ...]
    """The config fields that identify a tower; a model's config does not name its pair."""
    known: Mapping[tuple[int, ...], str]
    """The published checkpoints, by the values of these fields."""
    query_tokenizer: Callable[[str], Callable[[str], Tensor]]
    """Makes, for a checkpoint, a function from a query to token ids [segments, length]."""
    load: Callable[[str, torch.dtype, torch.device], ContrastivePair]
    """Loads from a checkpoint the parts that the model lacks."""

    def find(self, vision_config: Any, given: str | None) -> str:
        """Return the checkpoint paired with a vision tower: the given one, or the published one.

        Raises ValueError if no checkpoint is known, if it cannot be read, or if its vision tower
        is a different one.
        """
        sizes = self._sizes_of(vision_config)
        text_encoder = given or self.known.get(tuple(sizes.values()))
        if text_encoder is None:
            raise ValueError(
                f"anchorprune: no text encoder is known for this vision tower ({_written(sizes)}); "
                f"name its paired {self.name} checkpoint with --anchorprune-text-encoder ID_OR_PATH"
            )
        try:
            config = AutoConfig.from_pretrained(text_encoder)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"anchorprune: cannot read the text encoder {text_encoder!r} "
                f"({str(error).splitlines()[0]}); give --anchorprune-text-encoder the hub id or "
                f"local path of the {self.name} checkpoint that the vision tower comes from"
            ) from error
        if config.model_type != self.model_type:
            raise ValueError(
                f"anchorprune: the text encoder {text_encoder!r} is a {config.model_type!r} model, "
                f"but this vision tower needs a full {self.name} checkpoint "
                f"(model_type {self.model_type!r}); give one with --anchorprune-text-encoder"
            )
        paired = self._sizes_of(config.vision_config)
        if paired != sizes:
            raise ValueError(
                f"anchorprune: the text encoder {text_encoder!r} does not fit the vision tower: it "
                f"is paired with a tower of {_written(paired)}, the model has {_written(sizes)}; "
                f"give --anchorprune-text-encoder the {self.name} checkpoint that the vision tower "
                "comes from"
            )
        return text_encoder

    def check_files(self, text_encoder: str) -> None:
        """Raise ValueError if a text encoder has no tokenizer or, if it is local, no weights."""
        remedy = f"give --anchorprune-text-encoder a complete {self.name} checkpoint"
        try:
            self.query_tokenizer(text_encoder)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"anchorprune: the text encoder {text_encoder!r} has no tokenizer of its own "
                f"({str(error).splitlines()[0]}); {remedy}"
            ) from error
        path = Path(text_encoder)
        if path.is_dir() and not any([*path.glob("*.safetensors"), *path.glob("*.bin")]):
            raise ValueError(
                f"anchorprune: the text encoder {text_encoder!r} has no weights; {remedy}"
            )

    def _sizes_of(self, vision_config: Any) -> dict[str, int]:
        return {name: getattr(vision_config, name) for name in self.sizes}


def _written(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


class ContrastivePair(ABC):
    """The parts of a pair that the model lacks, on the model's device and in its dtype."""

    def __init__(self, parts: Sequence[nn.Module], device: torch.device) -> None:
        self._parts = parts
        self._device = device
        self._queries: OrderedDict[bytes, Tensor] = OrderedDict()

    def tensors(self) -> list[Tensor]:
        """Return all parameters and buffers that are on the device."""
        return [
            tensor.detach()
            for part in self._parts
            for tensor in itertools.chain(part.parameters(), part.buffers())
        ]

    @property
    @abstractmethod
    def width(self) -> int:
        """Return P, the size of the shared space."""

    @abstractmethod
    def embed_patches(self, hidden: Tensor) -> Tensor:
        """Embed patches [..., D] in the shared space as [..., P]."""

    @abstractmethod
    def _embed_segments(self, ids: Tensor) -> Tensor:
        """Embed segments [M, L] of queries in the shared space as [M, P]."""

    def embed_queries(self, queries: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each query [M, L], the mean of its normalised segment embeddings: [P].

        The means are float32, and are all that the method needs: a patch's similarity to the mean
        is its average similarity to the segments. Queries that are not cached are encoded together.
        """
        keys = [ids.numpy().tobytes() for ids in queries]
        asked = dict(zip(keys, queries, strict=True))
        missing = [key for key in asked if key not in self._queries]
        if missing:
            encoded = self._encode([asked[key] for key in missing])
            self._queries.update(zip(missing, encoded, strict=True))
        for key in asked:
            self._queries.move_to_end(key)
        embeddings = [self._queries[key] for key in keys]
        while len(self._queries) > _CACHED_QUERIES:
            self._queries.popitem(last=False)
        return embeddings

    def _encode(self, queries: Sequence[Tensor]) -> list[Tensor]:
        longest = max(ids.shape[1] for ids in queries)
        # The last token of a segment may be used as padding, so it is repeated.
        filled = torch.cat(
            [torch.cat([ids, ids[:, -1:].expand(-1, longest - ids.shape[1])], 1) for ids in queries]
        )
        segments = to_device(filled, self._device)
        embeddings = torch.cat(
            [self._embed_segments(chunk) for chunk in segments.split(_SEGMENTS_PER_CALL)]
        )
        per_query = F.normalize(embeddings.float(), dim=-1).split([len(ids) for ids in queries])
        return [segments.mean(dim=0) for segments in per_query]


class ContrastiveRelevance:
    """Relevance by similarity with the question as a whole, in the space that a pair shares.

    The paper negates the similarity, because the raw one favours the background (Stage 1). The raw
    similarity is available for comparison.
    """

    def __init__(self, pair: ContrastivePair, similarity: Similarity = "negated") -> None:
        self._pair = pair
        self._sign = {"negated": -1.0, "raw": 1.0}[similarity]

    def __call__(
        self, features: Sequence[MediaFeatures], questions: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the relevance [N] of each item's tokens, or None for an item without question."""
        relevance: list[Tensor | None] = [None] * len(features)
        asked = [i for i, question in enumerate(questions) if len(question)]
        embedded = self._pair.embed_queries([questions[i] for i in asked])
        for i, words in zip(asked, embedded, strict=True):
            patches = features[i].aligned
            assert patches is not None
            patches = F.normalize(patches.float(), dim=-1)
            relevance[i] = self._sign * torch.mv(patches, words)
        return relevance
