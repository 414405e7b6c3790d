# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter on the device's memory, as strict about pointers as a launch on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from tests.simcuda.triton_forms import note_form


def launch_on_the_device(interpreter: Any) -> None:
    """Let kernels use device tensors in place, where the interpreter would copy them."""

    def tensors_in(arguments: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for argument in arguments:
            if isinstance(argument, tuple):
                found += tensors_in(argument)
            elif hasattr(argument, "data_ptr"):
                found.append(interpreter._unwrap_tensor(argument))
        return found

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

    def before(executor: Any, args: Any, kwargs: Any) -> Any:
        note_form(executor, args, kwargs)
        torch.ops.simcuda.before_kernel(tensors_in((*args, *kwargs.values())))
        return [on_host(arg) for arg in args], {name: on_host(arg) for name, arg in kwargs.items()}

    def after(executor: Any, args: Any, args_on_host: Any, kwargs: Any, *rest: Any) -> None:
        torch.ops.simcuda.after_kernel(tensors_in((*args, *kwargs.values())))

    interpreter.GridExecutor._init_args_hst = before
    interpreter.GridExecutor._restore_args_dev = after
