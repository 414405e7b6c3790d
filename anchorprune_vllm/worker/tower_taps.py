# SPDX-License-Identifier: Apache-2.0
"""The signals that only some methods need, taken from the attention of a vision tower.

Queries and keys are taken by a forward pre-hook on vLLM's attention modules: nothing is recomputed,
and no forward method is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

from anchorprune_vllm.methods.registry import Signal
from anchorprune_vllm.signals.attention import received_attention

Measure = Callable[[Tensor, Tensor, Sequence[int], float], Tensor]
"""Query and key [T, heads, head size], the lengths of the segments that attend within themselves,
and the scale of the products, to a score [T] summed over heads."""

Where = Literal["last", "middle"]
"""The attention that a signal comes from: the tower's last, or HiPrune's, in which it sees
objects."""


@dataclass(frozen=True)
class SignalSpec:
    """One signal: where it is taken, and whether it is a score or the keys themselves."""

    where: Where
    is_score: bool
    """A score is a mean over the heads of all ranks; of keys, those of all ranks are gathered."""

    def layout(
        self, key_shape: tuple[int, int], dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the signal of one token, as it is cached."""
        return ((), torch.float32) if self.is_score else (key_shape, dtype)

    def of_all_ranks(self, own: Tensor, heads: int, ranks: int) -> Tensor:
        """Return the signal [T, ...] of the heads of all ranks, which every rank must see alike.

        Where each rank has all heads, all are counted the same number of times.

        own: a score summed over the heads of this rank, or its keys.
        heads: the heads of this rank.
        """
        if self.is_score:
            summed = tensor_model_parallel_all_reduce(own) if ranks > 1 else own
            return summed / (heads * ranks)
        return tensor_model_parallel_all_gather(own.contiguous(), dim=1) if ranks > 1 else own


SIGNALS: Mapping[Signal, SignalSpec] = {
    "importance": SignalSpec("last", is_score=True),
    "keys": SignalSpec("last", is_score=False),
    "object_attention": SignalSpec("middle", is_score=True),
}
"""The signals of the tower, by the names of the fields of `MediaFeatures`."""

Taken = Mapping[Any, tuple[Tensor, Tensor]]
"""Attention module to the query and key [T, heads, head size] that entered it."""


class SignalTap:
    """Collects what enters some attention modules, while it is entered itself."""

    def __init__(self, attentions: Iterable[Any]) -> None:
        self._calls: dict[Any, list[tuple[Tensor, Tensor]]] = {module: [] for module in attentions}
        self._hooks: list[Any] = []

    def __enter__(self) -> SignalTap:
        self._hooks = [
            module.register_forward_pre_hook(self._note, with_kwargs=True) for module in self._calls
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> Taken | None:
        """Return what entered since the last call; None if one of the modules was not called."""
        if not self._calls or not all(self._calls.values()):
            return None
        taken = {}
        for module, calls in self._calls.items():
            queries, keys = zip(*calls, strict=True)
            taken[module] = calls[0] if len(calls) == 1 else (torch.cat(queries), torch.cat(keys))
            calls.clear()
        return taken

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        self._calls[module].append(query_and_key(module, args, kwargs))


def measured(
    needed: Collection[Signal],
    attentions: Mapping[Where, Any],
    taken: Taken,
    segments: Sequence[int],
    ranks: int,
    importance: Measure,
) -> dict[str, Tensor]:
    """Return the signals [T, ...] of the tower's tokens that a method needs.

    Args:
        needed: the names of signals; those that do not come from the tower are passed over.
        attentions: the modules that were tapped.
        taken: what a `SignalTap` took of them.
        segments: how many tokens attend to each other, one segment behind the other; T in all.
        ranks: how many ranks share the heads.
        importance: how importance is measured; other scores are the attention received.
    """
    found: dict[str, Tensor] = {}
    for name, spec in SIGNALS.items():
        if name in needed:
            module = attentions[spec.where]
            query, own = taken[module]
            if spec.is_score:
                measure = importance if name == "importance" else received_attention
                own = measure(query, own, segments, module.scale)
            found[name] = spec.of_all_ranks(own, query.shape[1], ranks)
    return found


def query_and_key(module: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return what enters an attention as [tokens, heads, head size] each."""
    query, key = args[:2] if len(args) > 1 else (kwargs["query"], kwargs["key"])
    query = query.reshape(-1, module.num_heads, module.head_size)
    key = key.reshape(-1, module.num_kv_heads, module.head_size)
    if module.num_kv_heads != module.num_heads:
        key = key.repeat_interleave(module.num_heads // module.num_kv_heads, dim=1)
    return query, key
