# SPDX-License-Identifier: Apache-2.0
"""Count the work that token selection gives to a GPU, by running the code without a GPU.

Selection runs on torch's meta device, whose tensors have shapes but no values. Operations of torch
are recorded as they are dispatched. Our Triton kernels are replaced by functions that compute the
work of a launch from its arguments; the tests compare these with Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anchorprune_vllm.selection import AnchorParams, Candidates, batch, select_batch
from anchorprune_vllm.selection.kernels import gpu, gpu_anchor
from anchorprune_vllm.selection.units import Unit, anchored_units

KERNELS_OF = {"sort": 8}  # operations of torch that launch several kernels, and at most how many
_NO_KERNEL = ("empty", "empty_like", "new_empty", "scalar_tensor")

# Assumptions about the kernels, in cycles of a multiprocessor.
STEP_CYCLES = 1000
"""A step of the greedy loop, however many tokens there are: 600 until the first bytes of a row
arrive (published for A100 and H100 are 400 from memory and 200 from the L2 cache: PMC10448217,
table 3), and 400 until the warps have found the best token."""
STEP_CYCLES_PER_TOKEN = 0.2
"""A step of the greedy loop takes up to 25 instructions for each token that there is room for, of
which a multiprocessor issues 128 per cycle. A test counts them in the assembler's output."""
ROW_BYTES_PER_CYCLE = 32
"""The greedy loop reads rows of distances at half the speed of the multiprocessor's port, as all
other multiprocessors are idle."""
BLOCK_CYCLES = 1000  # to read, add up and write a block of numbers
TILE_CYCLES = 500  # between two products of tiles, while others wait for memory
TILES_AT_ONCE = 2  # programs of such products that run on one multiprocessor


@dataclass(frozen=True)
class Launch:
    """The work of one operation of torch, or of one launch of a Triton kernel."""

    name: str
    memory_bytes: int  # of all tensors that are read or written, counted once
    kernels: int = 1
    is_triton: bool = False
    operations: int = 0
    on_tensor_cores: bool = False  # in half precision; else in float32
    cache_bytes: int = 0  # read by all programs together, most of it from the L2 cache
    programs: int = 1
    steps: int = 0  # of the greedy loop: each waits for the one before
    cycles: int = 0  # of the longest program
    programs_at_once: int = 1  # on one multiprocessor


def count_launches(items: Sequence[Candidates]) -> list[Launch]:
    """Return the work of selecting the tokens of these items, which are on the meta device."""
    params = AnchorParams()
    units = [unit for item in items for unit in anchored_units(item, params)]
    sizes = [len(item.features) for item in items]
    group, *more = gpu.groups(sizes, [item.kept for item in items])
    if more or not gpu.fits(max(sizes)):
        raise ValueError("the distances of all items must fit the workspace at once")
    launches: list[Launch] = []
    kernels: dict[tuple[Any, str], Callable[..., Launch]] = {
        (gpu_anchor, "measure_novelty"): partial(_measure_novelty, units),
        (gpu_anchor, "mark_anchors"): partial(_mark_anchors, units),
        (gpu, "pair_distances"): partial(_pair_distances, group),
        (gpu, "choose"): partial(_choose, group),
        (gpu, "put_in_native_order"): partial(_put_in_native_order, group),
    }
    with ExitStack() as patches:
        for (module, name), work in kernels.items():
            recorder = _KernelRecorder(work, launches)
            patches.enter_context(mock.patch.object(module, name, recorder))
        for module, name, result in (
            (batch, "runs_triton", True),
            (gpu, "compile_for", None),
        ):
            patches.enter_context(mock.patch.object(module, name, return_value=result))
        patches.enter_context(TorchRecorder(launches))
        select_batch(items, params)
    return launches


class _KernelRecorder:
    """Replaces a Triton kernel, `kernel[grid](arguments)`, and records its launches."""

    def __init__(self, work: Callable[..., Launch], launches: list[Launch]) -> None:
        self._work, self._launches = work, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **sizes: self._launches.append(self._work(*args, **sizes))


