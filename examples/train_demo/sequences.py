# SPDX-License-Identifier: Apache-2.0
"""Pictures and their questions as sequences: several questions share one picture."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from anchorprune_vllm.commands.eval.asked_thing import tokens_on
from anchorprune_vllm.commands.eval.vqa_data import Picture

QUESTIONS_AT_ONCE = 20
VISUAL_TOKENS = 256
SIDE = 16
"""Visual tokens in a row or a column."""

Position = tuple[int, ...]
"""One number, or with M-RoPE three."""


@dataclass(frozen=True)
class Chat:
    """How a model is asked: exactly the tokens that a server makes of a chat."""

    words: Tokenizer
    prompt: str
    """With one placeholder, and {question} behind it."""
    placeholder: str
    end: str
    position_of_text: Callable[[int], Position]
    """Of the text token with this number, each visual token counted."""
    position_of_patch: Callable[[int, int], Position]
    """Of a visual token: number of the first one, and its own place among them."""

    @property
    def placeholder_id(self) -> int:
        return self.words.token_to_id(self.placeholder)

    def prompt_ids(self, question: str) -> list[int]:
        return self.words.encode(self.prompt.format(question=question)).ids

    def answer_ids(self, answer: str) -> list[int]:
        """Return the tokens of an answer, and the end behind it."""
        ids = self.words.encode(answer, add_special_tokens=False).ids
        return [*ids, self.words.token_to_id(self.end)]


@dataclass(frozen=True)
class Sequences:
    """A batch of pictures with their questions behind them, as numbers."""

    ids: Tensor  # [B, L], placeholders where the picture goes
    positions: Tensor  # [B, L, D]
    mask: Tensor  # [B, 1, L, L] bool, True: may be seen
    targets: Tensor  # [B, L], -100 where nothing is learned
    about: Tensor  # [M, N] bool: for each token learned, the visual tokens that tell it, or none

    def looking(self, placeholder_id: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """Return the tokens that are to look at a place, where they are to look, and can see.

        Batch and number [K] of those tokens, and bool [K, L] twice, as `Looking.loss` takes them.
        """
        known = self.about.any(1)
        batch, token = (each[known] for each in (self.targets >= 0).nonzero(as_tuple=True))
        first = int((self.ids[0] == placeholder_id).nonzero()[0])
        length = self.ids.shape[1]
        behind = length - first - VISUAL_TOKENS
        wanted = F.pad(self.about[known], (first, behind))
        return (batch, token), wanted, self.mask[batch, 0, token]

    @property
    def wanted(self) -> Tensor:
        """All that is learned, in order: token ids [M]."""
        return self.targets[self.targets >= 0]


def pack(chat: Chat, pictures: Sequence[Picture], rng: random.Random | None) -> Sequences:
    """Make one sequence for each picture: the picture, then questions that do not see each other.

    rng: chooses among the questions; None: all of them.
    """
    rows, about = [], []
    for picture in pictures:
        questions = list(picture.questions)
        if rng is not None and len(questions) > QUESTIONS_AT_ONCE:
            questions = rng.sample(questions, QUESTIONS_AT_ONCE)
        ids: list[int] = []
        positions: list[Position] = []
        groups: list[int] = []
        targets: list[int] = []
        for group, question in enumerate(questions, start=1):
            prompt = chat.prompt_ids(question.text)
            at = prompt.index(chat.placeholder_id)
            shared = at + VISUAL_TOKENS
            if group == 1:
                ids = prompt[:at] + [chat.placeholder_id] * VISUAL_TOKENS
                positions = [chat.position_of_text(number) for number in range(at)]
                positions += [chat.position_of_patch(at, each) for each in range(VISUAL_TOKENS)]
                groups, targets = [0] * shared, [-100] * shared
            asked, answer = prompt[at + 1 :], chat.answer_ids(question.answers[0])
            # What is learned at a token is the one that follows.
            ids += [*asked, *answer[:-1]]
            targets += [*[-100] * (len(asked) - 1), *answer]
            count = len(asked) + len(answer) - 1
            positions += map(chat.position_of_text, range(shared, shared + count))
            groups += [group] * count
            named = tokens_on(question.about[:1], (SIDE, SIDE))
            about += [named] * (len(answer) - 1) + [torch.zeros_like(named)]  # the end
        rows.append((ids, positions, groups, targets))
    longest = max(len(row[0]) for row in rows)

    def padded(column: int, filler: int | Position) -> Tensor:
        return torch.tensor([[*row[column], *[filler] * (longest - len(row[0]))] for row in rows])

    group = padded(2, -1)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    mask = causal & ((group[:, :, None] == group[:, None, :]) | (group == 0)[:, None, :])
    return Sequences(
        ids=padded(0, 0),
        positions=padded(1, chat.position_of_text(0)),
        mask=mask[:, None],
        targets=padded(3, -100),
        about=torch.stack(about),
    )


def put_tokens(rows: Tensor, tokens: Tensor, at: int) -> Tensor:
    """Return embeddings [B, L, H] with the visual tokens [B, N, H] from a place on."""
    return torch.cat([rows[:, :at], tokens, rows[:, at + tokens.shape[1] :]], dim=1)
