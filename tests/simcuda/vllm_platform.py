# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA platform on the device: all of it, but for kernels that only a GPU has."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from tests.simcuda.environment import LIBRARY

# Libraries of vLLM's CUDA build, imported for their operators alone.
_CUDA_LIBRARIES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
)
# Operators that tell whether a kernel is there.
_CUDA_QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_sparse_scaled_mm_supported",
    "cutlass_group_gemm_supported",
)
# Operators that vLLM looks up when its compiler is imported, as for Gemma 4, and that nothing runs.
_FUSED_OPERATORS = (
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "fused_qk_norm_rope",
    "silu_and_mul_quant",
    "silu_and_mul_per_block_quant",
)
_SHARED_MEMORY = "get_max_shared_memory_per_block_device_attribute"


def platform() -> str | None:
    """vLLM's entry point: name the platform's class, or None where there is no simulated device."""
    return f"{__name__}.SimulatedCudaPlatform" if os.environ.get(LIBRARY) else None


def __getattr__(name: str) -> Any:
    if name != "SimulatedCudaPlatform":
        raise AttributeError(name)
    globals()[name] = _make_platform()
    return globals()[name]


def _make_platform() -> type[Any]:
    _do_without_cuda_libraries()
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    class SimulatedCudaPlatform(NonNvmlCudaPlatform):
        """The kernels are the CPU library's."""

        dist_backend = "gloo"

        @classmethod
        def import_kernels(cls) -> None:
            CpuPlatform.import_kernels()

        @classmethod
        def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
            return AttentionBackendEnum.CPU_ATTN.get_path()

        @classmethod
        def get_vit_attn_backend(cls, *args: Any, **kwargs: Any) -> AttentionBackendEnum:
            return AttentionBackendEnum.TORCH_SDPA

        @classmethod
        def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:
            from vllm.config.kernel import IrOpPriorityConfig

            return IrOpPriorityConfig.with_default(["native"])

        @classmethod
        def use_custom_allreduce(cls) -> bool:
            return False

    return SimulatedCudaPlatform


_declared: list[Any] = []  # torch forgets what a Library declared once nobody holds it


def _do_without_cuda_libraries() -> None:
    import torch

    for name in _CUDA_LIBRARIES:
        sys.modules.setdefault(name, ModuleType(name))
    operators = torch.library.Library("_C", "FRAGMENT")
    for name in _CUDA_QUESTIONS:
        operators.define(f"{name}(int capability) -> bool")
        operators.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    for name in _FUSED_OPERATORS:
        operators.define(f"{name}() -> ()")
    attributes = torch.library.Library("_C_cuda_utils", "FRAGMENT")
    attributes.define(f"{_SHARED_MEMORY}(int device) -> int")
    attributes.impl(_SHARED_MEMORY, lambda device: 163 * 1024, "CompositeExplicitAutograd")  # A100
    _declared.extend([operators, attributes])
