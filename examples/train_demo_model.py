# SPDX-License-Identifier: Apache-2.0
"""Train the small LLaVA-1.5 of the demo, and the CLIP that it is paired with, from scratch.

    pip install easy-vqa
    python examples/train_demo_model.py OUT

It learns from easy-vqa (one shape in a picture) and from scenes of several things, with plain
transformers, on a CPU. All visual tokens, ordinary positions: nothing is ever pruned here.

First the two CLIP towers learn captions, then everything learns together: captions and answers. Up
to eight questions about a picture share one sequence; each sees the picture and itself alone. The
state is saved after every pass and picked up again by the same command. The pass that is best on
pictures held out from the training split is written to OUT in the hub's file format.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, LlamaConfig, LlamaForCausalLM

from anchorprune_vllm.tools.arguments import positive
from anchorprune_vllm.tools.eval_data import blind_guesses, load_data
from anchorprune_vllm.tools.eval_scores import is_right, score
from anchorprune_vllm.tools.scenes import FIRST_TEST_SCENE, scene
from anchorprune_vllm.tools.trained_files import (
    IMAGE_SIZE,
    clip_config,
    clip_tokenizer,
    llama_config,
    read_trained,
    tokenizer,
    write_trained,
)
from anchorprune_vllm.tools.vqa_data import SHAPES, Picture, easy_vqa

VISUAL_TOKENS = (IMAGE_SIZE // 14) ** 2
QUESTIONS_AT_ONCE = 8
BATCH = 32
PASSES = 16
CAPTIONS_ALONE = 0.25  # share of the training
SCENES_PER_PASS = 4096
VALIDATION = 200  # pictures of easy-vqa's training split, and as many scenes


class Model(nn.Module):
    """CLIP, and a language model behind the last but one layer of its vision tower."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = CLIPModel(CLIPConfig(**clip_config()))
        config = LlamaConfig(**llama_config())
        self.language_model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        visual, hidden = self.clip.config.vision_config.hidden_size, config.hidden_size
        self.projector = nn.Sequential(
            nn.Linear(visual, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Visual tokens [B, 144, H], and the picture in CLIP space [B, P]."""
        out = self.clip.vision_model(pixels, output_hidden_states=True)
        tokens = self.projector(out.hidden_states[-2][:, 1:])
        return tokens, self.clip.visual_projection(out.pooler_output)


@dataclass(frozen=True)
class Sequences:
    """A batch of pictures with their questions behind them, as numbers."""

    ids: Tensor  # [B, T], placeholders where the picture goes
    positions: Tensor  # [B, T]
    mask: Tensor  # [B, 1, T, T] bool, True: may be seen
    targets: Tensor  # [B, T], -100 where nothing is learned


def pack(pictures: Sequence[Picture], rng: random.Random | None) -> Sequences:
    """One sequence for each picture: the picture, then questions that do not see each other.

    rng: chooses among the questions; None: all of them.
    """
    words = tokenizer()
    image, end = words.token_to_id("<image>"), words.token_to_id("</s>")
    rows = []
    for picture in pictures:
        questions = list(picture.questions)
        if rng is not None and len(questions) > QUESTIONS_AT_ONCE:
            questions = rng.sample(questions, QUESTIONS_AT_ONCE)
        ids: list[int] = []
        positions: list[int] = []
        groups: list[int] = []
        targets: list[int] = []
        for number, question in enumerate(questions, start=1):
            # Tokens exactly as a server makes them of the chat.
            prompt = words.encode(f"USER: <image>\n{question.text} ASSISTANT:").ids
            at = prompt.index(image)
            if number == 1:
                ids = prompt[:at] + [image] * VISUAL_TOKENS
                positions = list(range(len(ids)))
                groups, targets = [0] * len(ids), [-100] * len(ids)
            shared = at + VISUAL_TOKENS
            asked = prompt[at + 1 :]
            answer = [*words.encode(question.answers[0], add_special_tokens=False).ids, end]
            # What is learned at a token is the one that follows.
            ids += [*asked, *answer[:-1]]
            targets += [*[-100] * (len(asked) - 1), *answer]
            count = len(asked) + len(answer) - 1
            positions += range(shared, shared + count)
            groups += [number] * count
        rows.append((ids, positions, groups, targets))
    longest = max(len(row[0]) for row in rows)

    def padded(column: int, filler: int) -> Tensor:
        return torch.tensor([row[column] + [filler] * (longest - len(row[0])) for row in rows])

    group = padded(2, -1)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    mask = causal & ((group[:, :, None] == group[:, None, :]) | (group == 0)[:, None, :])
    return Sequences(padded(0, 0), padded(1, 0), mask[:, None], padded(3, -100))


def answer_logits(model: Model, tokens: Tensor, batch: Sequences) -> Tensor:
    """[M, V] at the M tokens that have a target."""
    embed = model.language_model.get_input_embeddings()
    image = tokenizer().token_to_id("<image>")
    rows = embed(batch.ids)
    at = int((batch.ids[0] == image).nonzero()[0])
    rows = torch.cat([rows[:, :at], tokens, rows[:, at + tokens.shape[1] :]], dim=1)
    states = model.language_model.model(
        inputs_embeds=rows, position_ids=batch.positions, attention_mask=batch.mask
    ).last_hidden_state
    return model.language_model.lm_head(states[batch.targets >= 0])


def caption_loss(model: Model, seen: Tensor, captions: Sequence[str | None]) -> Tensor:
    """Contrastive loss over a batch's distinct captions, and over ones that are nearly right."""
    known = [number for number, caption in enumerate(captions) if caption is not None]
    written = [captions[number] for number in known]
    wrong = [other for caption in written for other in wrong_captions(caption)]
    distinct = list(dict.fromkeys([*written, *wrong]))
    encoded = clip_tokenizer().encode_batch(distinct)
    longest = max(len(item.ids) for item in encoded)
    end = clip_tokenizer().token_to_id("<|endoftext|>")
    ids = torch.tensor([item.ids + [end] * (longest - len(item.ids)) for item in encoded])
    pooled = model.clip.text_model(input_ids=ids).pooler_output
    texts = F.normalize(model.clip.text_projection(pooled), dim=-1)
    logits = F.normalize(seen[known], dim=-1) @ texts.T * model.clip.logit_scale.exp().clamp(max=50)
    wanted = torch.tensor([distinct.index(caption) for caption in written])
    to_text = F.cross_entropy(logits, wanted)
    # Of the pictures, all that have the caption are right.
    is_right = torch.zeros_like(logits)
    is_right[torch.arange(len(wanted)), wanted] = 1
    columns = is_right.sum(0) > 0
    targets = (is_right / is_right.sum(0).clamp(min=1))[:, columns]
    to_picture = -(targets * logits[:, columns].log_softmax(0)).sum(0).mean()
    return (to_text + to_picture) / 2


def wrong_captions(caption: str) -> list[str]:
    """The colours of the first two things exchanged, and other shapes for the first.

    Without them colours alone tell the pictures of a batch apart, and shapes are never learned.
    """
    words = caption.split()
    places = [number + 1 for number, word in enumerate(words) if word == "a"]
    colour, shape = places[0], places[0] + 1
    wrong = [
        [*words[:shape], other, *words[shape + 1 :]] for other in SHAPES if other != words[shape]
    ]
    if len(places) > 1:
        exchanged = list(words)
        exchanged[colour], exchanged[places[1]] = words[places[1]], words[colour]
        wrong.append(exchanged)
    return [" ".join(each) for each in wrong]


def pixels_of(pictures: Sequence[Picture], rng: random.Random | None) -> Tensor:
    """As the processor prepares them; rng: half of them mirrored (nobody asks left or right)."""
    mean = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
    deviation = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
    rows = []
    for picture in pictures:
        image = picture.load().resize((IMAGE_SIZE, IMAGE_SIZE), 3)
        values = (np.asarray(image, np.float32) / 255 - mean) / deviation
        if rng is not None and "letter" not in (picture.caption or "") and rng.random() < 0.5:
            values = values[:, ::-1]
        rows.append(torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1))))
    return torch.stack(rows)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by Newton and Schulz (Keller Jordan, 2024), in float32.

    PyTorch's own computes in bfloat16, one matrix after the other: on a CPU that takes a third of
    a step. Here matrices of one shape go together.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        super().__init__([{"params": found} for found in by_shape.values()], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if not parameters:
                continue
            updates = []
            for parameter in parameters:
                momentum = self.state[parameter].setdefault("momentum", parameter * 0)
                momentum.lerp_(parameter.grad, 0.05)
                updates.append(parameter.grad.lerp(momentum, 0.95))
            wanted = orthogonal(torch.stack(updates))
            # The root mean square of AdamW's steps, whatever the shape (Moonlight, 2025).
            rate = 0.2 * group["lr"] * max(wanted.shape[1:]) ** 0.5
            for parameter, update in zip(parameters, wanted, strict=True):
                parameter.mul_(1 - 0.01 * group["lr"]).sub_(update, alpha=rate)


def orthogonal(matrices: Tensor) -> Tensor:
    """[B, M, N]: singular values near 1, the vectors as they are."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices
    found = found / (torch.linalg.matrix_norm(found, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = found @ found.mT
        found = 3.4445 * found + (-4.7750 * gram + 2.0315 * gram @ gram) @ found
    return found.mT if is_tall else found


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for the rest."""
    inside, rest = [], []
    for name, parameter in model.named_parameters():
        is_table = "embed" in name or "lm_head" in name
        (inside if parameter.ndim == 2 and not is_table else rest).append(parameter)
    return [
        Muon(inside, lr=3e-3),
        torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98)),
    ]


