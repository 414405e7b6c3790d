# SPDX-License-Identifier: Apache-2.0
"""The methods that choose tokens, by name: ours, the published ones, and those of other packages.

A method is a function from one item's `Candidates` to `KeptTokens`, with options as keyword
arguments. Other packages add methods through the entry point group `anchorprune.methods`.

Names are known without importing torch, because a method is imported only when it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import torch

    from anchorprune_vllm.config import PruneConfig
    from anchorprune_vllm.selection import Candidates, KeptTokens

ANCHORPRUNE = "anchorprune"
ENTRY_POINTS = "anchorprune.methods"

_HERE = "anchorprune_vllm.methods"
_PUBLISHED = {
    "visionzip": f"{_HERE}.visionzip:visionzip",
    "divprune": f"{_HERE}.divprune:divprune",
    "cdpruner": f"{_HERE}.cdpruner:cdpruner",
    "prumerge+": f"{_HERE}.prumerge:prumerge_plus",
    "fastervlm": f"{_HERE}.fastervlm:fastervlm",
    "vispruner": f"{_HERE}.vispruner:vispruner",
    "hiprune": f"{_HERE}.hiprune:hiprune",
    "scope": f"{_HERE}.scope:scope",
    "random": f"{_HERE}.controls:random_tokens",
    "uniform": f"{_HERE}.controls:uniform_grid",
    "first": f"{_HERE}.controls:first_tokens",
}

Signal = Literal["importance", "features", "projected", "keys", "object_attention"]
"""Fields of `Candidates` that are computed only for methods that need them. Relevance is computed
from `features`, for methods that use the question."""

_USUAL: frozenset[Signal] = frozenset({"importance", "features"})

_Function = TypeVar("_Function", bound=Callable[..., Any])


def method(
    *needs: Signal, uses_query: bool = False, most_tokens: int | None = None
) -> Callable[[_Function], _Function]:
    """Return a decorator that declares what a method needs.

    Signals that a method does not need are not computed: without `importance`, the attention of the
    vision tower is not read, and without `features`, nothing is compared with words. A method
    without this decorator gets both and is assumed to use the question.

    Args:
        needs: All signals that the method reads.
        uses_query: Whether the question makes a difference.
        most_tokens: The most tokens that an item may have, for methods whose memory or time grows
            faster than linearly; requests with larger items are refused.
    """

    def decorate(function: _Function) -> _Function:
        wanted = frozenset(needs) | ({"features"} if uses_query else frozenset())
        function.needs, function.uses_query = wanted, uses_query  # type: ignore[attr-defined]
        function.most_tokens = most_tokens  # type: ignore[attr-defined]
        return function

    return decorate


@dataclass(frozen=True)
class Method:
    """A method with its options, ready to select from several items."""

    select: Callable[[Sequence[Candidates]], list[KeptTokens]]
    needs: frozenset[Signal] = _USUAL
    uses_query: bool = True
    """Whether the question makes a difference; if not, all questions share the kept tokens."""
    most_tokens: int | None = None
    """The most tokens that an item may have, or None for any number."""


def names() -> tuple[str, ...]:
    """Return the names of all methods."""
    return (ANCHORPRUNE, *_PUBLISHED, *_installed())


def method_of(config: PruneConfig) -> Method:
    """Return the method that the settings choose."""
    if config.method == ANCHORPRUNE:
        from anchorprune_vllm.selection import select_batch

        return Method(lambda items: select_batch(items, config.anchor))
    function, options = _load(config.method), dict(config.method_options)
    return Method(
        lambda items: [function(item, **options) for item in items],
        needs=getattr(function, "needs", _USUAL),
        uses_query=uses_query(config.method),
        most_tokens=getattr(function, "most_tokens", None),
    )


def uses_query(name: str) -> bool:
    """Return whether the question makes a difference to a method."""
    return name == ANCHORPRUNE or getattr(_load(name), "uses_query", True)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that a method does not have."""
    if not options:
        return
    if name == ANCHORPRUNE:
        raise ValueError(
            "anchorprune: method_options are for the other methods; give those of anchorprune "
            "(tau, patience, stage2, ...) beside the budget"
        )
    parameters = inspect.signature(_load(name)).parameters.values()
    allowed = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for option in options:
        if option not in allowed:
            near = get_close_matches(str(option), allowed, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"anchorprune: the method {name} has no option {option!r}{hint}; "
                f"it has: {', '.join(allowed) or 'none'}"
            )


def check_method(config: PruneConfig) -> None:
    """Raise ValueError if a method fails on a small item; in a server it would end the engine."""
    if config.method == ANCHORPRUNE:
        return
    item = probe_item()
    tokens, kept = len(item.features), item.budget
    for asked in (item, item._replace(relevance=None)):
        try:
            method = method_of(config)
            (found,) = method.select([_only_needed(asked, method.needs)])
            indices = [int(index) for index in found.indices]
            shape = [*found.rows_of(item.features).shape]
        except Exception as error:
            raise ValueError(
                f"anchorprune: the method {config.method} fails on an item of {tokens} tokens "
                f"({type(error).__name__}: {error}); fix it or its options "
                f"{dict(config.method_options)}"
            ) from error
        is_distinct = len(set(indices)) == kept and set(indices) <= set(range(tokens))
        if not is_distinct or shape != [kept, 4]:
            raise ValueError(
                f"anchorprune: the method {config.method} returned the tokens {indices} and rows "
                f"of shape {shape} for a budget of {kept} of {tokens} tokens; it must return "
                f"{kept} distinct tokens from 0 to {tokens - 1}, and as many rows"
            )


def probe_item(device: torch.device | None = None) -> Candidates:
    """Return an item of twelve tokens with all signals, to try a method on."""
    import torch

    from anchorprune_vllm.selection import Candidates

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(12, *shape, generator=noise, dtype=torch.float32, device="cpu").to(device)

    noise = torch.Generator("cpu").manual_seed(0)
    return Candidates(
        relevance=draw(),
        features=draw(4),
        importance=draw(),
        budget=5,
        context_features=draw(4),
        projected=draw(4),
        keys=draw(2, 3),
        object_attention=draw(),
        grids=((3, 4),),
    )


def _only_needed(item: Candidates, needs: frozenset[Signal]) -> Candidates:
    """Return an item without the signals that are not needed, as a server would pass it."""
    return item._replace(
        importance=item.importance if "importance" in needs else item.importance[:0],
        projected=item.projected if "projected" in needs else None,
        keys=item.keys if "keys" in needs else None,
        object_attention=item.object_attention if "object_attention" in needs else None,
    )


def _load(name: str) -> Callable[..., Any]:
    if name in _PUBLISHED:
        module, function = _PUBLISHED[name].split(":")
        return getattr(import_module(module), function)
    return _installed()[name].load()


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the entry points of other packages by name; none replaces one of ours."""
    return {
        point.name: point
        for point in entry_points(group=ENTRY_POINTS)
        if point.name != ANCHORPRUNE and point.name not in _PUBLISHED
    }
