# SPDX-License-Identifier: Apache-2.0
"""What GPUs can do, from NVIDIA's data sheets, and how much of it is taken to be reached."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR_SHARE = 0.5
"""Share of the tensor cores' peak that our product of small tiles is taken to reach."""

PREFILL_SHARE = 0.55
"""Share of that peak that the language model's prefill is taken to reach."""

MEMORY_SHARE = 0.8
"""Share of the memory's bandwidth that anything is taken to reach."""

CACHE_BYTES_PER_CYCLE = 16
"""What one multiprocessor reads from the L2 cache, a quarter of what its port could take."""

LAUNCH_SECONDS = 2.5e-6
"""A kernel with next to nothing to do, from the end of one before it to its own."""

TORCH_HOST_SECONDS = 6e-6
"""What the host spends on one operation of torch."""

TRITON_HOST_SECONDS = 30e-6
"""What the host spends on one launch of a Triton kernel."""


@dataclass(frozen=True)
class Gpu:
    """The figures of a data sheet; half precision is dense, without sparsity."""

    name: str
    multiprocessors: int
    clock: float  # Hz, boost
    half_flops: float  # per second, bfloat16 or float16 on tensor cores
    single_flops: float  # per second, float32 outside of them
    memory_bandwidth: float  # bytes per second

    @property
    def cache_bandwidth(self) -> float:
        """Bytes per second that all multiprocessors together read from the L2 cache."""
        return CACHE_BYTES_PER_CYCLE * self.multiprocessors * self.clock


GPUS = (
    Gpu("A100 (80 GB, SXM)", 108, 1.410e9, 312e12, 19.5e12, 2.039e12),
    Gpu("H100 (80 GB, SXM)", 132, 1.830e9, 989e12, 67e12, 3.350e12),
    Gpu("L4", 58, 2.040e9, 121e12, 30.3e12, 0.300e12),
)


def gpu_named(name: str) -> Gpu | None:
    """Return the GPU that torch calls by this name, as "NVIDIA A100-SXM4-80GB"; None: not here."""
    return next(
        (gpu for gpu in GPUS if gpu.name.split()[0] in name.replace("-", " ").split()), None
    )
