# SPDX-License-Identifier: Apache-2.0
"""The Python half of the device: what a CPU build of torch leaves out of `torch.cuda`."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch

from tests.simcuda import waits

_CAPABILITY = (8, 0)
_PROPERTIES = SimpleNamespace(
    name="simulated",
    major=_CAPABILITY[0],
    minor=_CAPABILITY[1],
    total_memory=0,  # filled in below
    multi_processor_count=108,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=163 << 10,
    L2_cache_size=40 << 20,
    is_integrated=False,
    gcnArchName="",
)


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, end_event: Event) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 0.5  # milliseconds


class Stream(torch.Stream):
    """`torch.cuda.Stream`: there is one, whatever one is made."""

    cuda_stream = 0

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        return super().__new__(cls, device="cuda", priority=priority)


class _DeviceContext:
    """`torch.cuda.device`: there is one."""

    def __init__(self, *args: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> bool:
        return False


def complete_torch(library: ctypes.CDLL) -> None:
    """Make torch speak of the device as of one of CUDA's."""
    for name in ("total", "used", "peak"):
        getattr(library, f"simcuda_{name}_bytes").restype = ctypes.c_size_t
    waits.listen_through(library)
    for owner, functions in (
        (torch.cuda, _device() | _streams() | _memory(library)),
        (torch.accelerator, _accelerator(library)),
        (torch._C, _internals(library)),
    ):
        for name, function in functions.items():
            setattr(owner, name, function)


def _device() -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_device_count_nvml": lambda: 1,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": _DeviceContext,
        "device_of": _DeviceContext,
        "_DeviceGuard": _DeviceContext,
        "get_device_name": lambda device=None: _PROPERTIES.name,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "is_bf16_supported": lambda including_emulation=True: True,
        # Operators draw from the host's generator, unless they are given one.
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
    }


def _streams() -> dict[str, Any]:
    stream = Stream()
    return {
        "Event": Event,
        "Stream": Stream,
        "ExternalStream": Stream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "stream": lambda stream: _DeviceContext(),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: torch._C._accelerator_synchronizeDevice(0),
    }


def _memory(library: ctypes.CDLL) -> dict[str, Any]:
    used, peak = library.simcuda_used_bytes, library.simcuda_peak_bytes
    total = _PROPERTIES.total_memory = library.simcuda_total_bytes()
    return {
        "mem_get_info": lambda device=None: (total - used(), total),
        "memory_allocated": lambda device=None: used(),
        "memory_reserved": lambda device=None: used(),
        "max_memory_allocated": lambda device=None: peak(),
        "max_memory_reserved": lambda device=None: peak(),
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": used(),
            "allocated_bytes.all.peak": peak(),
        },
        "reset_peak_memory_stats": lambda device=None: library.simcuda_reset_peak(),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }


def _accelerator(library: ctypes.CDLL) -> dict[str, Any]:
    memory = _memory(library)
    same = ("memory_allocated", "memory_reserved", "max_memory_allocated", "memory_stats")
    return {
        **{name: memory[name] for name in (*same, "reset_peak_memory_stats", "empty_cache")},
        "empty_host_cache": lambda: None,
        "get_memory_info": memory["mem_get_info"],
    }


def _internals(library: ctypes.CDLL) -> dict[str, Any]:
    return {
        # Torch's compiler wants functions of Python, not of ctypes.
        "_cuda_set_sync_debug_mode": lambda mode: library.simcuda_set_sync_debug_mode(mode),
        "_cuda_get_sync_debug_mode": lambda: library.simcuda_get_sync_debug_mode(),
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_getDevice": lambda: 0,
        "_cuda_exchangeDevice": lambda device: 0,
        "_cuda_maybeExchangeDevice": lambda device: 0,
        "_cuda_getAllocatorBackend": lambda: "simulated",
        "_accelerator_emptyHostCache": lambda: None,
        "_set_blas_preferred_backend": lambda backend: None,
    }