@torch.inference_mode()
def evaluate(model: Model, pictures: Sequence[Picture]) -> dict[str, float]:
    """Share of right answers in all, and of each kind."""
    model.eval()
    right: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(pictures), BATCH):
        part = pictures[start : start + BATCH]
        batch = pack(part, None)
        tokens, _ = model.see(pixels_of(part, None))
        guesses = answer_logits(model, tokens, batch).argmax(-1)
        wanted = batch.targets[batch.targets >= 0]
        # Answers are one word each, and the end behind it: both must be right.
        is_right = (guesses == wanted).view(-1, 2).all(1).tolist()
        asked = [question for picture in part for question in picture.questions]
        for question, ok in zip(asked, is_right, strict=True):
            right[question.kind].append(ok)
    model.train()
    scores = {kind: float(np.mean(found)) for kind, found in sorted(right.items())}
    return {"all": float(np.mean([ok for found in right.values() for ok in found])), **scores}


class Training:
    """All that changes, and is saved."""

    def __init__(self, out: Path, seed: int, passes: int) -> None:
        torch.manual_seed(seed)
        self.settings = {"seed": seed, "passes": passes}
        self.out = out
        out.parent.mkdir(parents=True, exist_ok=True)
        self.model = Model()
        self.optimizers = optimizers_of(self.model)
        self.rng = random.Random(seed)
        self.passes = 0
        self.best = -1.0
        self.state = out.parent / f"{out.name}.training.pt"
        if self.state.exists():
            saved = torch.load(self.state, weights_only=False)
            if saved["settings"] != self.settings:
                raise SystemExit(
                    f"{self.state} is of {saved['settings']}, not of {self.settings}: give the "
                    "same to go on, or remove it to begin anew"
                )
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.rng.setstate(saved["rng"])
            self.passes, self.best = saved["progress"]

    def save(self) -> None:
        saved = {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.getstate(),
            "progress": (self.passes, self.best),
        }
        scratch = self.state.with_suffix(".tmp")
        torch.save(saved, scratch)
        scratch.replace(self.state)

    def set_rate(self, share: float) -> None:
        """Learning rates at a share of the whole time: up in the first 3%, then down to 2%."""
        factor = min(share / 0.03, 1) * (0.02 + 0.98 * (1 - share))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("full_lr", group["lr"])
                group["lr"] = group["full_lr"] * factor

    def step(self, pictures: Sequence[Picture], with_answers: bool) -> float:
        tokens, seen = self.model.see(pixels_of(pictures, self.rng))
        loss = caption_loss(self.model, seen, [picture.caption for picture in pictures])
        if with_answers:
            batch = pack(pictures, self.rng)
            logits = answer_logits(self.model, tokens, batch)
            loss = 0.3 * loss + F.cross_entropy(logits, batch.targets[batch.targets >= 0])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())


