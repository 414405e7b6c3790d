# SPDX-License-Identifier: Apache-2.0
"""AnchorPrune on LLaVA-1.5 from the paper's equations, on transformers in eager mode.

Shares no code with the plugin: the attention matrices are the dense ones of `output_attentions`,
selection is plain numpy in float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    CLIPModel,
    LlavaForConditionalGeneration,
)


class ReferenceLlava:
    """LLaVA-1.5 and its CLIP in transformers."""

    def __init__(self, model: Path) -> None:
        eager = {"attn_implementation": "eager", "dtype": torch.float32}
        self.llava = LlavaForConditionalGeneration.from_pretrained(model, **eager).eval()
        self.processor = AutoProcessor.from_pretrained(model)
        self.clip = CLIPModel.from_pretrained(model / "clip", **eager).eval()
        self.clip_tokenizer = AutoTokenizer.from_pretrained(model / "clip")

    @torch.inference_mode()
    def kept(self, image: Image.Image, question: str, budget: int) -> list[int]:
        """Indices of the kept patches, ascending."""
        hidden, importance = self._tower(image)
        patches = self._in_clip_space(hidden)
        if question:
            texts = self._text_embeddings(question)
            relevance = -np.mean([patches @ text for text in texts], axis=0)
            anchor = adaptive_anchor(relevance, patches, budget)
        else:
            anchor = []
        return sorted(expand(anchor, importance, _normalised(hidden), budget))

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
        """Greedy answer, up to `n` token ids, when only the `kept` patches of images are seen.

        `start`: the prompt begins with the tokenizer's start token.
        """
        model = self.llava.model
        embed = model.get_input_embeddings()
        pieces = prompt.split("<image>")
        ids = self.processor.tokenizer(pieces[0], add_special_tokens=start).input_ids
        rows = [embed(torch.tensor(ids))]
        for image, patches, piece in zip(images, kept, pieces[1:], strict=True):
            hidden = torch.from_numpy(self._tower(image)[0][patches]).float()
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

    def _tower(self, image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
        pixels = self.processor.image_processor(image, return_tensors="pt").pixel_values
        out = self.llava.model.vision_tower(
            pixels, output_attentions=True, output_hidden_states=True
        )
        hidden = out.hidden_states[-2][0, 1:]
        # hidden_states[-2] is the output of the layer whose attention is attentions[-2].
        importance = out.attentions[-2][0, :, 0, 1:].mean(dim=0)
        return hidden.double().numpy(), importance.double().numpy()

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
