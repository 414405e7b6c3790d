# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.video_utils import VideoMetadata
from transformers.vision_utils import get_vision_window_index

from tests.support.reference.base import Reference, is_image
from tests.support.reference.selection import Tokens, normalised


class ReferenceQwen(Reference):
    """Units are the frames."""

    placeholders = ("<|image_pad|>", "<|video_pad|>")
    is_native = True

    def unpruned(self, media: Any) -> int:
        return sum(self.unit_sizes(media))

    def unit_sizes(self, media: Any) -> list[int]:
        frames, rows, columns = self._preprocess(media)[1].tolist()
        return [rows * columns // 4] * frames

    def grids(self, media: Any) -> list[tuple[int, int]]:
        frames, rows, columns = self._preprocess(media)[1].tolist()
        return [(rows // 2, columns // 2)] * frames

    def tower_size(self, media: Any) -> int:
        return len(self._preprocess(media)[0])

    def received_attention(self, media: Any) -> np.ndarray:
        """Mean attention that each visual token gets in the last block with full attention: [N]."""
        _, weights = self._look_into(media, max(self.model.model.visual.fullatt_block_indexes))
        return weights.numpy()

    def method_signals(self, media: Any) -> tuple[Tensor, Tensor]:
        visual = self.model.model.visual
        keys, _ = self._look_into(media, max(visual.fullatt_block_indexes))
        middle = len(visual.blocks) // 2
        nearest = sorted(
            visual.fullatt_block_indexes, key=lambda block: (abs(block - middle), block)
        )
        return keys, self._look_into(media, nearest[0])[1]

    def _look_into(self, media: Any, block: int) -> tuple[Tensor, Tensor]:
        """Of a block's attention, keys [N, heads, head size] and what tokens receive [N].

        Both are means over the patches of a visual token.
        """
        visual = self.model.model.visual
        pixels, grid = self._preprocess(media)
        seen: list[tuple[Tensor, Tensor]] = []
        eager = modeling_qwen2_5_vl.eager_attention_forward

        def record(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            output, weights = eager(module, query, key, *args, **kwargs)
            if module is visual.blocks[block].attn:
                # Of [1, heads, rows, columns] and [1, heads, columns, head size].
                seen.append((key[0].transpose(0, 1), weights[0].double().mean(dim=(0, 1))))
            return output, weights

        with patch.object(modeling_qwen2_5_vl, "eager_attention_forward", record):
            visual(pixels, grid_thw=grid[None])
        order, _ = get_vision_window_index(
            grid[None], visual.spatial_merge_size, visual.window_size, visual.patch_size
        )

        def of_tokens(patches: Tensor) -> Tensor:
            in_windows = patches.unflatten(0, (-1, 4)).mean(1)
            tokens = torch.empty_like(in_windows)
            tokens[torch.as_tensor(order)] = in_windows
            return tokens

        keys, received = zip(*seen, strict=True)
        return of_tokens(torch.cat(keys)), of_tokens(torch.cat(received))

    def _tokens(self, media: Any) -> Tokens:
        features = normalised(self.embed(media).double().numpy())
        sizes = self.unit_sizes(media)
        return Tokens(
            importance=self.received_attention(media),
            features=features,
            context=features,
            units=np.repeat(np.arange(len(sizes)), sizes),
        )

    def _relevance(self, tokens: Tokens, question: str) -> np.ndarray:
        return self._matches(tokens, question).max(axis=1)

    def _matches(self, tokens: Tokens, question: str) -> np.ndarray:
        """Cosines [N, words]."""
        ids = self.tokenizer(question, add_special_tokens=False).input_ids
        words = self.model.get_input_embeddings()(torch.tensor(ids)).double().numpy()
        return tokens.features @ normalised(words).T

    def embed(self, media: Any) -> Tensor:
        pixels, grid = self._preprocess(media)
        output = self.model.model.visual(pixels, grid_thw=grid[None])
        return output.pooler_output

    def _preprocess(self, media: Any) -> tuple[Tensor, Tensor]:
        """Pixels and grid of one item."""
        if is_image(media):
            out = self.processor.image_processor(media, return_tensors="pt")
            return out.pixel_values, out.image_grid_thw[0]
        out = self._preprocess_video(media)
        return out.pixel_values_videos, out.video_grid_thw[0]

    def _preprocess_video(self, media: Any) -> Any:
        frames, metadata = media
        known = {key: value for key, value in metadata.items() if key != "do_sample_frames"}
        return self.processor.video_processor(
            [frames],
            video_metadata=[VideoMetadata(**known)],
            do_sample_frames=metadata["do_sample_frames"],
            fps=2.0 if metadata["do_sample_frames"] else None,  # the default of Qwen's processor
            return_metadata=True,
            return_tensors="pt",
        )

    def _unpruned_positions(self, ids: list[int], media: list[Any]) -> Tensor:
        image, video = self.placeholder_ids()
        grids: dict[bool, list[Tensor]] = {True: [], False: []}
        for item in media:
            grids[is_image(item)].append(self._preprocess(item)[1])
        seconds = [
            self.processor.video_processor.temporal_patch_size
            / self._preprocess_video(item).video_metadata[0].sampled_fps
            for item in media
            if not is_image(item)
        ]
        positions, _ = self.model.model.get_rope_index(
            torch.tensor([ids]),
            torch.tensor([[{image: 1, video: 2}.get(token, 0) for token in ids]]),
            image_grid_thw=torch.stack(grids[True]) if grids[True] else None,
            video_grid_thw=torch.stack(grids[False]) if grids[False] else None,
            second_per_grid_ts=torch.tensor(seconds) if seconds else None,
        )
        return positions[:, 0]

    def _position_ids(self, positions: Tensor) -> Tensor:
        return positions.expand(3, -1)[:, None]  # [3, batch, tokens]
