# SPDX-License-Identifier: Apache-2.0
"""Puts the device in place when torch, Triton and vLLM are imported."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from tests.simcuda.build import torch_folder

AfterImport = Callable[[Any], None]


def load_with_torch(library: Path | str) -> None:
    """From now on, `import torch` has the device."""
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch is imported already, and asks for CUDA once: run pytest as `python -m pytest -p "
            "tests.simcuda.pytest_plugin`, other programs in tests.simcuda.environment"
        )
    sys.meta_path.insert(0, _Finder(str(library)))


class _Finder:
    """Lets the others find modules, and does something before or after a few of them load."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._after: dict[str, AfterImport] = {
            "torch": self._patch_torch,
            "triton.backends": _add_triton_backend,
            "triton.runtime.interpreter": _interpret_on_the_device,
            "vllm.model_executor.layers.rotary_embedding.common": _rotate_without_cuda,
            "vllm.model_executor.layers.rotary_embedding.mrope": _rotate_quickly,
            "vllm.v1.sample.ops.topk_topp_sampler": _sample_without_triton,
        }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        after = self._after.get(name)
        if after is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: Any) -> None:
                if name == "torch":
                    self._load_library()
                load(module)
                after(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec

    def _load_library(self) -> None:
        """Before torch itself: it makes its CUDA hooks once, when first asked about CUDA."""
        for name in ("libtorch_global_deps.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
        self._loaded = ctypes.CDLL(self._library, ctypes.RTLD_GLOBAL)

    def _patch_torch(self, torch: Any) -> None:
        from tests.simcuda.torch_cuda import complete_torch

        complete_torch(self._loaded)


def _add_triton_backend(backends: Any) -> None:
    """Without a driver that is active, vLLM takes Triton for unusable."""

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Driver)


def _interpret_on_the_device(interpreter: Any) -> None:
    from tests.simcuda.triton_launch import launch_on_the_device
    from tests.support.triton_bfloat16 import multiply_bfloat16

    launch_on_the_device(interpreter)
    multiply_bfloat16(interpreter)


def _rotate_without_cuda(module: Any) -> None:
    """vLLM calls this kernel of its CUDA library without asking whether it is there."""
    module.ApplyRotaryEmb.forward_cuda = module.ApplyRotaryEmb.forward_native


def _rotate_quickly(module: Any) -> None:
    """The interpreter would run this kernel of every layer for minutes; vLLM has it in torch."""
    module.MRotaryEmbedding.forward_cuda = module.MRotaryEmbedding.forward_native


def _sample_without_triton(module: Any) -> None:
    """The interpreter cannot run this kernel; vLLM has the same in torch."""
    module.HAS_TRITON = False