def batches(pictures: list[Picture], rng: random.Random) -> Iterator[list[Picture]]:
    rng.shuffle(pictures)
    for start in range(0, len(pictures) - BATCH + 1, BATCH):
        yield pictures[start : start + BATCH]


def validation() -> dict[str, list[Picture]]:
    """Pictures by which the best pass is chosen: of the training split, but not trained on."""
    return {
        "easy-vqa": easy_vqa("train")[:VALIDATION],
        "scenes": [scene(FIRST_TEST_SCENE - 1 - number) for number in range(VALIDATION)],
    }


def scenes_of(number: int) -> list[Picture]:
    """The scenes of one pass, seen in no other."""
    return [scene(number * SCENES_PER_PASS + place) for place in range(SCENES_PER_PASS)]


def train(out: Path, passes: int, seed: int, stop_after: int | None = None) -> None:
    easy, held_out = easy_vqa("train")[VALIDATION:], validation()
    training = Training(out, seed, passes)
    while training.passes < min(passes, stop_after or passes):
        todo = list(batches(easy + scenes_of(training.passes), training.rng))
        losses = []
        for number, part in enumerate(track(todo, f"pass {training.passes + 1} of {passes}")):
            share = (training.passes + number / len(todo)) / passes
            training.set_rate(share)
            losses.append(training.step(part, with_answers=share > CAPTIONS_ALONE))
        training.passes += 1
        scores = {name: evaluate(training.model, pictures) for name, pictures in held_out.items()}
        print(f"pass {training.passes} of {passes}, loss {np.mean(losses):.3f}, held out:")
        for name, found in scores.items():
            print(f"  {name}: {written(found)}", flush=True)
        mean = float(np.mean([found["all"] for found in scores.values()]))
        if mean > training.best:
            training.best = mean
            write_trained(out, training.model, scores)
        training.save()


