# SPDX-License-Identifier: Apache-2.0
"""Find the question that a prompt asks about each of its images and videos.

A multimodal processor gets token ids, in which the messages of the conversation are no longer
separate. `QueryReader` learns from the chat template what opens and closes a user's turn, and uses
this to find the user's words for each media placeholder.

By default, an image's question is decided when it is first answered and later turns do not change
it, because vLLM's prefix cache holds the image together with its question (`requests.py` makes the
question a part of the image's identity).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from anchorprune_vllm.api.chat_markers import learn_markers
from anchorprune_vllm.config import SCOPES, Scope
from anchorprune_vllm.media_tokens import find_targets


class QueryReader:
    """Reads the query of every media placeholder in a prompt.

    `targets` maps each modality to the token ids of its placeholder, which occurs in the prompt
    once per item. If there are no ids, items have no placeholder: they stand before all text and
    share one query. Without a `chat_template`, or with one whose markers cannot be learnt, the
    whole text of a prompt is its query.
    """

    def __init__(
        self, tokenizer: Any, chat_template: str | None, targets: Mapping[str, Sequence[int]]
    ) -> None:
        if len(set(map(tuple, targets.values()))) < len(targets):
            raise ValueError(
                f"targets={dict(targets)}: two modalities share a placeholder, so their items "
                "cannot be told apart. Give each its own."
            )
        self._targets = targets
        self.at_start = [modality for modality, tokens in targets.items() if not tokens]
        self._decode = _decoder(tokenizer)
        self._markers = learn_markers(tokenizer, chat_template)

    def read(self, prompt_ids: Sequence[int], scope: Scope) -> dict[str, list[str]]:
        """Return the query of each placeholder, by modality, in prompt order.

        - `turn`: the user's words in the turn of the placeholder. If there are none, the first
          that exists of: the user's next words before the assistant answers, the user's last words
          before the placeholder, the system prompt, the user's next words after the answer.
        - `last`: the words of the last user turn that has any; if none has, the system prompt.
        - `all`: the words of all user turns, one turn per line; if there are none, the system
          prompt.
        - `none`: the empty string.

        A default system prompt that the template adds itself is ignored. Words on both sides of a
        placeholder are joined by a space.
        """
        if scope not in SCOPES:
            raise ValueError(f"query scope {scope!r} is unknown; choose one of {', '.join(SCOPES)}")
        at_start = [(modality, 0, 0) for modality in self.at_start]
        places = [*at_start, *find_targets(prompt_ids, self._targets)]
        queries: dict[str, list[str]] = {modality: [] for modality in self._targets}
        spans = [(start, end) for _, start, end in places]
        found = self._find(prompt_ids, spans, scope) if places and scope != "none" else []
        for (modality, _, _), query in zip(places, found or [""] * len(places), strict=True):
            queries[modality].append(query)
        return queries

    def _find(
        self, prompt_ids: Sequence[int], places: Sequence[tuple[int, int]], scope: Scope
    ) -> list[str]:
        """Return the query of the placeholder at each of the `places`."""
        starts = [0, *(end for _, end in places)]
        ends = [*(start for start, _ in places), len(prompt_ids)]
        pieces = (list(prompt_ids[i:j]) for i, j in zip(starts, ends, strict=True))
        turns, holders = self._markers.split(map(self._decode, pieces))
        words = [turn.words() if turn.role == "user" else "" for turn in turns]
        system = self._markers.system_prompt(turns)
        asked = list(filter(None, words)) or [system]
        if scope == "all":
            return ["\n".join(asked)] * len(places)
        if scope == "last":
            return [asked[-1]] * len(places)
        before, unanswered, after = words.copy(), words.copy(), words.copy()
        for i in range(1, len(words)):
            before[i] = words[i] or before[i - 1]
        for i in reversed(range(len(words) - 1)):
            after[i] = words[i] or after[i + 1]
            if turns[i + 1].role != "assistant":
                unanswered[i] = words[i] or unanswered[i + 1]
        return [unanswered[i] or before[i] or system or after[i] for i in holders[:-1]]


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return a function that decodes tokens, keeping special tokens and the user's spaces."""
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    exact = partial(decode, clean_up_tokenization_spaces=False)
    try:
        exact([])
    except TypeError:  # a tokenizer without this option leaves spaces as they are
        return decode
    return exact
