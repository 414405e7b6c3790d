# SPDX-License-Identifier: Apache-2.0
"""Training that can be stopped at any time and goes on from its last checkpoint."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from anchorprune_vllm.commands.eval.vqa_data import Picture
from examples.train_demo.muon import optimizers_of
from examples.train_demo.pictures import batch_of, pixels_of, validation
from examples.train_demo.sequences import pack
from examples.train_demo.student import Student

BATCH = {"seeing": 32, "answering": 8}
"""Images of a step."""
STEPS_PER_ROUND = 100
"""Between two checkpoints."""


Phase = Literal["seeing", "answering"]


class Rounds(NamedTuple):
    """How long each phase of a training takes."""

    seeing: int
    """The tower learns to see, by what is true of the images."""
    answering: int
    """Behind the tower, which stays as it is, the language model learns to answer."""

    def at(self, done: int) -> tuple[Phase, int]:
        """Return the phase after so many rounds, and how many rounds of it are done."""
        if done < self.seeing:
            return "seeing", done
        return "answering", done - self.seeing


class Training:
    """A model, its optimisers and its progress, in one file."""

    def __init__(self, out: Path, student: type[Student], seed: int, rounds: Rounds) -> None:
        torch.manual_seed(seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.rounds = rounds
        self.settings = {"model": student.__name__, "seed": seed, "rounds": tuple(rounds)}
        self.model = student()
        self.optimizers = {
            "seeing": optimizers_of(self.model.seeing_parameters()),
            "answering": optimizers_of(self.model.answering_parameters()),
        }
        self.rounds_done = 0
        self._features: dict[int, tuple[Picture, Tensor]] = {}
        self.state = out.parent / f"{out.name}.training.pt"
        if self.state.exists():
            self._load()

    def _load(self) -> None:
        saved = torch.load(self.state, weights_only=False)
        if saved["settings"] != self.settings:
            raise SystemExit(
                f"{self.state} is of {saved['settings']}, not of {self.settings}: give the same "
                "to go on, or remove it to begin anew"
            )
        self.model.load_state_dict(saved["model"])
        for phase, optimizers in self.optimizers.items():
            for optimizer, state in zip(optimizers, saved["optimizers"][phase], strict=True):
                optimizer.load_state_dict(state)
        self.rounds_done = saved["rounds_done"]

    def save(self) -> None:
        """Replace the state on the disk, in one step."""
        saved = {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizers": {
                phase: [optimizer.state_dict() for optimizer in optimizers]
                for phase, optimizers in self.optimizers.items()
            },
            "rounds_done": self.rounds_done,
        }
        scratch = self.state.with_suffix(".tmp")
        torch.save(saved, scratch)
        scratch.replace(self.state)

    def run(self) -> None:
        """Train what is left, and write the model."""
        held_out = validation()
        while self.rounds_done < sum(self.rounds):
            phase, number = self.rounds.at(self.rounds_done)
            title = f"{phase}, round {number + 1} of {getattr(self.rounds, phase)}"
            losses = [
                self._step(phase, number * STEPS_PER_ROUND + step)
                for step in track(range(STEPS_PER_ROUND), title)
            ]
            self.rounds_done += 1
            self.save()
            print(f"{title}: loss {np.mean(losses):.3f}", flush=True)
            for name, pictures in held_out.items():
                if phase == "seeing":
                    print(f"  {name}: {written(places_seen(self.model, pictures))}", flush=True)
                else:
                    print(f"  {name}: {written(evaluate(self.model, pictures))}", flush=True)
        self.write()

    def _step(self, phase: Phase, number: int) -> float:
        # Each step draws its own numbers, so a training that was stopped goes on as it would have.
        rng = random.Random(f"{self.settings['seed']} {phase} {number}")
        self._set_rate(phase, (number + 1) / (getattr(self.rounds, phase) * STEPS_PER_ROUND))
        pictures = batch_of(rng, BATCH[phase])
        if phase == "seeing":
            loss = self.model.seeing_loss(self.model.see(pixels_of(pictures)), pictures)
        else:
            batch = pack(self.model.chat, pictures, rng)
            logits = self.model.answer_logits(self._features_of(pictures), batch)
            loss = F.cross_entropy(logits, batch.wanted) + self.model.looking_loss(batch)
        self.model.zero_grad()
        loss.backward()
        trained = [each for each in self.model.parameters() if each.grad is not None]
        nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in self.optimizers[phase]:
            optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def _features_of(self, pictures: Sequence[Picture]) -> Tensor:
        """Return the features [B, N, D] of pictures; the tower runs once for each of them."""
        new = [picture for picture in pictures if id(picture) not in self._features]
        if new:
            for picture, rows in zip(new, self.model.see(pixels_of(new)).features, strict=True):
                self._features[id(picture)] = picture, rows.half()
        return torch.stack([self._features[id(picture)][1] for picture in pictures]).float()

    def _set_rate(self, phase: Phase, share: float) -> None:
        """Set the learning rates at a share of a phase: up in the first 3%, then to 2%."""
        factor = min(share / 0.03, 1) * (0.02 + 0.98 * (1 - share))
        for optimizer in self.optimizers[phase]:
            for group in optimizer.param_groups:
                group.setdefault("full_lr", group["lr"])
                group["lr"] = group["full_lr"] * factor

    def write(self) -> None:
        """Write the model in the hub's format, in bfloat16."""
        weights = {
            name: weight.detach().to(torch.bfloat16).contiguous()
            for name, weight in self.model.state_dict().items()
        }
        self.model.write(self.out, weights)


@torch.inference_mode()
def places_seen(model: Student, pictures: Sequence[Picture]) -> dict[str, float]:
    """Return for how many patches of some images it is known what they show."""
    if not any(thing.box for picture in pictures for thing in picture.things):
        return {}
    pictures = pictures[: BATCH["seeing"]]
    return model.places.accuracy(model.see(pixels_of(pictures)).features, pictures)


@torch.inference_mode()
def evaluate(model: Student, pictures: Sequence[Picture]) -> dict[str, float]:
    """Return the share of right answers in all, and of each kind of question."""
    model.eval()
    right: dict[str, list[bool]] = defaultdict(list)
    at_once = BATCH["seeing"]
    for start in range(0, len(pictures), at_once):
        part = pictures[start : start + at_once]
        batch = pack(model.chat, part, None)
        logits = model.answer_logits(model.see(pixels_of(part)).features, batch)
        is_right = iter((logits.argmax(-1) == batch.wanted).tolist())
        for question in (each for picture in part for each in picture.questions):
            # All tokens of an answer must be right, its end too.
            answer = model.chat.answer_ids(question.answers[0])
            right[question.kind].append(all(list(islice(is_right, len(answer)))))
    model.train()
    scores = {kind: float(np.mean(found)) for kind, found in sorted(right.items())}
    return {"all": float(np.mean([ok for found in right.values() for ok in found])), **scores}


def written(scores: dict[str, float]) -> str:
    """Return shares as a line of text."""
    return ", ".join(f"{kind} {share:.1%}" for kind, share in scores.items())
