# SPDX-License-Identifier: Apache-2.0
"""The settings of one request: its own budget and question, and the identity of its items."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs

from anchorprune_vllm.budget import Budget
from anchorprune_vllm.checks import check_keys
from anchorprune_vllm.config import CONFIG_KEY, SCOPES, SETTINGS, resembles_config_key

# The model's context bounds the words of a prompt, but not those of an override.
_LONGEST_QUERY = 20_000

_OF_A_REQUEST = ("budget", "query")


@dataclass(frozen=True)
class ItemRequest:
    """What a request asks of one image or video, before its candidates are counted."""

    media_hash: str
    budget: Budget
    query: str
    lacks_query: bool
    """Whether a question was looked for and none was found."""

    def identity(self, fingerprint: str) -> dict[str, str]:
        """Return what determines the embeddings of the item, besides the media itself."""
        # If all tokens stay, the question changes nothing, and all questions share one entry.
        query = "" if self.budget.keeps_all else self.query
        return {"budget": str(self.budget), "query": query, "settings": fingerprint}


def check_request_keys(keys: Iterable[str], known: Callable[[], Collection[str]]) -> None:
    """Raise ValueError for keys of `mm_processor_kwargs` that seem to be meant for AnchorPrune.

    Such a key is a misspelt `anchorprune`, or a setting outside of that dictionary. vLLM ignores
    keys that nothing reads, so the request would be served with the server's budget.

    Args:
        keys: The keys that the request gives.
        known: Returns the keys of the HF processor, which are allowed whatever their names are.
    """
    for key in keys:
        is_near = bool(get_close_matches(key, _OF_A_REQUEST, cutoff=0.8))
        is_ours = key in SETTINGS or is_near or resembles_config_key(key)
        if key != CONFIG_KEY and is_ours and key not in known():
            raise ValueError(
                f"anchorprune: unknown key {key!r} in mm_processor_kwargs; a request's own budget "
                f"and query go into its dictionary {CONFIG_KEY!r}, such as "
                f'{{"{CONFIG_KEY}": {{"budget": 128}}}}, and all other settings are the server\'s'
            )


def read_override(override: object) -> tuple[Budget | None, str | None]:
    """Return a request's own budget and query; the query is the name of a scope, or the words."""
    if not isinstance(override, Mapping):
        raise ValueError(
            "anchorprune: mm_processor_kwargs['anchorprune'] must be a dictionary such as "
            f'{{"budget": 128}}, got {override!r}'
        )
    check_keys(override, [*_OF_A_REQUEST])
    query = override.get("query")
    if query is not None and not isinstance(query, str):
        raise ValueError(
            f"anchorprune: query must be one of {', '.join(SCOPES)}, or the words to prune for, "
            f"got {query!r}"
        )
    if query is not None and len(query) > _LONGEST_QUERY:
        raise ValueError(
            f"anchorprune: query has {len(query)} characters; at most {_LONGEST_QUERY} are "
            "allowed: shorten it"
        )
    try:
        (query or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"anchorprune: query is not valid Unicode text ({error}); send it without lone "
            "surrogates"
        ) from error
    budget = Budget.parse(override["budget"]) if "budget" in override else None
    return budget, query


Requests = Mapping[str, Sequence[ItemRequest]]
"""The requests for all items, by modality."""

REQUESTS_KEY = "anchorprune_requests"
"""The key under which they travel in vLLM's arguments for the HF processor, between its hooks."""


def requests_in(kwargs: Mapping[str, object]) -> Requests:
    """Return the requests that travel in vLLM's arguments for the HF processor."""
    return kwargs.get(REQUESTS_KEY, {})  # type: ignore[return-value]


def without_ours(kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments without those of AnchorPrune, for the HF processor itself."""
    return {name: value for name, value in kwargs.items() if name not in _OURS}


_OURS = (CONFIG_KEY, REQUESTS_KEY)


def refuse_overrides(processor: BaseMultiModalProcessor) -> BaseMultiModalProcessor:
    """Make vLLM's own processor refuse a request's budget, which it would otherwise ignore."""
    apply = processor.apply

    def apply_or_refuse(inputs: ProcessorInputs, timing_ctx: Any) -> Any:
        if any(map(resembles_config_key, inputs.hf_processor_mm_kwargs)):
            raise ValueError(
                "anchorprune: pruning is off for this model, so a request cannot set a budget; "
                "start vLLM with --anchorprune-budget (100% keeps all tokens by default)"
            )
        return apply(inputs, timing_ctx)

    processor.apply = apply_or_refuse
    return processor
