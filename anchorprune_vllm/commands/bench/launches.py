# SPDX-License-Identifier: Apache-2.0
"""What a GPU is given to do when tokens are chosen, counted by running the code without a GPU.

Selection runs on torch's meta device, which has shapes and no values. Every operation of torch is
seen as it is dispatched, and our own kernels are replaced by ones that only note how they were
called. What a kernel does follows from the sizes of the items; the tests hold that to what Triton's
interpreter sees it do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anchorprune_vllm.selection import AnchorParams, Candidates, batch, select_batch
from anchorprune_vllm.selection.kernels import gpu, gpu_anchor
from anchorprune_vllm.selection.units import Unit, anchored_units

KERNELS_OF = {"sort": 8}
"""Operations of torch that launch several kernels: at most so many. All others launch one."""

_NO_KERNEL = ("empty", "empty_like", "new_empty", "scalar_tensor")

STEP_CYCLES = 1000
"""Of the greedy loop, whatever the tokens: taken to be 600 until the first bytes of a row are there
(published for A100 and H100 are 400 from memory, 200 from the L2 cache: PMC10448217, table 3), and
400 until the warps have found the best among them."""

STEP_CYCLES_PER_TOKEN = 0.2
"""Of the greedy loop, for each token that there is room for: up to 25 instructions each, of which a
multiprocessor issues 128 in a cycle. A test counts them in the assembler's output."""

ROW_BYTES_PER_CYCLE = 32
"""What a program of the greedy loop reads of a row of distances: half of what the multiprocessor's
port could take, as all others are idle."""

BLOCK_CYCLES = 1000
"""Of a block of numbers that is read, added up and written."""

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
    steps: int = 0  # of the greedy loop, each of which waits for the one before
    cycles: int = 0  # of the longest program
    programs_at_once: int = 1  # per multiprocessor


def counted(items: Sequence[Candidates], params: AnchorParams | None = None) -> list[Launch]:
    """Return what choosing the tokens of these items, on the meta device, gives a GPU to do."""
    params = params or AnchorParams()
    units = [unit for item in items for unit in anchored_units(item, params)]
    sizes = [len(item.features) for item in items]
    budgets = [min(item.budget, size) for item, size in zip(items, sizes, strict=True)]
    group, *more = gpu.groups(sizes, budgets)
    if more or not gpu.fits(max(sizes)):
        raise ValueError("what is counted must fit the workspace of distances at once")
    launches: list[Launch] = []
    with ExitStack() as replaced:
        for module, kernel, note in (
            (gpu_anchor, "measure_novelty", partial(measure_novelty, units)),
            (gpu_anchor, "mark_anchors", partial(mark_anchors, units)),
            (gpu, "pair_distances", partial(pair_distances, group)),
            (gpu, "choose", partial(choose, group)),
            (gpu, "put_in_native_order", partial(put_in_native_order, group)),
        ):
            noted = _Noted(note, launches)
            replaced.enter_context(mock.patch.object(module, kernel, noted))
        for module, function, result in (
            (batch, "runs_triton", True),
            (gpu, "compile_for", None),
        ):
            always = mock.Mock(return_value=result)
            replaced.enter_context(mock.patch.object(module, function, always))
        replaced.enter_context(TorchOperations(launches))
        select_batch(items, params)
    return launches


class _Noted:
    """Stands in the place of a Triton kernel, `kernel[grid](arguments)`, and notes its launches."""

    def __init__(self, note: Callable[..., Launch], launches: list[Launch]) -> None:
        self._note = note
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **sizes: self._launches.append(self._note(*args, **sizes))


