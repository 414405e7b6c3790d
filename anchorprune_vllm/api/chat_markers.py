# SPDX-License-Identifier: Apache-2.0
"""Where the turns of a chat begin and end, learnt from the model's chat template.

Sentinel messages are rendered with the template, and what stands around them are the markers. They
count only if they give back what was put in.

Turns are told apart by text, as a prompt holds nothing else: where the markers are plain words
(LLaVA's `USER:`), a user who writes such a word alone ends the turn there, as the model sees it
too. A system prompt that the template puts into the user's turn without a marker of its own
(Gemma, early Mistral) cannot be told from the user's words.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Literal

from jinja2 import TemplateError

_Role = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[str, _Role] = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
# Conversations by the initials of their roles. How a role ends comes before what may follow it.
_LESSONS = ("u", "ua", "uau", "su", "us", "ut", "uat")
_EXAMS = ("u", "uau", "uauau")
# Holds the words and signs that are too common to be markers: the exam fails on such markers.
_SENTINEL = "Sentinel{}: - is a user > 1 | system # or * assistant, (tool)?"

_Content = Callable[[str], str | list[dict[str, str]]]
# Plain strings first: a template for strings would print a list as Python does.
_CONTENT_FORMS: tuple[_Content, ...] = (str, lambda text: [{"type": "text", "text": text}])
_Render = Callable[[str, bool], list[str] | None]


@dataclass(slots=True)
class Turn:
    role: _Role
    parts: list[str] = field(default_factory=list)

    def words(self) -> str:
        return " ".join(filter(None, map(str.strip, self.parts)))


class ChatMarkers:
    """Splits decoded text into turns at the markers, and drops the special tokens.

    `marks` says whose words follow each marker.
    """

    def __init__(self, marks: Mapping[str, _Role], specials: set[str]) -> None:
        # The longest first: "[INST] <<SYS>>" opens a system prompt, "[INST]" a user's turn.
        ordered = sorted(marks, key=len, reverse=True)
        self._roles = [marks[mark] for mark in ordered]
        special = _any_of(specials)
        # Every branch starts with a letter of its own, which lets `re` skip ahead to the next
        # candidate (ten times faster); so the group that tells the branches apart comes last.
        branches = [f"{_marker_pattern(mark, special)}()" for mark in ordered]
        self._cut = re.compile("|".join([*branches, special]))
        self._own_system_prompt = ""

    def split(self, pieces: Iterable[str]) -> tuple[list[Turn], list[int]]:
        """The turns in `pieces`, and the turn in which each piece ends."""
        turns = [Turn("system")]  # some templates write it without a marker
        holders = []
        for piece in pieces:
            start = 0
            for match in self._cut.finditer(piece):
                turns[-1].parts.append(piece[start : match.start()])
                start = match.end()
                if match.lastindex is not None:
                    turns.append(Turn(self._roles[match.lastindex - 1]))
            turns[-1].parts.append(piece[start:])
            holders.append(len(turns) - 1)
        if not any(turn.role == "user" for turn in turns):  # not written with the template
            turns[0].role = "user"
        return turns, holders

    def system_prompt(self, turns: list[Turn]) -> str:
        """The words of the system prompt; none if the template wrote them by itself."""
        found = (turn.words() for turn in turns if turn.role == "system")
        words = next(filter(None, found), "")
        return "" if words == self._own_system_prompt else words

    def learn_own_system_prompt(self, render: _Render) -> None:
        """Read what the template says to the model when nobody gave it a system prompt."""
        parts = render("u", False)
        if parts is not None:
            self._own_system_prompt = self.system_prompt(self.split([parts[0]])[0])


def learn_markers(tokenizer: Any, chat_template: str | None) -> ChatMarkers:
    """The markers of the template; none if they do not read back what was put in."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    # Llama 3 has its headers only among the added tokens.
    specials = {*map(str, tokenizer.all_special_tokens), *(str(t) for t in added if t.special)}
    if chat_template is not None:
        for content in _CONTENT_FORMS:
            render = partial(_render, tokenizer, chat_template, content)
            marks = _collect(render)
            # Alone before a system prompt, the start of the text marks nothing; users write <s>.
            marks.pop(getattr(tokenizer, "bos_token", None) or "", None)
            markers = ChatMarkers(marks, specials)
            roles = set(marks.values())
            if "user" in roles and len(roles) > 1 and _passes(markers, render):
                markers.learn_own_system_prompt(render)
                return markers
    return ChatMarkers({}, specials)


