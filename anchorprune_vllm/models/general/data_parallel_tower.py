# SPDX-License-Identifier: Apache-2.0
"""Read signals from vision towers that split images over ranks (`--mm-encoder-tp-mode data`).

A rank sees only the attention of its own images, while vLLM gathers the outputs of all. So signals
travel with the outputs, in extra channels behind them, wherever vLLM sends these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anchorprune_vllm.models.general.tower_signals import Parts, TowerSignals
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.worker.embedding_payload import append_numbers, split_numbers

_FLOAT32_DIGITS = 4  # each channel holds one byte of a float32


@contextmanager
def tapped_on_all_ranks(
    signals: TowerSignals,
) -> Iterator[Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Parts]]]]:
    """Make the outputs of a tower carry the signals of its attention while in this context.

    Yields a function that separates the rows of items [N, H + channels] into rows [N, H] and the
    signals of each item.
    """
    visual = signals.visual
    numbers = [name for name in ("importance", "object_attention") if name in signals.needed]
    key_size = signals.key_shape[0] * signals.key_shape[1] if "keys" in signals.needed else 0
    channels = key_size + len(numbers) * _FLOAT32_DIGITS
    with signals.tapped() as take:

        def carry(module: Any, args: Any, kwargs: Any, outputs: Tensor) -> Tensor:
            _, grids = (*args, kwargs.get("grid_thw"))[:2]
            parts = take([_tokens_of(grid, visual.spatial_merge_size) for grid in grids])
            assert parts is not None, "the order of such a tower is stated"
            if key_size:
                outputs = torch.cat([outputs, parts["keys"].flatten(1).to(outputs.dtype)], dim=1)
            if not numbers:
                return outputs
            scores = torch.stack([parts[name] for name in numbers], dim=1)
            return append_numbers(outputs, scores.view(torch.int32), _FLOAT32_DIGITS)

        handle = visual.register_forward_hook(carry, with_kwargs=True)
        visual.out_hidden_size += channels  # vLLM allocates empty outputs of this size

        def take_apart(items: Sequence[Tensor]) -> tuple[list[Tensor], list[Parts]]:
            rows, signals_of = list[Tensor](), list[Parts]()
            for item in items:
                found: dict[str, Tensor] = {}
                if numbers:
                    item, bits = split_numbers(item, len(numbers), _FLOAT32_DIGITS)
                    scores = bits.to(torch.int32).view(torch.float32).unbind(1)
                    found.update(zip(numbers, scores, strict=True))
                if key_size:
                    item, keys = item.tensor_split([item.shape[1] - key_size], dim=1)
                    found["keys"] = keys.unflatten(1, signals.key_shape)
                rows.append(item)
                signals_of.append(found)
            return rows, signals_of

        try:
            yield take_apart
        finally:
            handle.remove()
            visual.out_hidden_size -= channels


def _tokens_of(grid: Sequence[int], merge_size: int) -> MediaTokens:
    """Return the visual tokens of a grid of patches; each frame is a unit."""
    frames, rows, columns = grid[0], grid[1] // merge_size, grid[2] // merge_size
    size = rows * columns
    return MediaTokens(frames * size, (size,) * frames, (columns,) * frames)
