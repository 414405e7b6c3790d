# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL: images and videos in their own resolution, a frame of merged patches per unit.

Kept tokens have the (t, h, w) that they have unpruned, and text goes on where it would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

from anchorprune_vllm.channels import append_numbers, split_numbers
from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.feature_cache import MediaFeatures
from anchorprune_vllm.layout import PromptLayout
from anchorprune_vllm.logger import active_line, logger
from anchorprune_vllm.methods import Signal
from anchorprune_vllm.models.pruned import (
    PrunedModel,
    keys_of_all_heads,
    mean_over_heads,
    prunes_with,
)
from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.positions import MediaPositions
from anchorprune_vllm.processor import WORD_EMBEDDINGS, PruningProcessor
from anchorprune_vllm.selection.host import to_device
from anchorprune_vllm.signals.attention import received_attention, tap_attention
from anchorprune_vllm.signals.matching import MatchingSignals

Grid = tuple[int, int, int]
"""Frames, rows and columns."""

_CACHE_PAGE = 256
_FROM_TOWER: frozenset[Signal] = frozenset({"importance", "keys", "object_attention"})
_FLOAT32_DIGITS = 4  # the bits of a float32, a byte in each channel


class PrunedQwenProcessor(PruningProcessor, Qwen2_5_VLMultiModalProcessor):
    """Qwen2.5-VL prompts with K placeholders per image or video."""

    default_positions = "native"

    def _count_tokens(
        self, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        grid: Any = item[f"{modality}_grid_thw"].data
        merge = self.info.get_hf_config().vision_config.spatial_merge_size
        frames, rows, columns = merged(grid.tolist(), merge)
        return MediaTokens(frames * rows * columns, (rows * columns,) * frames, (columns,) * frames)


def merged(grid: Sequence[int], merge_size: int) -> Grid:
    """A grid of patches as the grid of visual tokens."""
    frames, rows, columns = grid
    return frames, rows // merge_size, columns // merge_size


def frame_groups(grids: Sequence[Sequence[int]], at_once: int) -> list[list[Grid]]:
    """Cut grids of patches between frames, into groups of at most `at_once` patches.

    A frame that is larger than that is alone.
    """
    groups: list[list[Grid]] = [[]]
    room = at_once
    for frames, rows, columns in grids:
        left = frames
        while left:
            fitting = max(0, min(left, room // (rows * columns)))
            if not fitting and groups[-1]:
                groups.append([])
                room = at_once
                continue
            taken = max(1, fitting)
            groups[-1].append((taken, rows, columns))
            room -= taken * rows * columns
            left -= taken
    return groups


def grid_positions(grid: Grid, time_factor: float) -> MediaPositions:
    """(t, h, w) of the visual tokens of a grid. As in vLLM, times are cut to whole numbers."""
    times, rows, columns = np.indices(grid)
    times = (times * time_factor).astype(np.int64)
    relative = np.stack([times, rows, columns], axis=-1).reshape(-1, 3)
    return MediaPositions(torch.from_numpy(relative))


def grid_extent(grid: Grid, time_factor: float) -> int:
    """Positions that a grid takes: text after it goes on behind its highest t, h or w."""
    frames, rows, columns = grid
    return max(int((frames - 1) * time_factor), rows - 1, columns - 1) + 1


@contextmanager
def signals_behind_outputs(visual: Any, needs: Set[Signal]) -> Iterator[None]:
    """While entered, the vision tower's outputs [N, H] carry signals in channels behind them.

    Importance is the attention received in the last block with full attention, a mean over heads,
    query rows and the patches of a token. Before it come the keys of that block, a mean over
    patches; behind it, attention received in the middle: each of them if it is needed. As a part of
    the outputs they go wherever vLLM sends them: with a data-parallel tower, to all ranks.
    """
    if not needs & _FROM_TOWER:
        yield
        return
    last = visual.blocks[max(visual.fullatt_block_indexes)].attn.attn
    frames: list[int] = []  # patches of each
    reverse: list[Tensor] = []

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pixels, grids = (*args, kwargs.get("grid_thw"))[:2]
        frames[:] = [rows * columns for count, rows, columns in grids for _ in range(count)]
        metadata = module.prepare_encoder_metadata(grids)
        reverse[:] = [metadata["reverse_indices"]]
        return (pixels, grids), {"encoder_metadata": metadata}  # so that it is made once

    def received(query: Tensor, key: Tensor, module: Any) -> Tensor:
        return received_attention(query[0], key[0], frames, module.scale)

    def of_tokens(patches: Tensor) -> Tensor:
        """[T, ...] of patches as the tower has them to [N, ...] of its outputs."""
        return patches.unflatten(0, (-1, visual.spatial_merge_unit)).mean(1)[reverse[0]]

    with ExitStack() as taps:
        attention = []
        if "importance" in needs:
            attention.append((last, taps.enter_context(tap_attention(last, received))))
        if "object_attention" in needs:
            middle = visual.blocks[object_block(visual)].attn.attn
            attention.append((middle, taps.enter_context(tap_attention(middle, received))))
        if "keys" in needs:
            keys = taps.enter_context(tap_attention(last, lambda query, key, module: key[0]))

        def after(module: Any, args: Any, outputs: Tensor) -> Tensor:
            scores = [
                of_tokens(mean_over_heads(taken.pop(), tapped, module.num_heads))
                for tapped, taken in attention
            ]
            if "keys" in needs:
                of_patches = keys_of_all_heads(keys.pop(), last, module.num_heads)
                outputs = torch.cat([outputs, of_tokens(of_patches).flatten(1)], dim=1)
            if not scores:
                return outputs
            return append_numbers(
                outputs, torch.stack(scores, dim=1).view(torch.int32), _FLOAT32_DIGITS
            )

        taps.enter_context(visual.register_forward_pre_hook(before, with_kwargs=True))
        taps.enter_context(visual.register_forward_hook(after))
        width = len(attention) * _FLOAT32_DIGITS
        if "keys" in needs:
            width += visual.hidden_size
        visual.out_hidden_size += width  # vLLM makes empty outputs by it
        try:
            yield
        finally:
            visual.out_hidden_size -= width


def object_block(visual: Any) -> int:
    """HiPrune's is the one in the middle. That attends in windows here: of those that do not, the
    nearest, the shallower of two."""
    middle = len(visual.blocks) // 2
    return min(sorted(visual.fullatt_block_indexes), key=lambda block: abs(block - middle))


class _Media:
    """One call's images or videos, as the pruner asks for them."""

    def __init__(self, model: PrunedQwen, modality: str, kwargs: dict[str, Any]) -> None:
        self._model = model
        self._pixels_key = {"image": "pixel_values", "video": "pixel_values_videos"}[modality]
        self._grid_key = f"{modality}_grid_thw"
        self._grids: list[list[int]] = kwargs[self._grid_key].tolist()
        self._pixels = kwargs[self._pixels_key].split([prod(grid) for grid in self._grids])
        self._positions = model.positions_of(modality, kwargs)

    def encode(self, items: list[int]) -> list[MediaFeatures]:
        # Patches attend within their frame, so frames may come to the tower in any company. A long
        # video is more than the unpruned engine ever gives to it at once.
        calls = frame_groups([self._grids[i] for i in items], self._model.patches_at_once())
        pixels = self._pixels_of(items)
        sizes = [sum(prod(grid) for grid in grids) for grids in calls]
        outputs: list[Tensor] = []
        with signals_behind_outputs(self._model.visual, self._model.needs):
            for part, grids in zip(pixels.split(sizes), calls, strict=True):
                outputs.extend(self._embed(part, grids))
        merge_unit = self._model.visual.spatial_merge_unit
        tokens = [prod(self._grids[i]) // merge_unit for i in items]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._features(joined).regrouped(lambda part: part.split(tokens))

    def _features(self, rows: Tensor) -> MediaFeatures:
        """Take the tower's outputs and the signals behind them apart."""
        needs, size = self._model.needs, self._model.visual.out_hidden_size
        parts = dict[str, Tensor]()
        names = [name for name in ("importance", "object_attention") if name in needs]
        if names:
            rows, bits = split_numbers(rows, len(names), _FLOAT32_DIGITS)
            scores = bits.to(torch.int32).view(torch.float32).unbind(1)
            parts.update(zip(names, scores, strict=True))
        if "keys" in needs:
            parts["keys"] = rows[:, size:].unflatten(1, self._model._key_shape())
        return MediaFeatures(rows[:, :size], **parts)

    def embed_whole(self, items: list[int]) -> Sequence[Tensor]:
        return self._embed(self._pixels_of(items), [self._grids[i] for i in items])

    def _pixels_of(self, items: list[int]) -> Tensor:
        """Return the pixels of several items; those of one as they are, without a copy."""
        parts = [self._pixels[i] for i in items]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _embed(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        return Qwen2_5_VLForConditionalGeneration.embed_multimodal(
            self._model,
            **{self._pixels_key: pixels, self._grid_key: torch.tensor(grids, device="cpu")},
        )

    def project(self, hidden: Tensor) -> Tensor:
        return hidden  # the tower's outputs are projected already

    def positions(self, item: int, plan: ItemPlan) -> MediaPositions:
        return self._positions[item]


@prunes_with(PrunedQwenProcessor, Qwen2_5_VLProcessingInfo)
class PrunedQwen(PrunedModel, Qwen2_5_VLForConditionalGeneration):
    """vLLM's Qwen2.5-VL, pruned when the HF config carries a budget."""

    modalities = ("image", "video")
    default_positions = "native"

    @classmethod
    def check(cls, model_config: Any, config: PruneConfig) -> None:
        if config.positions == "compact":
            raise ValueError(
                "anchorprune: positions 'compact' are for models with 1-D positions; Qwen2.5-VL "
                "has M-RoPE: leave positions out or choose 'native'"
            )
        if config.text_encoder is not None:
            raise ValueError(
                "anchorprune: Qwen2.5-VL needs no text encoder, questions are matched with its own "
                "word embeddings; leave out --anchorprune-text-encoder"
            )
        if config.similarity != "negated":
            raise ValueError(
                "anchorprune: similarity is for CLIP and SigLIP pairs; Qwen2.5-VL matches words "
                "with its own embeddings: leave it out"
            )

    def _make_signals(self, config: PruneConfig, vllm_config: VllmConfig) -> MatchingSignals:
        logger.info_once(active_line(config, WORD_EMBEDDINGS))
        if vllm_config.compilation_config.cudagraph_mm_encoder:
            # They would bypass `embed_multimodal`, and so the pruner.
            vllm_config.compilation_config.cudagraph_mm_encoder = False
            logger.warning_once("AnchorPrune: CUDA graphs of the vision encoder are switched off")
        device = vllm_config.device_config.device
        embed = self.language_model.model.embed_input_ids
        return MatchingSignals(lambda ids: embed(to_device(ids, device)), config.matching)

    def _cache_page(self) -> int:
        return _CACHE_PAGE

    def _hidden_size(self) -> int:
        return self.visual.out_hidden_size

    def _key_shape(self) -> tuple[int, int]:
        return self.visual.num_heads, self.visual.hidden_size // self.visual.num_heads

    def _media(self, modality: str, kwargs: dict[str, Any], plans: Sequence[ItemPlan]) -> _Media:
        return _Media(self, modality, kwargs)

    def patches_at_once(self) -> int:
        """Return how many the tower may get in a call: as many as with nothing pruned."""
        return self._max_encoder_tokens * self.visual.spatial_merge_unit

    def _extent(self, feature: MultiModalFeatureSpec) -> int:
        ((_, *grid, time_factor),) = self.iter_mm_grid_thw([feature])
        return grid_extent((grid[0], grid[1], grid[2]), time_factor)

    def _given_positions(self, embeddings: Sequence[Tensor], **kwargs: Any) -> list[MediaPositions]:
        modality = "image" if "image_grid_thw" in kwargs else "video"
        return self.positions_of(modality, kwargs)

    def positions_of(self, modality: str, kwargs: Mapping[str, Any]) -> list[MediaPositions]:
        """Native positions of one call's items of a modality."""
        vision = self.config.vision_config
        grids = kwargs[f"{modality}_grid_thw"].tolist()
        time_factors = [1.0] * len(grids)
        if modality == "video":
            given = kwargs.get("second_per_grid_ts")
            per_frame = [1.0] * len(grids) if given is None else given.tolist()
            per_second = getattr(vision, "tokens_per_second", 1.0)  # as vLLM counts
            time_factors = [seconds * per_second for seconds in per_frame]
        return [
            grid_positions(merged(grid, vision.spatial_merge_size), time_factor)
            for grid, time_factor in zip(grids, time_factors, strict=True)
        ]
