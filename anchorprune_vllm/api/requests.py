# SPDX-License-Identifier: Apache-2.0
"""What one request says: its own budget and question, and what identifies each of its items."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from anchorprune_vllm.budget import Budget
from anchorprune_vllm.checks import check_keys
from anchorprune_vllm.config import CONFIG_KEY, SCOPES, SETTINGS, resembles_config_key

# A prompt's own words are bounded by the model's context; an override's are not.
_LONGEST_QUERY = 20_000

_OF_A_REQUEST = ("budget", "query")


@dataclass(frozen=True)
class ItemRequest:
    """One item's part of a request, before its candidates are counted."""

    media_hash: str
    budget: Budget
    query: str
    lacks_query: bool
    """A question was looked for, and none was found."""

    def identity(self, fingerprint: str) -> dict[str, str]:
        """What, besides the media, decides the item's embeddings."""
        # All tokens stay whatever is asked: every question may share the same entry.
        query = "" if self.budget.keeps_all else self.query
        return {"budget": str(self.budget), "query": query, "settings": fingerprint}


def check_request_keys(keys: Iterable[str], known: Callable[[], Collection[str]]) -> None:
    """Refuse a misspelt `anchorprune` in `mm_processor_kwargs`, and our settings beside it.

    Also what resembles the two settings that a request may choose.

    vLLM passes over keys that nothing reads. `known` returns those of the HF processor, whatever
    they are called.
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
    """A request's own budget and query (a scope's name, or the words themselves)."""
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
            f"anchorprune: query has {len(query)} characters; at most {_LONGEST_QUERY} are allowed"
        )
    try:
        (query or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"anchorprune: query is not valid Unicode text ({error})") from error
    budget = Budget.parse(override["budget"]) if "budget" in override else None
    return budget, query
