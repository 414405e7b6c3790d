# SPDX-License-Identifier: Apache-2.0
"""The demo's Qwen2.5-VL, whose visual tokens lie among the embeddings of words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

from anchorprune_vllm.commands.eval.vqa_data import Picture
from anchorprune_vllm.testing.demo_models import qwen
from anchorprune_vllm.testing.demo_models.random_weights import Config, Sizes, Weights
from anchorprune_vllm.testing.demo_models.tokenizers import make_qwen_tokenizer
from examples.train_demo.looking import Looking
from examples.train_demo.pictures import IMAGE_SIZE
from examples.train_demo.places import PlaceLoss
from examples.train_demo.sequences import SIDE, VISUAL_TOKENS, Chat, Sequences, put_tokens
from examples.train_demo.student import Seen, Student, renamed
from examples.train_demo.terms import GroundingLoss, all_terms, labels_of
from examples.train_demo.vocabulary import ANSWERS, WORDS

_PATCH = IMAGE_SIZE // SIDE
_SIZES = Sizes(
    vision={
        "depth": 5,
        "hidden_size": 128,
        "intermediate_size": 384,
        # A token is one patch: four of them would cost four times as much.
        "spatial_merge_size": 1,
        "fullatt_block_indexes": [2, 4],
    },
    text={
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    },
)
_STOP_WORDS = (
    "what is the color shape does say left of there a an ? image contain present not no in"
)
"""Words of the questions that no token is about."""


@cache
def tokenizer() -> Tokenizer:
    """Return the language model's tokenizer."""
    return make_qwen_tokenizer(qwen.SPECIALS, f"{WORDS} {ANSWERS}")


def config() -> Config:
    """Return the configuration of the model."""
    return qwen.qwen_config(tokenizer(), _SIZES)


def _position_of_text(number: int) -> tuple[int, ...]:
    # A square of tokens takes as many positions as its side.
    return (number if number < _FIRST_TOKEN else number - VISUAL_TOKENS + SIDE,) * 3


def _position_of_patch(first: int, place: int) -> tuple[int, ...]:
    row, column = divmod(place, SIDE)
    return first, first + row, first + column


_PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{question}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
_FIRST_TOKEN = tokenizer().encode(_PROMPT).ids.index(tokenizer().token_to_id("<|image_pad|>"))


class Qwen(Student):
    """transformers' own model, with a tower that sees equal pictures at once."""

    chat = Chat(
        words=tokenizer(),
        prompt=_PROMPT,
        placeholder="<|image_pad|>",
        end="<|im_end|>",
        position_of_text=_position_of_text,
        position_of_patch=_position_of_patch,
    )

    def __init__(self) -> None:
        super().__init__()
        self.qwen = Qwen2_5_VLForConditionalGeneration._from_config(
            Qwen2_5_VLConfig(**config()), attn_implementation="sdpa"
        )
        tower = self.qwen.model.visual
        for block in tower.blocks:
            block.attn = _EqualParts(tower.config)
        self.grounding = GroundingLoss()
        self.places = PlaceLoss(tower.config.out_hidden_size)
        self._terms = tuple(all_terms())
        self._looking = Looking(self.qwen.model.language_model.layers[1].self_attn)

    def see(self, pixels: Tensor) -> Seen:
        grids = torch.tensor([[1, SIDE, SIDE]] * len(pixels))
        rows = self.qwen.model.visual(patches_of(pixels), grid_thw=grids).pooler_output
        tokens = rows.unflatten(0, (len(pixels), VISUAL_TOKENS))
        return Seen(tokens, tokens)

    def answers_with(self, name: str) -> bool:
        # Visual tokens have learned to lie among the embeddings, which must not move then.
        return name.startswith(("qwen.lm_head.", "qwen.model.language_model.")) and (
            "embed_tokens" not in name
        )

    def seeing_loss(self, seen: Seen, pictures: Sequence[Picture]) -> Tensor:
        """Tokens are held to what they show, and to the words that are true of the picture."""
        tokens = F.normalize(seen.patches, dim=-1)
        words = [_embedding_of(self.qwen, term.words()) for term in self._terms]
        about = torch.stack([F.normalize(each, dim=-1).mean(0) for each in words])
        stop = F.normalize(_embedding_of(self.qwen, _STOP_WORDS.split()), dim=-1)
        cosines = torch.cat([about, stop]) @ tokens.mT
        labels = F.pad(labels_of(pictures, self._terms), (0, len(stop)))
        return self.places(seen.features, pictures) + self.grounding(cosines, labels)

    def answer_logits(self, features: Tensor, batch: Sequences) -> Tensor:
        rows = self.qwen.get_input_embeddings()(batch.ids)
        states = self.qwen.model.language_model(
            inputs_embeds=put_tokens(rows, features, _FIRST_TOKEN),
            position_ids=batch.positions.permute(2, 0, 1),
            attention_mask={"full_attention": batch.mask},
        ).last_hidden_state
        return self.qwen.lm_head(states[batch.targets >= 0]).float()

    def looking_loss(self, batch: Sequences) -> Tensor:
        return self._looking.loss(*batch.looking(self.chat.placeholder_id))

    def write(self, out: Path, weights: Weights) -> None:
        hub = {
            "qwen.model.visual.": "visual.",
            "qwen.model.language_model.": "model.",
            "qwen.lm_head.": "lm_head.",
        }
        qwen.write_qwen_files(
            out,
            config() | {"dtype": "bfloat16"},
            renamed(weights, hub),
            tokenizer(),
            (IMAGE_SIZE**2, IMAGE_SIZE**2),
        )


def _embedding_of(qwen: Any, words: Sequence[str]) -> Tensor:
    """Return the embeddings [M, H] of words as they stand inside a question, float32."""
    texts = [f"a{word}" if word == "?" else f"a {word}" for word in words]
    ids = torch.tensor([tokenizer().encode(text).ids[-1] for text in texts])
    return qwen.get_input_embeddings()(ids).float()


def patches_of(pixels: Tensor) -> Tensor:
    """Return pixels [B, 3, 224, 224] as the processor gives them: [B · 256, 3 · 2 · 196].

    A picture is two frames alike.
    """
    # [B, C, row, y, column, x] to [B, row, column, C, frame, y, x]
    patches = pixels.unflatten(3, (SIDE, _PATCH)).unflatten(2, (SIDE, _PATCH))
    patches = patches.permute(0, 2, 4, 1, 3, 5)[:, :, :, :, None].expand(*(-1,) * 4, 2, -1, -1)
    return patches.flatten(0, 2).flatten(1)


class _EqualParts(modeling.Qwen2_5_VLVisionAttention):
    """The tower's attention where all windows, or all pictures, have the same size.

    transformers runs one after the other: most of a step.
    """

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        query, key, value = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        query, key = modeling.apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        in_parts = [
            each.unflatten(0, (len(cu_seqlens) - 1, -1)).transpose(1, 2)
            for each in (query.to(value.dtype), key.to(value.dtype), value)
        ]
        attended = F.scaled_dot_product_attention(*in_parts)
        return self.proj(attended.transpose(1, 2).flatten(0, 1).flatten(1))
