# SPDX-License-Identifier: Apache-2.0
"""Triton kernels on CPU tensors: Triton's interpreter runs them, in a process of its own.

Triton asks whether to interpret when it is imported, and the tests' own process, which imports
vLLM, must stay as it is. So the process is started once, lives as long as the tests, and is asked
to call functions:

    kept = interpreted(module_with_kernels.launch, tensor, 0.5, steps=3)

Functions go there by name, so they stand at the top of a module that can be imported; arguments and
result go as copies. What is raised there is raised here.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

from tests.support.triton_bfloat16 import multiply_bfloat16


def interpreted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), in the process whose Triton kernels are interpreted."""
    # In one piece, as ProcessPoolExecutor would send tensors as handles of shared memory.
    call = pickle.dumps((function, args, kwargs))
    return pickle.loads(_process().submit(_call, call).result())


@cache
def _process() -> ProcessPoolExecutor:
    new = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=new, initializer=_interpret_kernels)


def _call(pickled: bytes) -> bytes:
    function, args, kwargs = pickle.loads(pickled)
    return pickle.dumps(function(*args, **kwargs))


def _interpret_kernels() -> None:
    assert "triton" not in sys.modules, "too late: Triton is imported"
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    multiply_bfloat16(interpreter)
