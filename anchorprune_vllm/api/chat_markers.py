# SPDX-License-Identifier: Apache-2.0
"""Find where the turns of a chat begin and end, by markers learnt from the chat template.

Sentinel messages are rendered with the template, and the text around them gives the markers. The
markers are used only if splitting rendered chats at them returns the messages that were put in.

A prompt holds nothing but text, so turns are told apart by text. Where the markers are plain words
(LLaVA's `USER:`), a user who writes such a word ends the turn there, which is also how the model
reads it. A system prompt that the template puts into the user's turn without a marker of its own
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
# Conversations, written as the initials of their roles. One that ends with a role comes before
# those in which the role is followed by another: how a role ends has to be known first.
_LESSONS = ("u", "ua", "uau", "su", "us", "ut", "uat")
_EXAMS = ("u", "uau", "uauau")
# The sentinel holds words and signs that are too common to be markers, so that a template with
# such markers fails the exam.
_SENTINEL = "Sentinel{}: - is a user > 1 | system # or * assistant, (tool)?"

_Content = Callable[[str], str | list[dict[str, str]]]
# Plain strings come first: a template written for strings would print a list as Python does.
_CONTENT_FORMS: tuple[_Content, ...] = (str, lambda text: [{"type": "text", "text": text}])
_Render = Callable[[str, bool], list[str] | None]


@dataclass(slots=True)
class Turn:
    """One turn of a chat: its role, and its text in the parts that media separate."""

    role: _Role
    parts: list[str] = field(default_factory=list)

    def words(self) -> str:
        """Return the text of the turn, with its parts joined by spaces."""
        return " ".join(filter(None, map(str.strip, self.parts)))


class ChatMarkers:
    """Splits decoded text into turns at the markers of a chat template.

    `marks` maps each marker to the role whose words follow it. Special tokens are dropped.
    """

    def __init__(self, marks: Mapping[str, _Role], specials: set[str]) -> None:
        # Longer markers are tried first: "[INST] <<SYS>>" opens a system prompt, while "[INST]"
        # alone opens a user's turn.
        ordered = sorted(marks, key=len, reverse=True)
        self._roles = [marks[mark] for mark in ordered]
        special = _any_of(specials)
        # Every branch starts with a literal letter, so `re` can skip ahead to the next candidate
        # (ten times faster). The empty group that tells the branches apart therefore comes last.
        branches = [f"{_marker_pattern(mark, special)}()" for mark in ordered]
        self._cut = re.compile("|".join([*branches, special]))
        self._own_system_prompt = ""

    def split(self, pieces: Iterable[str]) -> tuple[list[Turn], list[int]]:
        """Return the turns in `pieces`, and for each piece the number of the turn it ends in."""
        turns = [Turn("system")]  # some templates write the system prompt without a marker
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
        if not any(turn.role == "user" for turn in turns):  # the template was not used
            turns[0].role = "user"
        return turns, holders

    def system_prompt(self, turns: list[Turn]) -> str:
        """Return the words of the system prompt, or "" if they are the template's own default."""
        found = (turn.words() for turn in turns if turn.role == "system")
        words = next(filter(None, found), "")
        return "" if words == self._own_system_prompt else words

    def learn_own_system_prompt(self, render: _Render) -> None:
        """Learn the default system prompt that the template writes when the chat has none."""
        parts = render("u", False)
        if parts is not None:
            self._own_system_prompt = self.system_prompt(self.split([parts[0]])[0])


def learn_markers(tokenizer: Any, chat_template: str | None) -> ChatMarkers:
    """Return the markers of a chat template, or no markers if none can be learnt reliably."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    # Llama 3 lists its headers only among the added tokens.
    specials = {*map(str, tokenizer.all_special_tokens), *(str(t) for t in added if t.special)}
    if chat_template is not None:
        for content in _CONTENT_FORMS:
            render = partial(_render, tokenizer, chat_template, content)
            marks = _collect(render)
            # The start-of-text token alone marks nothing, and users may write it ("<s>").
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
    """Render one sentinel message per role; `ask` adds the generation prompt.

    Returns the text before, in and after each sentinel in turn, or None if the template refuses
    the roles, or leaves out, repeats or moves a message.
    """
    said = [_SENTINEL.format(i) for i in range(len(roles))]
    messages = [
        {"role": _ROLES[role], "content": content(text)}
        for role, text in zip(roles, said, strict=True)
    ]
    writes_ids = not chat_template  # Mistral's tokenizers render chats without a template
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=chat_template, tokenize=writes_ids, add_generation_prompt=ask
        )
        if writes_ids:
            text = tokenizer.decode(text, skip_special_tokens=False)
        parts = re.split(f"({_any_of(said)})", text)
    # Templates raise errors of their own, and Python's errors for input they do not expect.
    except (TemplateError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    except Exception as error:
        if type(error).__module__ != "mistral_common.exceptions":  # compared without importing it
            raise
        return None
    return parts if parts[1::2] == said else None


def _collect(render: _Render) -> dict[str, _Role]:
    """Return the role whose words follow each marker."""
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
    # The text before the first user message may begin with a default system prompt. The text
    # before a later one is then its ending, and is the marker.
    marks = opens["u"] - {""}
    user = {mark for mark in marks if not mark.endswith(tuple(marks - {mark}))}
    found: dict[str, _Role] = dict.fromkeys(closes | opens["t"], "tool")
    found |= dict.fromkeys(opens["s"], "system")
    found |= dict.fromkeys(opens["a"] | answers, "assistant")
    # Some templates put system prompts and tool results into user turns: those are user markers.
    others = {mark: role for mark, role in found.items() if mark and not mark.endswith(tuple(user))}
    return {**others, **dict.fromkeys(user, "user")}


def _passes(markers: ChatMarkers, render: _Render) -> bool:
    """Return whether splitting rendered conversations returns the words their users said."""
    for roles, ask in product(_EXAMS, (False, True)):
        parts = render(roles, ask)
        if parts is not None:
            turns, _ = markers.split(["".join(parts)])
            said = [text for role, text in zip(roles, parts[1::2], strict=True) if role == "u"]
            if [turn.words() for turn in turns if turn.role == "user"] != said:
                return False
    return True


def _marker_pattern(mark: str, special: str) -> str:
    """Return a pattern for `mark`, except inside a word, with any whitespace between its parts."""
    atoms = filter(None, re.split(rf"({special})|\s+", mark))
    pattern = r"\s*".join(map(re.escape, atoms))
    if re.match(r"\w", mark):  # the check follows the first letter, which has to begin the pattern
        pattern = rf"{mark[0]}(?<!\w{mark[0]}){pattern[1:]}"
    return rf"{pattern}(?!\w)" if re.match(r"\w", mark[-1]) else pattern


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches the longest of `words`.

    The pattern is a tree of letters. With a flat list, `re` would try every word at every "<", and
    some tokenizers have a thousand reserved tokens.
    """
    tails: dict[str, set[str]] = defaultdict(set)
    for word in filter(None, words):
        tails[word[0]].add(word[1:])
    return "|".join(map(_branch, tails, tails.values())) or "(?!)"  # "(?!)" never matches


def _branch(head: str, tails: set[str]) -> str:
    """Return a pattern for the words that begin with a letter, given the rest of each."""
    if len(tails) == 1:
        return re.escape(head + min(tails))
    return f"{re.escape(head)}(?:{_any_of(tails)})" + "?" * ("" in tails)
