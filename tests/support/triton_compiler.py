# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for GPUs that are not here, and what NVIDIA's assembler says of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

A100 = GPUTarget("cuda", 80, 32)
L4 = GPUTarget("cuda", 89, 32)
H100 = GPUTarget("cuda", 90, 32)
B200 = GPUTarget("cuda", 100, 32)
MI300 = GPUTarget("hip", "gfx942", 64)
NVIDIA = (A100, L4, H100, B200)

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def compiled_for(
    target: GPUTarget,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    multiples_of_16: Collection[str] = (),
    **options: int,
) -> CompiledKernel:
    """A kernel for arguments of these types ("*fp16" for a pointer), aligned as torch aligns.

    multiples_of_16: names of whole numbers that are; Triton compiles for them apart.
    """
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in multiples_of_16
    }
    source = ASTSource(kernel, signature, dict(constants), aligned)
    with TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)
        return triton.compile(source, target=target, options=options)


class Report(NamedTuple):
    """What `ptxas -v` prints."""

    registers: int
    spilled_bytes: int


def reported_by_ptxas(compiled: CompiledKernel, target: GPUTarget) -> Report:
    """Assemble a kernel for an NVIDIA GPU once more, and read what the assembler reports."""
    name = "ptxas" if target.arch < 90 else "ptxas-blackwell"  # the newer one knows Hopper too
    assembler = _TOOLS / name
    arch = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)[1]
    with TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        done = subprocess.run(
            [assembler, "-v", "--gpu-name", arch, source, "-o", Path(folder, "kernel.cubin")],
            capture_output=True,
            text=True,
            check=True,
        )
    registers = re.search(r"Used (\d+) registers", done.stderr)[1]
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    return Report(int(registers), sum(map(int, spilled)))


def loop_instructions(compiled: CompiledKernel) -> int:
    """Return how many instructions a thread executes in one pass of a kernel's longest loop."""
    with TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        done = subprocess.run(
            [_TOOLS / "cuobjdump", "-sass", binary], capture_output=True, text=True, check=True
        )
    listing = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", done.stdout)
    places = [int(place, 16) for place, _ in listing]
    loops = [
        (start, end)
        for end, (_, instruction) in zip(places, listing, strict=True)
        for start in (int(n, 16) for n in re.findall(r"\bBRA\S* .*?0x([0-9a-f]+)", instruction))
        if start < end
    ]
    start, end = max(loops, key=lambda loop: loop[1] - loop[0])
    return sum(start <= place <= end for place in places)
