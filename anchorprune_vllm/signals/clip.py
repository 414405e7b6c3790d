# SPDX-License-Identifier: Apache-2.0
"""Relevance in CLIP space, for models whose vision tower is one half of a CLIP pair.

The tower is already in the model; this module brings the other half: the text tower and the two
small pieces that put a patch into the shared space (`post_layernorm`, which the model's checkpoint
never trains and vLLM drops, and `visual_projection`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, CLIPModel

from anchorprune_vllm.feature_cache import MediaFeatures
from anchorprune_vllm.plan import ItemPlan
from anchorprune_vllm.selection import Candidates

# Towers are told apart by size: an HF LLaVA config does not name the CLIP it was built on.
_TOWER_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "image_size",
    "patch_size",
)
_KNOWN_PAIRS = {(1024, 24, 16, 336, 14): "openai/clip-vit-large-patch14-336"}

_CACHED_QUERIES = 1024
_SEGMENTS_PER_CALL = 64


def find_text_encoder(vision_config: Any, given: str | None) -> str:
    """The checkpoint paired with a CLIP vision tower: the one given, or the published one.

    Raises ValueError when none is known, it cannot be read, or its tower is another one.
    """
    sizes = {name: getattr(vision_config, name) for name in _TOWER_SIZES}
    text_encoder = given or _KNOWN_PAIRS.get(tuple(sizes.values()))
    if text_encoder is None:
        raise ValueError(
            f"anchorprune: no text encoder is known for this vision tower ({_written(sizes)}); "
            "name its paired CLIP checkpoint with --anchorprune-text-encoder ID_OR_PATH"
        )
    try:
        config = AutoConfig.from_pretrained(text_encoder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"anchorprune: cannot read the text encoder {text_encoder!r} "
            f"({str(error).splitlines()[0]}); give --anchorprune-text-encoder the hub id or local "
            "path of the CLIP checkpoint that the vision tower comes from"
        ) from error
    if config.model_type != "clip":
        raise ValueError(
            f"anchorprune: the text encoder {text_encoder!r} is a {config.model_type!r} model, but "
            "this vision tower needs a full CLIP checkpoint (model_type 'clip')"
        )
    paired = {name: getattr(config.vision_config, name) for name in _TOWER_SIZES}
    if paired != sizes:
        raise ValueError(
            f"anchorprune: the text encoder {text_encoder!r} does not fit the vision tower: it is "
            f"paired with a tower of {_written(paired)}, the model has {_written(sizes)}"
        )
    return text_encoder


def check_files(text_encoder: str) -> None:
    """Raise ValueError if a text encoder has no tokenizer or, on this disk, no weights."""
    remedy = "give --anchorprune-text-encoder a complete CLIP checkpoint"
    try:
        ClipQueryTokenizer(text_encoder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"anchorprune: the text encoder {text_encoder!r} has no tokenizer of its own "
            f"({str(error).splitlines()[0]}); {remedy}"
        ) from error
    path = Path(text_encoder)
    if path.is_dir() and not any([*path.glob("*.safetensors"), *path.glob("*.bin")]):
        raise ValueError(f"anchorprune: the text encoder {text_encoder!r} has no weights; {remedy}")


def _written(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


class ClipQueryTokenizer:
    """Query words to segments that fit the text tower, each with its own start and end token."""

    def __init__(self, text_encoder: str) -> None:
        # The user's words are words, even "<|endoftext|>".
        self._tokenizer = AutoTokenizer.from_pretrained(text_encoder, split_special_tokens=True)
        text_config = AutoConfig.from_pretrained(text_encoder).text_config
        # Without its files transformers makes up an empty tokenizer.
        if len(self._tokenizer) != text_config.vocab_size:
            raise ValueError(
                f"{len(self._tokenizer)} tokens for a vocabulary of {text_config.vocab_size}"
            )
        self._words_per_segment = text_config.max_position_embeddings - 2

    def __call__(self, query: str) -> Tensor:
        """Token ids [segments, length], short segments filled up with end tokens.

        The tower is causal and is read at the first end token, so the filling changes nothing.
        """
        start, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        # Not verbose: a query longer than the tower's context is no mistake here.
        words = self._tokenizer(query, add_special_tokens=False, verbose=False).input_ids
        length = min(len(words), self._words_per_segment)
        segments = [words[i : i + length] for i in range(0, len(words), length or 1)]
        rows = [[start, *row, *[end] * (length + 1 - len(row))] for row in segments]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1 if rows else 0)


class ClipPair:
    """The half of a CLIP checkpoint that the model lacks, on the model's device, in its dtype."""

    def __init__(self, text_encoder: str, dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("cpu"):
            clip = CLIPModel.from_pretrained(text_encoder, dtype=dtype).eval()
        # Moved piece by piece: CLIP's own vision tower never reaches the device.
        self._text_model = clip.text_model.to(device)
        self._text_projection = clip.text_projection.to(device)
        self._post_layernorm = clip.vision_model.post_layernorm.to(device)
        self._visual_projection = clip.visual_projection.to(device)
        self._device = device
        self._queries: OrderedDict[bytes, Tensor] = OrderedDict()

    def tensors(self) -> list[Tensor]:
        """Everything that is on the device."""
        parts = (
            self._text_model,
            self._text_projection,
            self._post_layernorm,
            self._visual_projection,
        )
        return [
            tensor.detach()
            for part in parts
            for tensor in itertools.chain(part.parameters(), part.buffers())
        ]

    def embed_patches(self, hidden: Tensor) -> Tensor:
        """Patches in CLIP space: [..., D] to float32 [..., P], normalised."""
        return F.normalize(self._visual_projection(self._post_layernorm(hidden)).float(), dim=-1)

    def embed_queries(self, queries: Sequence[Tensor]) -> list[Tensor]:
        """For each query's segments [M, L], the mean of their normalised embeddings: float32 [P].

        That mean is all the method needs: averaging a patch's similarity over segments is its
        similarity to the mean. All queries not seen lately are encoded together.
        """
        keys = [ids.numpy().tobytes() for ids in queries]
        asked = dict(zip(keys, queries, strict=True))
        missing = [key for key in asked if key not in self._queries]
        if missing:
            encoded = self._encode([asked[key] for key in missing])
            self._queries.update(zip(missing, encoded, strict=True))
        for key in asked:
            self._queries.move_to_end(key)
        embeddings = [self._queries[key] for key in keys]
        while len(self._queries) > _CACHED_QUERIES:
            self._queries.popitem(last=False)
        return embeddings

    def _encode(self, queries: Sequence[Tensor]) -> list[Tensor]:
        longest = max(ids.shape[1] for ids in queries)
        # The last token of a segment is an end token: repeating it fills up a shorter one.
        segments = torch.cat(
            [torch.cat([ids, ids[:, -1:].expand(-1, longest - ids.shape[1])], 1) for ids in queries]
        ).to(self._device, non_blocking=True)
        embeddings = torch.cat(
            [
                self._text_projection(self._text_model(input_ids=chunk).pooler_output)
                for chunk in segments.split(_SEGMENTS_PER_CALL)
            ]
        )
        per_query = F.normalize(embeddings.float(), dim=-1).split([len(ids) for ids in queries])
        return [segments.mean(dim=0) for segments in per_query]


class ClipSignals:
    """Signals of models with a CLIP tower: relevance and anchor novelty in CLIP space."""

    def __init__(self, pair: ClipPair) -> None:
        self._pair = pair

    def candidates(
        self, features: Sequence[MediaFeatures], plans: Sequence[ItemPlan]
    ) -> list[Candidates]:
        """One `Candidates` per item; media that several items share are embedded once."""
        media = {id(item): item for item in features}
        hidden = [item.hidden for item in media.values()]
        patches = self._pair.embed_patches(torch.cat(hidden)).split([len(h) for h in hidden])
        patches_of = dict(zip(media, patches, strict=True))

        asked = [i for i, plan in enumerate(plans) if len(plan.query_ids)]
        words = self._pair.embed_queries([plans[i].query_ids for i in asked])
        words_of = dict(zip(asked, words, strict=True))
        return [
            Candidates(
                # Negated: raw patch-text similarity favours background (paper, Stage 1).
                relevance=-(patches_of[id(item)] @ words_of[i]) if i in words_of else None,
                features=patches_of[id(item)],
                importance=item.importance,
                budget=plan.kept,
                context_features=item.hidden,
                units=plan.units,
            )
            for i, (item, plan) in enumerate(zip(features, plans, strict=True))
        ]
