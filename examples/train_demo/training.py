# SPDX-License-Identifier: Apache-2.0
"""Training that can be stopped at any time and goes on from its last checkpoint."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn

from anchorprune_vllm.tools.vqa_data import Picture
from examples.train_demo.muon import optimizers_of
from examples.train_demo.pictures import batch_of, pixels_of, validation
from examples.train_demo.sequences import pack
from examples.train_demo.student import Student

BATCH = 32
STEPS_PER_ROUND = 100
"""Between two checkpoints."""
SEEING_ALONE = 0.15
"""Share of the training before the language model joins in: until then it would see noise."""


class Training:
    """A model, its optimisers and its progress, in one file."""

    def __init__(self, out: Path, student: type[Student], seed: int, rounds: int) -> None:
        torch.manual_seed(seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.settings = {"model": student.__name__, "seed": seed, "rounds": rounds}
        self.model = student()
        self.optimizers = optimizers_of(self.model)
        self.rounds_done = 0
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
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.rounds_done = saved["rounds_done"]

    def save(self) -> None:
        """Replace the state on the disk, in one step."""
        saved = {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rounds_done": self.rounds_done,
        }
        scratch = self.state.with_suffix(".tmp")
        torch.save(saved, scratch)
        scratch.replace(self.state)

    def run(self) -> None:
        """Train what is left, and write the model."""
        rounds, held_out = self.settings["rounds"], validation()
        while self.rounds_done < rounds:
            losses = []
            title = f"round {self.rounds_done + 1} of {rounds}"
            for number in track(range(STEPS_PER_ROUND), title):
                losses.append(self._step(self.rounds_done * STEPS_PER_ROUND + number))
            self.rounds_done += 1
            self.save()
            seeing, answering = np.mean(losses, axis=0)
            print(f"{title}: loss of seeing {seeing:.3f}, of answering {answering:.3f}; held out:")
            for name, pictures in held_out.items():
                print(f"  {name}: {written(evaluate(self.model, pictures))}", flush=True)
        self.write()

    def _step(self, number: int) -> tuple[float, float]:
        share = number / (self.settings["rounds"] * STEPS_PER_ROUND)
        # Each step draws its own numbers, so a training that was stopped goes on as it would have.
        rng = random.Random(f"{self.settings['seed']} {number}")
        self._set_rate(share)
        pictures = batch_of(rng, BATCH)
        seen = self.model.see(pixels_of(pictures))
        seeing = self.model.seeing_loss(seen, pictures)
        answering = torch.zeros(())
        if share >= SEEING_ALONE:
            batch = pack(self.model.chat, pictures, rng)
            logits = self.model.answer_logits(seen.tokens, batch)
            answering = F.cross_entropy(logits, batch.wanted)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (seeing + answering).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return float(seeing.detach()), float(answering.detach())

    def _set_rate(self, share: float) -> None:
        """Set the learning rates at a share of the training: up in the first 3%, then to 2%."""
        factor = min(share / 0.03, 1) * (0.02 + 0.98 * (1 - share))
        for optimizer in self.optimizers:
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
def evaluate(model: Student, pictures: Sequence[Picture]) -> dict[str, float]:
    """Return the share of right answers in all, and of each kind of question."""
    model.eval()
    right: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(pictures), BATCH):
        part = pictures[start : start + BATCH]
        batch = pack(model.chat, part, None)
        logits = model.answer_logits(model.see(pixels_of(part)).tokens, batch)
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
