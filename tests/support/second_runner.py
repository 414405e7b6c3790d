# SPDX-License-Identifier: Apache-2.0
"""Engines on vLLM's second model runner, which needs Triton: here its interpreter runs the kernels.

Triton asks whether to interpret when it is imported, and vLLM whether Triton has a driver, so these
engines live in a process of their own that is told both beforehand. It is started once and lives as
long as the tests:

    with second_runner(model, 16, max_num_batched_tokens=64) as llm:
        llm.generate(...)  # as if it were an `LLM` of this process

Functions and arguments go there by pickle, results come back the same way, and what is raised there
is raised here.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, reduce
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@contextmanager
def second_runner(model: Path, budget: int | str | None, **options: Any) -> Iterator[RemoteEngine]:
    """Start an engine as `make_engine` does, on the second runner."""
    number = next(_numbers)
    _ask(_start, number, model, budget, options)
    try:
        yield RemoteEngine(number)
    finally:
        _ask(_stop, number)


class RemoteEngine:
    """Stands for an `LLM` of the other process, or for a method of it, which it then calls."""

    def __init__(self, number: int, path: tuple[str, ...] = ()) -> None:
        self._number, self._path = number, path

    def __getattr__(self, name: str) -> RemoteEngine:
        if name.startswith("__"):
            raise AttributeError(name)
        return RemoteEngine(self._number, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(_call, self._number, self._path, args, kwargs)


_numbers = count()


@cache
def _process() -> ProcessPoolExecutor:
    new = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=new, initializer=_prepare)


def _ask(function: Callable[..., Any], *args: Any) -> Any:
    # In one piece, as ProcessPoolExecutor would send tensors as handles of shared memory.
    return pickle.loads(_process().submit(_answer, pickle.dumps((function, args))).result())


# -- in the other process -------------------------------------------------------------------------

_engines: dict[int, tuple[ExitStack, Any]] = {}


def _answer(pickled: bytes) -> bytes:
    function, args = pickle.loads(pickled)
    return pickle.dumps(function(*args))


def _start(number: int, model: Path, budget: int | str | None, options: dict[str, Any]) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from tests.support.engine import make_engine
    from tests.support.families import groups_with_experts

    made = ExitStack()
    made.enter_context(groups_with_experts())
    llm = made.enter_context(make_engine(model, budget, **options))
    _engines[number] = made, llm
    assert llm.collective_rpc(_runner_class) == [GPUModelRunner]


def _runner_class(worker: Any) -> type:
    return type(worker.model_runner).__mro__[1]  # the first is the CPU's variant


def _stop(number: int) -> None:
    made, _ = _engines.pop(number)
    made.close()


def _call(number: int, path: tuple[str, ...], args: Any, kwargs: Any) -> Any:
    return reduce(getattr, path, _engines[number][1])(*args, **kwargs)


def _prepare() -> None:
    assert "triton" not in sys.modules, "too late: Triton is imported"
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)  # type: ignore[assignment]

    _take_masks_of_integers()

    import vllm.v1.engine.core
    from vllm.platforms.cpu import CpuPlatform

    # One engine that ends must leave the process group to the others.
    vllm.v1.engine.core.cleanup_dist_env_and_memory = gc.collect
    CpuPlatform.check_and_update_config = leave_scheduling(CpuPlatform.check_and_update_config)
    gc.freeze()  # vLLM collects garbage at each start of an engine: not among what is imported


def _take_masks_of_integers() -> None:
    """Mend masked loads: Triton 3.9's interpreter refuses a mask that a reduction took part in."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load

    def create_masked_load(self: InterpreterBuilder, ptrs: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, ptrs, mask, *rest)

    InterpreterBuilder.create_masked_load = create_masked_load


def leave_scheduling(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Schedule asynchronously where a GPU would: the CPU's platform switches that off."""

    def check_and_update_config(vllm_config: Any) -> None:
        is_asynchronous = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_asynchronous

    return staticmethod(check_and_update_config)  # type: ignore[return-value]
