# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of Stage 2's kernels, for GPUs that are not here."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from anchorprune_vllm.commands.bench.launches import STEP_CYCLES_PER_TOKEN
from anchorprune_vllm.selection.kernels import gpu
from tests.support.triton_compiler import (
    A100,
    H100,
    L4,
    NVIDIA,
    compiled_for,
    loop_instructions,
    reported_by_ptxas,
)

POINTERS = {"distances": "*fp32", "squares": "*fp32", "items": "*i64"}
LOOP_POINTERS = {
    **{"weights": "*fp32", "anchor": "*i1"},
    **{"chosen": "*i64", "ascending": "*i64", "is_anchor": "*i1"},
}


@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: f"sm_{target.arch}")
def test_distances_compile_without_spills(target: GPUTarget, subtests: pytest.Subtests) -> None:
    for dtype, only_squares in (("bf16", True), ("bf16", False), ("fp16", False), ("fp32", False)):
        with subtests.test(dtype=dtype, only_squares=only_squares):
            sizes = gpu.tile_sizes(torch.float32 if dtype == "fp32" else torch.float16)
            options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
            types = {**POINTERS, "rows": f"*{dtype}", "width": "i32"}
            constants = {**sizes, "ONLY_SQUARES": only_squares}
            compiled = compiled_for(
                target, gpu.pair_distances, types, constants, multiples_of_16=["width"], **options
            )
            check_compiled(compiled, target)


@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: f"sm_{target.arch}")
def test_the_loop_compiles_without_spills(target: GPUTarget, subtests: pytest.Subtests) -> None:
    for tokens, adds in ((1024, False), (4096, False), (16384, False), (16384, True)):
        with subtests.test(tokens=tokens, adds=adds):
            check_compiled(compiled_loop(target, tokens, adds), target)


@cache
def compiled_loop(target: GPUTarget, tokens: int, adds: bool) -> CompiledKernel:
    sizes = gpu.loop_sizes(tokens)
    options = {"num_warps": sizes.pop("num_warps")}
    types = {**POINTERS, **LOOP_POINTERS}
    return compiled_for(target, gpu.choose, types, {"ADDS": adds, **sizes}, **options)


@pytest.mark.parametrize("target", [A100, L4, H100], ids=lambda target: f"sm_{target.arch}")
def test_a_step_of_the_loop_has_no_more_instructions_than_is_reckoned(
    target: GPUTarget, subtests: pytest.Subtests
) -> None:
    """A multiprocessor has four schedulers, each of which issues one of a warp in a cycle."""
    for tokens in (1024, 4096, 16384):
        with subtests.test(tokens=tokens):
            instructions = loop_instructions(compiled_loop(target, tokens, False))
            cycles = instructions * gpu.loop_sizes(tokens)["num_warps"] / 4
            assert 0.1 * tokens < cycles <= STEP_CYCLES_PER_TOKEN * tokens


@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: f"sm_{target.arch}")
def test_native_order_compiles_without_spills(target: GPUTarget) -> None:
    constants = {"BLOCK": gpu.ORDER["BLOCK"]}
    types = {**POINTERS, **LOOP_POINTERS}
    options = {"num_warps": gpu.ORDER["num_warps"]}
    check_compiled(
        compiled_for(target, gpu.put_in_native_order, types, constants, **options), target
    )


def check_compiled(compiled: CompiledKernel, target: GPUTarget) -> None:
    report = reported_by_ptxas(compiled, target)
    assert report.spilled_bytes == 0
    assert 0 < report.registers <= 255
    assert ".f64" not in compiled.asm["ptx"]
