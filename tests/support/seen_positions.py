# SPDX-License-Identifier: Apache-2.0
"""The positions that a language model in an engine receives, token by token."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from vllm import LLM

Positions = dict[int, tuple[int, ...]]
Call = tuple[str, int, list[list[int]]]
"""Part of a forward call: request, its first token, and the positions of that and those after."""


def watch_positions(llm: LLM) -> None:
    """Begin to record; recording lasts as long as the engine."""
    llm.collective_rpc(_watch)


def seen_positions(llm: LLM) -> dict[str, list[Positions]]:
    """Since last asked, request -> for each of its starts, token -> position in each channel.

    A request starts again at a token that it has computed before.
    """
    return llm.collective_rpc(_take)[0]


def seen_calls(llm: LLM) -> list[Call]:
    """All parts of forward calls since last asked, in order."""
    return llm.collective_rpc(_take_calls)[0]


def _watch(worker: Any) -> None:
    worker.anchorprune_positions = []
    watch = _watch_v2 if hasattr(worker.model_runner, "req_states") else _watch_v1
    watch(worker, worker.model_runner)


def _watch_v1(worker: Any, runner: Any) -> None:
    scheduled: dict[str, int] = {}
    execute = runner.execute_model

    def execute_and_note(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled.clear()
        scheduled.update(scheduler_output.num_scheduled_tokens)
        return execute(scheduler_output, *args, **kwargs)

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = _channels(kwargs)
        batch, start = runner.input_batch, 0
        for index, request in enumerate(batch.req_ids):
            count = scheduled[request]
            first = int(batch.num_computed_tokens_cpu[index])
            columns = positions[:, start : start + count].T.tolist()
            worker.anchorprune_positions.append((request, first, columns))
            start += count

    runner.execute_model = execute_and_note
    runner.model.register_forward_pre_hook(record, with_kwargs=True)


def _watch_v2(worker: Any, runner: Any) -> None:
    prepare = runner.prepare_inputs
    batches = []

    def prepare_and_note(*args: Any, **kwargs: Any) -> Any:
        batches[:] = [prepare(*args, **kwargs)]
        return batches[0]

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions, (batch,) = _channels(kwargs), batches
        for request, start, end in zip(
            batch.req_ids, batch.query_start_loc_np, batch.query_start_loc_np[1:], strict=False
        ):
            first = int(batch.positions[start])  # in vLLM's own count, before native positions
            columns = positions[:, start:end].T.tolist()
            worker.anchorprune_positions.append((request, first, columns))

    runner.prepare_inputs = prepare_and_note
    runner.model.register_forward_pre_hook(record, with_kwargs=True)


def _channels(kwargs: dict[str, Any]) -> Any:
    """The positions that a model is called with, as [channels, tokens]."""
    positions = kwargs["positions"].clone()
    return positions[None] if positions.ndim == 1 else positions


def _take(worker: Any) -> dict[str, list[Positions]]:
    taken: dict[str, list[Positions]] = defaultdict(lambda: [{}])
    for request, first, columns in _take_calls(worker):
        starts = taken[request]
        if first in starts[-1]:
            starts.append({})
        starts[-1].update({first + i: tuple(column) for i, column in enumerate(columns)})
    return dict(taken)


def _take_calls(worker: Any) -> list[Call]:
    taken = list(worker.anchorprune_positions)
    worker.anchorprune_positions.clear()
    return taken
