# SPDX-License-Identifier: Apache-2.0
"""The positions that a language model in an engine receives, token by token."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from vllm import LLM

Positions = dict[int, tuple[int, ...]]


def watch_positions(llm: LLM) -> None:
    """Begin to record; recording lasts as long as the engine."""
    llm.collective_rpc(_watch)


def seen_positions(llm: LLM) -> dict[str, list[Positions]]:
    """Since last asked, request -> for each of its starts, token -> position in each channel.

    A request starts again at a token that it has computed before.
    """
    return llm.collective_rpc(_take)[0]


def _watch(worker: Any) -> None:
    runner = worker.model_runner
    worker.anchorprune_positions = []
    scheduled: dict[str, int] = {}
    execute = runner.execute_model

    def execute_and_note(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled.clear()
        scheduled.update(scheduler_output.num_scheduled_tokens)
        return execute(scheduler_output, *args, **kwargs)

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs["positions"].clone()
        if positions.ndim == 1:
            positions = positions[None]
        batch, start = runner.input_batch, 0
        for index, request in enumerate(batch.req_ids):
            count = scheduled[request]
            first = int(batch.num_computed_tokens_cpu[index])
            columns = positions[:, start : start + count].T.tolist()
            worker.anchorprune_positions.append((request, first, columns))
            start += count

    runner.execute_model = execute_and_note
    runner.model.register_forward_pre_hook(record, with_kwargs=True)


def _take(worker: Any) -> dict[str, list[Positions]]:
    taken: dict[str, list[Positions]] = defaultdict(lambda: [{}])
    for request, first, columns in worker.anchorprune_positions:
        starts = taken[request]
        if first in starts[-1]:
            starts.append({})
        starts[-1].update({first + i: tuple(column) for i, column in enumerate(columns)})
    worker.anchorprune_positions.clear()
    return dict(taken)
