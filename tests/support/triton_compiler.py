# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

A100 = GPUTarget("cuda", 80, 32)
MI300 = GPUTarget("hip", "gfx942", 64)


def compiled_for(
    target: GPUTarget,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    **options: int,
) -> CompiledKernel:
    """A kernel for arguments of these types ("*fp16" for a pointer), aligned as torch aligns."""
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, dict(constants), aligned)
    with TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)
        return triton.compile(source, target=target, options=options)
