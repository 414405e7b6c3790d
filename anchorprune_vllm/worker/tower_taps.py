# SPDX-License-Identifier: Apache-2.0
"""Signals that only some methods need, read from the attention of a vision tower.

A forward pre-hook on vLLM's attention modules reads queries and keys, so nothing is recomputed and
no forward method is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

from anchorprune_vllm.methods.registry import Signal
from anchorprune_vllm.signals.attention import received_attention

Measure = Callable[[Tensor, Tensor, Sequence[int], float], Tensor]
"""A function from query and key [T, heads, head size], the lengths of the segments whose tokens
attend to each other, and the scale of the products, to a score [T] that is summed over heads."""

Where = Literal["last", "middle"]
"""The attention that a signal comes from: the tower's last one, or one in the middle, in which
HiPrune finds objects."""


@dataclass(frozen=True)
class SignalSpec:
    """One signal: which attention it comes from, and whether it is a score or the keys."""

    where: Where
    is_score: bool
    """Whether it is a score, averaged over the heads of all ranks, or keys, gathered from them."""

    def layout(
        self, key_shape: tuple[int, int], dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of the signal of one token in the feature cache."""
        return ((), torch.float32) if self.is_score else (key_shape, dtype)

    def of_all_ranks(self, own: Tensor, heads: int, ranks: int) -> Tensor:
        """Return the signal [T, ...] over the heads of all ranks, equal on every rank.

        If each rank has all heads, every head counts equally often, and the mean is still right.

        Args:
            own: A score summed over the heads of this rank, or the keys of this rank.
            heads: The number of heads of this rank.
            ranks: The number of ranks that share the heads.
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
"""The signals of the tower, by their field names in `MediaFeatures`."""

Taken = Mapping[Any, tuple[Tensor, Tensor]]
"""The query and key [T, heads, head size] that entered each attention module."""


@contextmanager
def tapped(
    attentions: Iterable[Any], look: Callable[[Any, Tensor, Tensor], None]
) -> Iterator[None]:
    """Call `look(module, query, key)` before each call of one of the attention modules.

    Query and key have the shape [T, heads, head size].
    """

    def tap(module: Any, args: Any, kwargs: Any) -> None:
        look(module, *query_and_key(module, args, kwargs))

    with ExitStack() as hooks:
        for module in attentions:
            hooks.callback(module.register_forward_pre_hook(tap, with_kwargs=True).remove)
        yield


class RecordedCalls:
    """The queries and keys of some attention modules, recorded until they are taken."""

    def __init__(self, attentions: Iterable[Any]) -> None:
        self._calls: dict[Any, list[tuple[Tensor, Tensor]]] = {module: [] for module in attentions}

    def add(self, module: Any, query: Tensor, key: Tensor) -> None:
        """Record one call of a module."""
        self._calls[module].append((query, key))

    def take(self) -> Taken | None:
        """Return what was recorded since the last call, or None if a module was not called."""
        if not self._calls or not all(self._calls.values()):
            return None
        taken = {}
        for module, calls in self._calls.items():
            queries, keys = zip(*calls, strict=True)
            taken[module] = calls[0] if len(calls) == 1 else (torch.cat(queries), torch.cat(keys))
            calls.clear()
        return taken


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
        needed: The names of signals; those that do not come from the tower are ignored.
        attentions: The modules that were tapped.
        taken: The query and key of each of them.
        segments: The lengths of the segments whose tokens attend to each other, T in total.
        ranks: The number of ranks that share the heads.
        importance: How importance is measured; other scores are the attention received.
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
    """Return the query and key that enter an attention, each [tokens, heads, head size]."""
    query, key = args[:2] if len(args) > 1 else (kwargs["query"], kwargs["key"])
    query = query.reshape(-1, module.num_heads, module.head_size)
    key = key.reshape(-1, module.num_kv_heads, module.head_size)
    if module.num_kv_heads != module.num_heads:
        key = key.repeat_interleave(module.num_heads // module.num_kv_heads, dim=1)
    return query, key
