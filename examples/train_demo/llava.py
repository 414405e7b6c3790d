# SPDX-License-Identifier: Apache-2.0
"""The demo's LLaVA-1.5 of 256 visual tokens, and the CLIP that it is paired with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, LlamaConfig, LlamaForCausalLM

from anchorprune_vllm.commands.eval.vqa_data import Picture
from anchorprune_vllm.testing.demo_models import llava as demo_llava
from anchorprune_vllm.testing.demo_models import text_encoders
from anchorprune_vllm.testing.demo_models.random_weights import Config, Weights
from anchorprune_vllm.testing.demo_models.tokenizers import (
    make_clip_tokenizer,
    make_llama_tokenizer,
)
from examples.train_demo.looking import Looking
from examples.train_demo.pictures import IMAGE_SIZE
from examples.train_demo.places import PlaceLoss, left_of_patches
from examples.train_demo.sequences import SIDE, Chat, Sequences, put_tokens
from examples.train_demo.student import Seen, Student, renamed
from examples.train_demo.terms import GroundingLoss, Term, all_terms, labels_of
from examples.train_demo.vocabulary import WORDS

_CAPTIONS = 0.2
"""Weight of the global contrastive term."""
_LOOKS_LEFT = 2
"""The layer of the tower in which patches learn what stands beside them."""
_PROJECTOR = {"projector.0": "linear_1", "projector.2": "linear_2"}


@cache
def tokenizer() -> Tokenizer:
    """Return the language model's tokenizer."""
    return make_llama_tokenizer(["<image>", "<pad>"], WORDS)


@cache
def clip_tokenizer() -> Tokenizer:
    """Return the text tower's tokenizer."""
    return make_clip_tokenizer(WORDS.lower())


def clip_config() -> Config:
    """Return the configuration of the CLIP."""
    config = text_encoders.clip_config(clip_tokenizer().get_vocab_size(), IMAGE_SIZE)
    text = {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 384}
    config["text_config"] |= {**text, "num_hidden_layers": 2, "projection_dim": 64}
    vision = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 384}
    config["vision_config"] |= {**vision, "num_hidden_layers": 5, "projection_dim": 64}
    return config | {"projection_dim": 64}


def llava_config() -> Config:
    """Return the configuration of the LLaVA."""
    config = demo_llava.llava_config(tokenizer(), clip_config()["vision_config"])
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config["text_config"] |= {**sizes, "intermediate_size": 384, "num_hidden_layers": 3}
    return config


def phrases_of(term: Term) -> list[str]:
    """Return the questions about a term, in the words of the three sets; a letter by name."""
    colour, shape = term.colour, term.shape
    if term.letter:
        return [f"the letter {term.letter}"]
    if colour is None:
        return [f"what color is the {shape}?"]
    if shape is None:
        return [f"what is the {colour} shape?", f"is there a {colour} shape?"]
    if shape == "sign":
        return [f"what does the {colour} sign say?"]
    article = "an" if colour == "orange" else "a"
    return [f"is there {article} {colour} {shape}?", f"what is left of the {colour} {shape}?"]


