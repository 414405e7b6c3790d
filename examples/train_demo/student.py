# SPDX-License-Identifier: Apache-2.0
"""What the training asks of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from anchorprune_vllm.commands.eval.vqa_data import Picture
from anchorprune_vllm.testing.demo_models.random_weights import Weights
from examples.train_demo.places import PlaceLoss
from examples.train_demo.sequences import Chat, Sequences


class Seen(NamedTuple):
    """What a vision tower makes of a batch of pictures."""

    features: Tensor  # [B, N, D], what the language model's side gets
    patches: Tensor  # [B, N, P], where they are compared with words
    whole: Tensor | None = None  # [B, P], the pictures as such


class Student(nn.Module, ABC):
    """A model that learns to see, and to answer."""

    chat: ClassVar[Chat]
    places: PlaceLoss

    @abstractmethod
    def see(self, pixels: Tensor) -> Seen:
        """Run the vision tower over pixels [B, 3, 224, 224]."""

    def seeing_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return what learns to see, with names."""
        return [each for each in self.named_parameters() if not self.answers_with(each[0])]

    def answering_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return what learns to answer, with names."""
        return [each for each in self.named_parameters() if self.answers_with(each[0])]

    @abstractmethod
    def answers_with(self, name: str) -> bool:
        """Whether the parameter of a name learns to answer, rather than to see."""

    @abstractmethod
    def seeing_loss(self, seen: Seen, pictures: Sequence[Picture]) -> Tensor:
        """Return how badly the patches, or whole pictures, fit the words that are true of them."""

    @abstractmethod
    def answer_logits(self, features: Tensor, batch: Sequences) -> Tensor:
        """Return logits [M, V], float32, at the M tokens that have a target.

        features: of `see`, which are not trained here.
        """

    @abstractmethod
    def looking_loss(self, batch: Sequences) -> Tensor:
        """Return how little of its attention fell on what was asked for, at the last answers."""

    @abstractmethod
    def write(self, out: Path, weights: Weights) -> None:
        """Write these weights of the model to a directory, in the hub's format."""


def renamed(weights: Weights, prefixes: Mapping[str, str]) -> Weights:
    """Return the weights under some prefixes, each with another prefix instead."""
    return {
        new + name.removeprefix(old): weight
        for old, new in prefixes.items()
        for name, weight in weights.items()
        if name.startswith(old)
    }