def _render(
    tokenizer: Any, chat_template: str, content: _Content, roles: str, ask: bool
) -> list[str] | None:
    """Renders sentinels said by `roles`; `ask` adds the generation prompt.

    Returns what is before, in and after each sentinel in turn, or None if the template refuses
    the roles, or leaves out, repeats or moves a message.
    """
    said = [_SENTINEL.format(i) for i in range(len(roles))]
    messages = [
        {"role": _ROLES[role], "content": content(text)}
        for role, text in zip(roles, said, strict=True)
    ]
    writes_ids = not chat_template  # Mistral's tokenizers, which have no template
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=chat_template, tokenize=writes_ids, add_generation_prompt=ask
        )
        if writes_ids:
            text = tokenizer.decode(text, skip_special_tokens=False)
        parts = re.split(f"({_any_of(said)})", text)
    # Templates raise their own errors, and Python's on what they do not expect.
    except (TemplateError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    except Exception as error:
        if type(error).__module__ != "mistral_common.exceptions":  # imported only where it is used
            raise
        return None
    return parts if parts[1::2] == said else None


def _collect(render: _Render) -> dict[str, _Role]:
    """Each marker, and whose words follow it."""
    opens: dict[str, set[str]] = {role: set() for role in _ROLES}
    closes: set[str] = set()
    answers: set[str] = set()
    ends: dict[str, str] = {}
    for roles, ask in product(_LESSONS, (False, True)):
        parts = render(roles, ask)
        if parts is None:
            continue
        if not ask:
            ends.setdefault(roles[-1], parts[-1])
        for left, gap, right in zip(f"^{roles}", parts[::2], f"{roles}$", strict=True):
            if right != "$":
                opens[right].add(gap.removeprefix(ends.get(left, "")).strip())
            if left == "u":
                (answers if right == "a" else closes).add(gap.strip())
    # What stands before the first user message may begin with a default system prompt: the
    # opening of a later one is the end of it.
    marks = opens["u"] - {""}
    user = {mark for mark in marks if not mark.endswith(tuple(marks - {mark}))}
    found: dict[str, _Role] = dict.fromkeys(closes | opens["t"], "tool")
    found |= dict.fromkeys(opens["s"], "system")
    found |= dict.fromkeys(opens["a"] | answers, "assistant")
    # A template may put system prompts and tool results into user turns.
    others = {mark: role for mark, role in found.items() if mark and not mark.endswith(tuple(user))}
    return {**others, **dict.fromkeys(user, "user")}


def _passes(markers: ChatMarkers, render: _Render) -> bool:
    """Whether the markers give back the user's words of the conversations that can be rendered."""
    for roles, ask in product(_EXAMS, (False, True)):
        parts = render(roles, ask)
        if parts is not None:
            turns, _ = markers.split(["".join(parts)])
            said = [text for role, text in zip(roles, parts[1::2], strict=True) if role == "u"]
            if [turn.words() for turn in turns if turn.role == "user"] != said:
                return False
    return True


def _marker_pattern(mark: str, special: str) -> str:
    """Matches `mark` but not inside a word, with the whitespace that decoding leaves."""
    atoms = filter(None, re.split(rf"({special})|\s+", mark))
    pattern = r"\s*".join(map(re.escape, atoms))
    if re.match(r"\w", mark):  # after the first letter, as the pattern has to begin with one
        pattern = rf"{mark[0]}(?<!\w{mark[0]}){pattern[1:]}"
    return rf"{pattern}(?!\w)" if re.match(r"\w", mark[-1]) else pattern


def _any_of(words: Iterable[str]) -> str:
    """Matches the longest of `words`.

    A tree of letters: of a flat list, every word would be tried at every "<", and some tokenizers
    have a thousand reserved ones.
    """
    tails: dict[str, set[str]] = defaultdict(set)
    for word in filter(None, words):
        tails[word[0]].add(word[1:])
    return "|".join(map(_branch, tails, tails.values())) or "(?!)"  # of nothing: never


def _branch(head: str, tails: set[str]) -> str:
    if len(tails) == 1:
        return re.escape(head + min(tails))
    return f"{re.escape(head)}(?:{_any_of(tails)})" + "?" * ("" in tails)
