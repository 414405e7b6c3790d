# SPDX-License-Identifier: Apache-2.0
"""AnchorPrune from the paper's equations, on transformers in eager mode.

Shares no code with the plugin: the attention matrices are the dense ones of `output_attentions`,
the layout of crops is transformers' own, selection is plain numpy in float64.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPModel,
    LlavaNextConfig,
)


class Tokens(NamedTuple):
    """The candidates of one image."""

    hidden: np.ndarray  # [N, D]
    importance: np.ndarray  # [N]
    units: np.ndarray  # [N], non-decreasing


class ReferenceLlava:
    """LLaVA-1.5 and its CLIP in transformers."""

    def __init__(self, model: Path) -> None:
        eager = {"attn_implementation": "eager", "dtype": torch.float32}
        self.llava = AutoModelForImageTextToText.from_pretrained(model, **eager).eval()
        self.processor = AutoProcessor.from_pretrained(model)
        self.clip = CLIPModel.from_pretrained(model / "clip", **eager).eval()
        self.clip_tokenizer = AutoTokenizer.from_pretrained(model / "clip")

    def unpruned(self, image: Image.Image) -> int:
        """Placeholders of an unpruned prompt, newlines included."""
        ids = self.processor(images=image, text="<image>").input_ids[0]
        return list(ids).count(self.processor.image_token_id)

    def unit_sizes(self, image: Image.Image) -> list[int]:
        """Candidates of each unit that has any."""
        units = [int(unit) for unit, _ in self._candidates(self._preprocess(image))]
        return [units.count(unit) for unit in sorted(set(units))]

    @torch.inference_mode()
    def kept(self, image: Image.Image, question: str, budget: int) -> list[int]:
        """Indices of the kept candidates, ascending."""
        tokens = self._tokens(image)
        patches = self._in_clip_space(tokens.hidden)
        anchor: list[int] = []
        if question:
            texts = self._text_embeddings(question)
            relevance = -np.mean([patches @ text for text in texts], axis=0)
            members = [np.flatnonzero(tokens.units == unit) for unit in np.unique(tokens.units)]
            shares = largest_remainder(budget, [len(unit) for unit in members])
            for unit, share in zip(members, shares, strict=True):
                found = adaptive_anchor(relevance[unit], patches[unit], share) if share else []
                anchor += [int(unit[i]) for i in found]
        return sorted(expand(anchor, tokens.importance, _normalised(tokens.hidden), budget))

    @torch.inference_mode()
    def answer(
        self,
        prompt: str,
        images: list[Image.Image],
        kept: list[list[int]],
        n: int,
        *,
        start: bool = True,
    ) -> list[int]:
        """Greedy answer, up to `n` token ids, when only the `kept` candidates of images are seen.

        `start`: the prompt begins with the tokenizer's start token.
        """
        model = self.llava.model
        embed = model.get_input_embeddings()
        pieces = prompt.split("<image>")
        ids = self.processor.tokenizer(pieces[0], add_special_tokens=start).input_ids
        rows = [embed(torch.tensor(ids))]
        for image, patches, piece in zip(images, kept, pieces[1:], strict=True):
            hidden = torch.from_numpy(self._tokens(image).hidden[patches]).float()
            rows.append(model.multi_modal_projector(hidden))
            # A piece is tokenised as it is inside the prompt: after a special token.
            whole = self.processor.tokenizer(f"<image>{piece}", add_special_tokens=False)
            rows.append(embed(torch.tensor(whole.input_ids[1:], dtype=torch.long)))
        embeddings = torch.cat(rows)[None]
        answer: list[int] = []
        for _ in range(n):
            states = model.language_model(inputs_embeds=embeddings).last_hidden_state
            token = int(self.llava.lm_head(states[0, -1]).argmax())
            answer.append(token)
            if token == self.processor.tokenizer.eos_token_id:
                break
            embeddings = torch.cat([embeddings, embed(torch.tensor([[token]]))], dim=1)
        return answer

    def _preprocess(self, image: Image.Image) -> Any:
        return self.processor.image_processor(image, return_tensors="pt")

    def _tokens(self, image: Image.Image) -> Tokens:
        inputs = self._preprocess(image)
        pixels = inputs.pixel_values.flatten(0, -4)  # [units, 3, height, width]
        out = self.llava.model.vision_tower(
            pixels, output_attentions=True, output_hidden_states=True
        )
        hidden = out.hidden_states[-2][:, 1:].double().numpy()
        # hidden_states[-2] is the output of the layer whose attention is attentions[-2].
        importance = out.attentions[-2][:, :, 0, 1:].mean(dim=1).double().numpy()
        units, patches = np.array(self._candidates(inputs)).T
        return Tokens(hidden[units, patches], importance[units, patches], units)

    def _candidates(self, inputs: Any) -> list[tuple[int, int]]:
        """(unit, patch) of every candidate, in the order of the kept tokens."""
        return [(0, patch) for patch in range(self.llava.config.image_seq_length)]

    def _in_clip_space(self, hidden: np.ndarray) -> np.ndarray:
        states = self.clip.vision_model.post_layernorm(torch.from_numpy(hidden).float())
        return _normalised(self.clip.visual_projection(states).double().numpy())

    def _text_embeddings(self, question: str) -> list[np.ndarray]:
        words = self.clip_tokenizer(question, add_special_tokens=False).input_ids
        room = self.clip.config.text_config.max_position_embeddings - 2
        start, end = self.clip_tokenizer.bos_token_id, self.clip_tokenizer.eos_token_id
        texts = []
        for i in range(0, len(words), room):
            ids = torch.tensor([[start, *words[i : i + room], end]])
            pooled = self.clip.text_model(input_ids=ids).pooler_output
            texts.append(_normalised(self.clip.text_projection(pooled)[0].double().numpy()))
        return texts


class ReferenceLlavaNext(ReferenceLlava):
    """LLaVA-NeXT: units are the base view and the crops, as far as they show the picture."""

    def _candidates(self, inputs: Any) -> list[tuple[int, int]]:
        units, patches = len(inputs.pixel_values[0]), self.llava.config.image_seq_length
        numbers = torch.arange(units * patches, dtype=torch.float64).view(units, patches, 1)
        # Where transformers puts each patch; newlines are -1 there, padding is gone.
        (packed,), _ = self.llava.model.pack_image_features(
            [numbers], inputs.image_sizes, "default", image_newline=torch.tensor([-1.0])
        )
        shown = sorted(int(number) for number in packed.flatten() if number >= 0)
        return [divmod(number, patches) for number in shown]


def reference_of(model: Path) -> ReferenceLlava:
    """The reference for a demo model."""
    is_next = LlavaNextConfig.model_type in (model / "config.json").read_text()
    return ReferenceLlavaNext(model) if is_next else ReferenceLlava(model)


def largest_remainder(total: int, sizes: list[int]) -> list[int]:
    """`total` divided among units in proportion to their sizes; ties to the earlier unit."""
    exact = [Fraction(total * size, sum(sizes)) for size in sizes]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda u: (shares[u] - exact[u], u))
    for unit in by_remainder[: total - sum(shares)]:
        shares[unit] += 1
    return shares


def adaptive_anchor(relevance: np.ndarray, features: np.ndarray, budget: int) -> list[int]:
    """Stage 1: the first K_rel tokens by relevance."""
    order = sorted(range(len(relevance)), key=lambda i: (-relevance[i], i))
    smallest = max(1, 5 * budget // 32)
    largest = max(smallest, budget // 2)
    novel = 0
    for t in range(smallest, largest):
        distance = min(1 - features[order[t]] @ features[j] for j in order[:smallest])
        novel += distance > 0.2
        if novel == 3:
            return order[: t + 1]
    return order[:largest]


def expand(
    anchor: list[int], importance: np.ndarray, features: np.ndarray, budget: int
) -> list[int]:
    """Stage 2: importance x novelty, one token at a time."""
    kept = list(anchor) or [int(np.argmax(importance))]
    while len(kept) < budget:
        novelty = (1 - features @ features[kept].T).min(axis=1)
        score = importance * novelty
        score[kept] = -np.inf
        kept.append(int(np.argmax(score)))
    return kept


def _normalised(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)
