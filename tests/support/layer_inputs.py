# SPDX-License-Identifier: Apache-2.0
"""What enters the layers of a language model in an engine, and what leaves it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def watch_layers(llm: Any) -> None:
    """Begin to record; recording lasts as long as the engine."""
    llm.collective_rpc(_watch)


def seen_layers(llm: Any) -> Tensor | None:
    """Of all tokens computed since last asked, the input of each layer, and the model's output.

    Returns [layers + 1, T, H], or None if there were no tokens.
    """
    return llm.collective_rpc(_take)[0]


def _watch(worker: Any) -> None:
    model = worker.model_runner.model
    language_model = model.get_language_model()
    layers = getattr(language_model, "model", language_model).layers
    seen: list[list[Tensor]] = [[] for _ in range(len(layers) + 1)]
    worker.anchorprune_layers = seen

    def note_input(number: int) -> Any:
        def note(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
            given = dict(zip(("positions", "hidden_states", "residual"), args, strict=False))
            given |= kwargs
            states, residual = given["hidden_states"], given["residual"]
            seen[number].append(states.clone() if residual is None else states + residual)

        return note

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(note_input(number), with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: seen[-1].append(output.clone()))


def _take(worker: Any) -> Tensor | None:
    if not worker.anchorprune_layers[0]:
        return None
    taken = torch.stack([torch.cat(calls) for calls in worker.anchorprune_layers])
    for calls in worker.anchorprune_layers:
        calls.clear()
    return taken
