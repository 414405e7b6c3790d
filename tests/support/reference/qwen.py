# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL with DeepStack, and Qwen3.5."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from tests.support.reference.base import is_image
from tests.support.reference.words import WordMatchingReference


class ReferenceQwen(WordMatchingReference):
    """Qwen2-VL. Units are the frames."""

    placeholders = ("<|image_pad|>", "<|video_pad|>")
    is_native = True

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
        return self._look_into(media, max(self._full_blocks()))[1].numpy()

    def method_signals(self, media: Any) -> tuple[Tensor, Tensor]:
        keys, _ = self._look_into(media, max(self._full_blocks()))
        middle = len(self.model.model.visual.blocks) // 2
        nearest = sorted(self._full_blocks(), key=lambda block: (abs(block - middle), block))
        return keys, self._look_into(media, nearest[0])[1]

    def _full_blocks(self) -> Sequence[int]:
        """Blocks of the tower in which all patches of a frame see each other."""
        return range(len(self.model.model.visual.blocks))

    def _token_order(self, grid: Tensor) -> Tensor:
        """Which visual token is the n-th in the tower: [N]."""
        return torch.arange(int(grid.prod()) // 4)

    def _look_into(self, media: Any, block: int) -> tuple[Tensor, Tensor]:
        """Of a block's attention, keys [N, heads, head size] and what tokens receive [N].

        Both are means over the patches of a visual token.
        """
        visual = self.model.model.visual
        seen: list[tuple[Tensor, Tensor]] = []
        modeling: Any = sys.modules[type(visual).__module__]
        eager = modeling.eager_attention_forward

        def record(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            output, weights = eager(module, query, key, *args, **kwargs)
            if module is visual.blocks[block].attn:
                # Of [1, heads, rows, columns] and [1, heads, columns, head size].
                seen.append((key[0].transpose(0, 1), weights[0].double().mean(dim=(0, 1))))
            return output, weights

        with patch.object(modeling, "eager_attention_forward", record):
            self._run_tower(media)
        order = self._token_order(self._preprocess(media)[1])

        def of_tokens(patches: Tensor) -> Tensor:
            in_tower = patches.unflatten(0, (-1, 4)).mean(1)
            tokens = torch.empty_like(in_tower)
            tokens[order] = in_tower
            return tokens

        keys, received = zip(*seen, strict=True)
        return of_tokens(torch.cat(keys)), of_tokens(torch.cat(received))

    def embed(self, media: Any) -> Tensor:
        return self._run_tower(media).pooler_output

    def _run_tower(self, media: Any) -> Any:
        pixels, grid = self._preprocess(media)
        return self.model.model.visual(pixels, grid_thw=grid[None])

    def _preprocess(self, media: Any) -> tuple[Tensor, Tensor]:
        """Pixels and grid of one item."""
        if is_image(media):
            out = self.processor.image_processor(media, return_tensors="pt")
            return out.pixel_values, out.image_grid_thw[0]
        out = self._preprocess_video(media)
        return out.pixel_values_videos, out.video_grid_thw[0]

    def _preprocess_video(self, media: Any) -> Any:
        given = self._video_arguments(media)
        return self.processor.video_processor(**given, return_metadata=True, return_tensors="pt")

    def _unpruned_positions(self, ids: list[int], media: list[Any]) -> Tensor:
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
            torch.tensor([self._kinds(ids)]),
            image_grid_thw=torch.stack(grids[True]) if grids[True] else None,
            video_grid_thw=torch.stack(grids[False]) if grids[False] else None,
            second_per_grid_ts=torch.tensor(seconds) if seconds else None,  # Qwen2.5-VL's alone
        )
        return positions[:, 0]

    def _kinds(self, ids: list[int]) -> list[int]:
        """1 for rows of images, 2 for those of videos, 0 for text."""
        image, video = self.placeholder_ids()
        return [{image: 1, video: 2}.get(token, 0) for token in ids]

    def _position_ids(self, positions: Tensor) -> Tensor:
        return positions.expand(3, -1)[:, None]  # [3, batch, tokens]


class ReferenceQwen2_5(ReferenceQwen):
    """Most blocks of the tower see windows, in whose order its tokens lie."""

    def _full_blocks(self) -> Sequence[int]:
        return self.model.model.visual.fullatt_block_indexes

    def _token_order(self, grid: Tensor) -> Tensor:
        visual = self.model.model.visual
        order, _ = get_vision_window_index(
            grid[None], visual.spatial_merge_size, visual.window_size, visual.patch_size
        )
        return torch.as_tensor(order)


class ReferenceQwen3_5(ReferenceQwen):
    """With timestamps before the frames of a video."""

    frame_end = "<|vision_end|>"


class ReferenceQwen3(ReferenceQwen3_5):
    """And with DeepStack: rows of some of the tower's blocks are added behind the first layers.

    They lie behind the columns of the token itself, level by level; words have zeros there.
    """

    def _load(self, model: Path) -> None:
        super()._load(model)
        embed_words = self.embed_words
        self.width = embed_words.embedding_dim
        self.levels = len(self.model.model.visual.deepstack_merger_list)
        self.embed_words = lambda ids: F.pad(embed_words(ids), (0, self.levels * self.width))

    def embed(self, media: Any) -> Tensor:
        output = self._run_tower(media)
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)

    def _rows(self, media: Any) -> Tensor:
        return self.embed(media)[:, : self.width]

    def hidden_states(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        tokens, *levels = embeddings.split(self.width, dim=2)
        is_visual = embeddings[..., self.width :].any(2)
        output = self.language_model(
            inputs_embeds=tokens,
            position_ids=self._position_ids(positions[:, : embeddings.shape[1]]),
            visual_pos_masks=is_visual,
            deepstack_visual_embeds=[level[is_visual] for level in levels],
        )
        return output.last_hidden_state[0]