def waves(side: int, width: int) -> Tensor:
    """Return embeddings [side · side, width] of the places in a square: sines and cosines."""
    frequencies = torch.logspace(math.log10(math.pi / 2), math.log10(math.pi / 64), width // 4)
    angles = torch.arange(side)[:, None] * frequencies
    line = torch.cat([angles.sin(), angles.cos()], dim=1)  # [side, width / 2]
    rows, columns = line[:, None].expand(-1, side, -1), line.expand(side, -1, -1)
    return 0.3 * torch.cat([rows, columns], dim=-1).flatten(0, 1)


class Llava(Student):
    """A language model behind the last but one layer of a CLIP's vision tower."""

    chat = Chat(
        words=tokenizer(),
        prompt="USER: <image>\n{question} ASSISTANT:",
        placeholder="<image>",
        end="</s>",
        position_of_text=lambda number: (number,),
        position_of_patch=lambda first, place: (first + place,),
    )

    def __init__(self) -> None:
        super().__init__()
        self.clip = CLIPModel(CLIPConfig(**clip_config()))
        config = LlamaConfig(**llava_config()["text_config"])
        self.language_model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        visual, hidden = self.clip.config.vision_config.hidden_size, config.hidden_size
        self.projector = nn.Sequential(
            nn.Linear(visual, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )
        self.grounding = GroundingLoss()
        self.places = PlaceLoss(visual)
        tower = self.clip.vision_model
        self._looking_left = Looking(tower.encoder.layers[_LOOKS_LEFT].self_attn)
        self._looking = Looking(self.language_model.model.layers[1].self_attn)
        for name, weight in self.named_parameters():
            # As wide as this; what transformers takes is for models of thousands.
            if self.answers_with(name) and weight.ndim == 2:
                nn.init.normal_(weight, std=0.5 if "embed" in name else 0.08)
        with torch.no_grad():
            # Patches find their neighbours at once; from random numbers it takes them hours.
            table = tower.embeddings.position_embedding.weight
            table[1:] = waves(SIDE, visual)
        asked = [(term, phrase) for term in all_terms() for phrase in phrases_of(term)]
        self._terms = tuple(term for term, _ in asked)
        self._phrases = [phrase for _, phrase in asked]

    def see(self, pixels: Tensor) -> Seen:
        tower = self.clip.vision_model(pixels, output_hidden_states=True)
        hidden = tower.hidden_states[-2][:, 1:]
        patches = self.clip.visual_projection(self.clip.vision_model.post_layernorm(hidden))
        whole = self.clip.visual_projection(tower.pooler_output)
        return Seen(hidden, patches, whole)

    def answers_with(self, name: str) -> bool:
        return name.startswith(("projector.", "language_model."))

    def seeing_loss(self, seen: Seen, pictures: Sequence[Picture]) -> Tensor:
        """Patches are held to what they show, and to phrases; whole pictures to their captions."""
        grounding = self.grounding(self.cosines(seen), labels_of(pictures, self._terms))
        captions = _CAPTIONS * self._caption_loss(seen, pictures)
        places = self.places(seen.features, pictures) + self._left_loss(pictures)
        return places + grounding + captions

    def _left_loss(self, pictures: Sequence[Picture]) -> Tensor:
        """Patches look at what stands to the left of them."""
        left = F.pad(torch.stack([left_of_patches(picture) for picture in pictures]), (1, 0))
        batch, patch = left.any(-1).nonzero(as_tuple=True)
        if not len(batch):
            return torch.zeros(())
        return self._looking_left.loss((batch, patch + 1), left[batch, patch], None)

    def looking_loss(self, batch: Sequences) -> Tensor:
        return self._looking.loss(*batch.looking(self.chat.placeholder_id))

    def cosines(self, seen: Seen) -> Tensor:
        """Return the cosines [B, T, N] of all phrases with the patches of each picture."""
        patches = F.normalize(seen.patches.float(), dim=-1)
        return self.embed_texts(self._phrases) @ patches.mT

    def _caption_loss(self, seen: Seen, pictures: Sequence[Picture]) -> Tensor:
        """Contrast pictures with the captions of the batch; some pictures have the same."""
        captions = [picture.caption or "" for picture in pictures]
        texts = self.embed_texts(list(dict.fromkeys(captions)))
        same = torch.tensor([[a == b for b in dict.fromkeys(captions)] for a in captions]).float()
        scale = self.clip.logit_scale.exp().clamp(max=50)
        logits = scale * F.normalize(seen.whole.float(), dim=-1) @ texts.T
        to_texts = F.cross_entropy(logits, same)
        to_pictures = F.cross_entropy(logits.T, (same / same.sum(0)).T)
        return (to_texts + to_pictures) / 2

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return texts in the space of the patches, normalised: float32 [T, P]."""
        encoded = clip_tokenizer().encode_batch(list(texts))
        longest = max(len(each.ids) for each in encoded)
        end = clip_tokenizer().token_to_id("<|endoftext|>")
        ids = torch.tensor([each.ids + [end] * (longest - len(each.ids)) for each in encoded])
        pooled = self.clip.text_model(input_ids=ids).pooler_output
        return F.normalize(self.clip.text_projection(pooled).float(), dim=-1)

    def answer_logits(self, features: Tensor, batch: Sequences) -> Tensor:
        at = int((batch.ids[0] == self.chat.placeholder_id).nonzero()[0])
        rows = self.language_model.get_input_embeddings()(batch.ids)
        states = self.language_model.model(
            inputs_embeds=put_tokens(rows, self.projector(features), at),
            position_ids=batch.positions[..., 0],
            attention_mask=batch.mask,
        ).last_hidden_state
        return self.language_model.lm_head(states[batch.targets >= 0]).float()

    def write(self, out: Path, weights: Weights) -> None:
        clip = renamed(weights, {"clip.": ""})
        llava = renamed(
            weights,
            {
                "clip.vision_model.": "vision_tower.vision_model.",
                "language_model.": "language_model.",
                **{own: f"multi_modal_projector.{hub}" for own, hub in _PROJECTOR.items()},
            },
        )
        dtype = {"dtype": "bfloat16"}
        text_encoders.write_clip_files(out / "clip", clip_config() | dtype, clip, clip_tokenizer())
        # As in training, a prompt begins with <s>, which servers leave to the template.
        template = "{{- bos_token -}}\n" + demo_llava.CHAT_TEMPLATE
        demo_llava.write_llava_files(out, llava_config() | dtype, llava, tokenizer(), template)
