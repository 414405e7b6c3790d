# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter on the device's memory, as strict about pointers as a launch on CUDA."""

from __future__ import annotations

from typing import Any

import torch


def launch_on_the_device(interpreter: Any) -> None:
    """Let kernels use device tensors in place, where the interpreter would copy them."""

    def on_host(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return interpreter._tuple_create(argument, map(on_host, argument))
        if not hasattr(argument, "data_ptr"):
            return argument
        tensor = interpreter._unwrap_tensor(argument)
        if tensor.is_cuda:
            tensor = torch.ops.simcuda.host_alias(tensor)
        elif not tensor.is_pinned():
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return interpreter._rewrap_tensor(tensor, original_tensor=argument)

    def to_host(executor: Any, args: Any, kwargs: Any) -> Any:
        return [on_host(arg) for arg in args], {name: on_host(arg) for name, arg in kwargs.items()}

    def back(executor: Any, *arguments: Any) -> None:
        """Kernels have written where the tensors are."""

    interpreter.GridExecutor._init_args_hst = to_host
    interpreter.GridExecutor._restore_args_dev = back