class TorchOperations(TorchDispatchMode):
    """Notes every operation of torch that launches a kernel."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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


# What one launch of each kernel does, by the arguments that it is launched with. ------------------


def measure_novelty(
    units: Sequence[Unit], rows: Tensor, *args: Any, RANKS: int, SEEDS: int, DEPTH: int, **_: int
) -> Launch:
    """`gpu_anchor.measure_novelty`: a program for each unit and block of ranks."""
    width, size, ranks = rows.shape[1], rows.element_size(), max(unit.maximum for unit in units)
    programs = _cdiv(ranks, RANKS)  # of each unit
    products = [_cdiv(unit.minimum, SEEDS) * _cdiv(width, DEPTH) for unit in units]
    operations = 2 * RANKS * SEEDS * DEPTH * programs * sum(products)
    return Launch(
        "novelty of the ranks",
        memory_bytes=size * width * ranks * len(units),
        is_triton=True,
        **_operations(rows, operations),
        cache_bytes=size * DEPTH * (RANKS + SEEDS) * programs * sum(products),
        programs=programs * len(units),
        cycles=TILE_CYCLES * max(products),
        programs_at_once=TILES_AT_ONCE,
    )


def mark_anchors(units: Sequence[Unit], *args: Any, BLOCK: int, **_: int) -> Launch:
    """`gpu_anchor.mark_anchors`: a program for each unit, over its ranks."""
    numbers = 12 * sum(unit.maximum for unit in units)  # bytes of novelty and token
    return Launch(
        "marked anchors",
        memory_bytes=numbers,
        is_triton=True,
        cache_bytes=numbers,
        programs=len(units),
        cycles=BLOCK_CYCLES * max(_cdiv(unit.maximum, BLOCK) for unit in units),
    )


def pair_distances(
    group: Sequence[gpu.Item],
    rows: Tensor,
    *args: Any,
    ONLY_SQUARES: bool,
    BLOCK: int,
    DEPTH: int,
    **_: int,
) -> Launch:
    """`gpu.pair_distances`: a program for each pair of blocks of an item's tokens, in one order."""
    width, size = rows.shape[1], rows.element_size()
    across = [_cdiv(item.tokens, BLOCK) for item in group]
    tiles = sum(across) if ONLY_SQUARES else sum(n * (n + 1) // 2 for n in across)
    tokens = sum(item.tokens for item in group)
    written = tokens if ONLY_SQUARES else sum(item.tokens**2 for item in group)
    return Launch(
        "squares" if ONLY_SQUARES else "distances",
        memory_bytes=size * width * tokens + 4 * written,
        is_triton=True,
        **_operations(rows, 2 * tiles * BLOCK**2 * DEPTH * _cdiv(width, DEPTH)),
        cache_bytes=2 * tiles * BLOCK * size * width,
        programs=tiles,
        cycles=TILE_CYCLES * _cdiv(width, DEPTH),
        programs_at_once=TILES_AT_ONCE,
    )


def choose(group: Sequence[gpu.Item], *args: Any, BLOCK: int, **_: Any) -> Launch:
    """`gpu.choose`: a program for each item, one row of distances in each of its steps."""
    rows = sum(4 * item.tokens * item.budget for item in group)  # bytes
    steps = max(item.budget for item in group)
    row = 4 * max(item.tokens for item in group) / ROW_BYTES_PER_CYCLE  # cycles
    return Launch(
        "greedy loop",
        memory_bytes=rows,
        is_triton=True,
        cache_bytes=rows,
        programs=len(group),
        steps=steps,
        cycles=int(steps * (STEP_CYCLES + row + STEP_CYCLES_PER_TOKEN * BLOCK)),
    )


def put_in_native_order(group: Sequence[gpu.Item], *args: Any, BLOCK: int, **_: int) -> Launch:
    """`gpu.put_in_native_order`: a program for each block of an item's choices."""
    blocks = [_cdiv(item.budget, BLOCK) for item in group]
    return Launch(
        "native order",
        memory_bytes=17 * sum(item.budget for item in group),
        is_triton=True,
        cache_bytes=8
        * sum(item.budget * (1 + count) for item, count in zip(group, blocks, strict=True)),
        programs=sum(blocks),
        cycles=BLOCK_CYCLES * max(blocks),
    )


def _operations(rows: Tensor, operations: int) -> dict[str, int]:
    """Half precision goes through the tensor cores."""
    return {"half_operations" if rows.element_size() == 2 else "single_operations": operations}


def _cdiv(numbers: int, block: int) -> int:
    return -(-numbers // block)