def test(out: Path) -> dict[str, Any]:
    """Scores of the written model, and of answering without the picture."""
    model = Model()
    read_trained(out, model)
    scores: dict[str, Any] = {}
    for data in load_data(["easy-vqa", "scenes"], limit=None):
        guesses = blind_guesses(data.name) or {}
        blind = [is_right(guesses.get(q.text, ""), q.answers) for q in data.questions]
        guessed = score(blind, data.picture_of, data.kind_of)
        scores[data.name] = {
            "model": evaluate(model, data.pictures),
            "without the picture": {"all": guessed.accuracy, **guessed.kinds},
        }
    return scores


def written(scores: dict[str, float]) -> str:
    return ", ".join(f"{kind} {share:.1%}" for kind, share in scores.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the model")
    parser.add_argument(
        "--passes", type=positive, default=PASSES, help=f"over the data (default: {PASSES})"
    )
    parser.add_argument(
        "--stop-after",
        type=positive,
        metavar="PASS",
        help="end early; the package's own model is of --stop-after 11",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: 0)")
    args = parser.parse_args()
    try:
        train(args.out, args.passes, args.seed, args.stop_after)
        scores = test(args.out)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last whole pass", file=sys.stderr)
        sys.exit(130)
    (args.out / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    for name, found in scores.items():
        for who, shares in found.items():
            print(f"{name}, {who}: {written(shares)}")


if __name__ == "__main__":
    main()