class TorchRecorder(TorchDispatchMode):
    """Records every operation of torch that launches a kernel."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0].rstrip("_")
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and name not in _NO_KERNEL:
            tensors = {id(x): x for x in tree_leaves((args, kwargs, result)) if _is_meta(x)}
            memory = sum(x.numel() * x.element_size() for x in tensors.values())
            # Selection has no other product in torch.
            operations = 2 * result.numel() * args[1].shape[-1] if name == "baddbmm" else 0
            kernels = KERNELS_OF.get(name, 1)
            self._launches.append(Launch(name, memory, kernels, operations=operations))
        return result


def _is_meta(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"


# The work of each Triton kernel, computed from the items and the arguments of the launch. ---------


def _measure_novelty(
    units: Sequence[Unit], rows: Tensor, *args: Any, RANKS: int, SEEDS: int, DEPTH: int, **_: int
) -> Launch:
    """One program for each unit and block of ranks."""
    width, size, ranks = rows.shape[1], rows.element_size(), max(unit.maximum for unit in units)
    blocks = ceil(ranks / RANKS)
    products = [ceil(unit.minimum / SEEDS) * ceil(width / DEPTH) for unit in units]
    return Launch(
        "measure_novelty",
        memory_bytes=size * width * ranks * len(units),
        is_triton=True,
        operations=2 * RANKS * SEEDS * DEPTH * blocks * sum(products),
        on_tensor_cores=size == 2,
        cache_bytes=size * DEPTH * (RANKS + SEEDS) * blocks * sum(products),
        programs=blocks * len(units),
        cycles=TILE_CYCLES * max(products),
        programs_at_once=TILES_AT_ONCE,
    )


def _mark_anchors(units: Sequence[Unit], *args: Any, BLOCK: int, **_: int) -> Launch:
    """One program for each unit, over its ranks."""
    read = 12 * sum(unit.maximum for unit in units)  # bytes of novelty and token
    return Launch(
        "mark_anchors",
        memory_bytes=read,
        is_triton=True,
        cache_bytes=read,
        programs=len(units),
        cycles=BLOCK_CYCLES * max(ceil(unit.maximum / BLOCK) for unit in units),
    )


def _pair_distances(
    group: Sequence[gpu.Item], rows: Tensor, *args: Any, ONLY_SQUARES: bool, **sizes: int
) -> Launch:
    """One program for each pair of blocks of an item's tokens, in one order."""
    block, depth = sizes["BLOCK"], sizes["DEPTH"]
    width, size = rows.shape[1], rows.element_size()
    across = [ceil(item.tokens / block) for item in group]
    tiles = sum(across) if ONLY_SQUARES else sum(n * (n + 1) // 2 for n in across)
    tokens = sum(item.tokens for item in group)
    written = tokens if ONLY_SQUARES else sum(item.tokens**2 for item in group)
    return Launch(
        "pair_distances",
        memory_bytes=size * width * tokens + 4 * written,
        is_triton=True,
        operations=2 * tiles * block**2 * depth * ceil(width / depth),
        on_tensor_cores=size == 2,
        cache_bytes=2 * tiles * block * size * width,
        programs=tiles,
        cycles=TILE_CYCLES * ceil(width / depth),
        programs_at_once=TILES_AT_ONCE,
    )


def _choose(group: Sequence[gpu.Item], *args: Any, BLOCK: int, **_: Any) -> Launch:
    """One program for each item, which reads one row of distances in each of its steps."""
    read = sum(4 * item.tokens * item.budget for item in group)
    steps = max(item.budget for item in group)
    row_cycles = 4 * max(item.tokens for item in group) / ROW_BYTES_PER_CYCLE
    return Launch(
        "choose",
        memory_bytes=read,
        is_triton=True,
        cache_bytes=read,
        programs=len(group),
        steps=steps,
        cycles=int(steps * (STEP_CYCLES + row_cycles + STEP_CYCLES_PER_TOKEN * BLOCK)),
    )


def _put_in_native_order(group: Sequence[gpu.Item], *args: Any, BLOCK: int, **_: int) -> Launch:
    """One program for each block of an item's choices, which reads all of the choices."""
    blocks = [ceil(item.budget / BLOCK) for item in group]
    return Launch(
        "put_in_native_order",
        memory_bytes=17 * sum(item.budget for item in group),
        is_triton=True,
        cache_bytes=sum(8 * item.budget * (1 + n) for item, n in zip(group, blocks, strict=True)),
        programs=sum(blocks),
        cycles=BLOCK_CYCLES * max(blocks),
    )
