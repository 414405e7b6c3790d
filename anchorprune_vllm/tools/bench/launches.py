# SPDX-License-Identifier: Apache-2.0
"""What a GPU is given to do when tokens are chosen, counted by running the code without a GPU.

Selection runs on torch's meta device, which has shapes and no values. Every operation of torch is
seen as it is dispatched, and our two kernels are replaced by ones that only note how they were
called. What a kernel does follows from its arguments; the tests hold that to what Triton's
interpreter sees it do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anchorprune_vllm.selection import AnchorParams, Candidates, select, select_batch
from anchorprune_vllm.selection.kernels import gpu

KERNELS_OF = {"sort": 8, "cumsum": 2}
"""Operations of torch that launch several kernels: at most so many. All others launch one."""

_NO_KERNEL = ("empty", "new_empty", "scalar_tensor")

STEP_CYCLES = 1300
"""Of the greedy loop, whatever the tokens: the row's way from memory, and finding the best."""

STEP_CYCLES_PER_BLOCK = 1200
"""Of the greedy loop, for each block of tokens."""

TILE_CYCLES = 500
"""Of a product of two tiles, from one pair of them to the next, while others wait for memory."""

TILES_AT_ONCE = 2
"""Programs of the product that a multiprocessor runs side by side."""


@dataclass(frozen=True)
class Launch:
    """One operation of torch, or one launch of a kernel of ours."""

    name: str
    memory_bytes: int  # of all tensors that are read or written, once
    kernels: int = 1
    is_triton: bool = False
    half_operations: int = 0  # on tensor cores
    single_operations: int = 0  # of float32
    cache_bytes: int = 0  # that all programs together read, most of it from the L2 cache
    programs: int = 1
    cycles: int = 0  # of one program, from its first dependent step to its last
    programs_at_once: int = 1  # per multiprocessor


def counted(items: Sequence[Candidates], params: AnchorParams | None = None) -> list[Launch]:
    """Return what choosing the tokens of these items, on the meta device, gives a GPU to do."""
    launches: list[Launch] = []
    with _kernels_noted(launches), _Operations(launches):
        select_batch(items, params or AnchorParams())
    return launches


class _Operations(TorchDispatchMode):
    """Notes every operation of torch that launches a kernel."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0].rstrip("_")
        if not _is_view(func) and name not in _NO_KERNEL:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if _is_meta(leaf)]
            distinct = {id(tensor): _bytes(tensor) for tensor in tensors}
            operations = 0
            if name == "baddbmm":  # the only product in torch
                operations = 2 * result.numel() * args[1].shape[-1]
            self._launches.append(
                Launch(
                    name,
                    sum(distinct.values()),
                    KERNELS_OF.get(name, 1),
                    single_operations=operations,
                )
            )
        return result


def _is_view(func: Any) -> bool:
    """Return whether an operation gives another view of its argument, and so launches nothing."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _is_meta(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _kernels_noted(launches: list[Launch]) -> Iterator[None]:
    """Run selection as on a GPU, with kernels that note what they were to do."""
    groups: list[Sequence[gpu.Item]] = []
    cut = gpu.groups

    def groups_noted(*args: Any) -> Iterator[Sequence[gpu.Item]]:
        for group in cut(*args):
            groups.append(group)
            yield group

    def distances(grid: tuple[int, ...], rows: Tensor, *_: Any, **sizes: Any) -> None:
        launches.append(pair_distances(groups[-1], rows, **sizes))

    def choose(grid: tuple[int, ...], *args: Any, **sizes: Any) -> None:
        launches.append(greedy_loop(groups[-1], **sizes))

    with (
        mock.patch.object(select, "device_expansion", lambda *_: gpu.expand),
        mock.patch.object(gpu, "groups", groups_noted),
        mock.patch.object(gpu, "pair_distances", _Noted(distances)),
        mock.patch.object(gpu, "choose", _Noted(choose)),
    ):
        yield


class _Noted:
    """Stands in the place of a Triton kernel: `kernel[grid](arguments)`."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **sizes: self._note(grid, *args, **sizes)


def pair_distances(
    group: Sequence[gpu.Item],
    rows: Tensor,
    *,
    ONLY_SQUARES: bool,
    BLOCK: int,
    DEPTH: int,
    **_: int,
) -> Launch:
    """Return what one launch of `gpu.pair_distances` does for the items of a group."""
    width, size = rows.shape[1], rows.element_size()
    depths = -(-width // DEPTH)
    tiles = sum(_tiles(item.tokens, BLOCK, ONLY_SQUARES) for item in group)
    tokens = sum(item.tokens for item in group)
    written = tokens if ONLY_SQUARES else tokens + sum(item.tokens**2 for item in group)
    operations = 2 * tiles * BLOCK**2 * depths * DEPTH
    is_half = size == 2
    return Launch(
        "squares" if ONLY_SQUARES else "distances",
        memory_bytes=tokens * width * size + 4 * written,
        is_triton=True,
        half_operations=operations if is_half else 0,
        single_operations=0 if is_half else operations,
        cache_bytes=sum(_read_rows(item.tokens, BLOCK, ONLY_SQUARES) for item in group)
        * (width * size),
        programs=tiles,
        cycles=depths * TILE_CYCLES,
        programs_at_once=TILES_AT_ONCE,
    )


def _tiles(tokens: int, block: int, only_diagonal: bool) -> int:
    across = -(-tokens // block)
    return across if only_diagonal else across**2


def _read_rows(tokens: int, block: int, only_diagonal: bool) -> int:
    """How many rows all programs of an item read: two tiles each, without what is beyond it."""
    across = -(-tokens // block)
    return 2 * tokens if only_diagonal else 2 * tokens * across


def greedy_loop(group: Sequence[gpu.Item], *, HAS_ADDEND: bool, BLOCK: int, **_: int) -> Launch:
    """Return what one launch of `gpu.choose` does for the items of a group."""
    read_per_token = 12 + 4 * HAS_ADDEND  # distance, novelty, factor and addend
    return Launch(
        "greedy loop",
        memory_bytes=sum(4 * item.budget * item.tokens for item in group),
        is_triton=True,
        cache_bytes=sum(read_per_token * item.budget * item.tokens for item in group),
        programs=len(group),
        cycles=max(
            item.budget * (STEP_CYCLES + STEP_CYCLES_PER_BLOCK * -(-item.tokens // BLOCK))
            for item in group
        ),
    )
