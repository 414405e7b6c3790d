# SPDX-License-Identifier: Apache-2.0
"""CLIP space against transformers' own CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, CLIPModel

from anchorprune_vllm.signals.clip import ClipPair, ClipQueryTokenizer
from anchorprune_vllm.signals.contrastive import ContrastiveRelevance
from anchorprune_vllm.signals.features import MediaFeatures

CPU = torch.device("cpu")
QUESTION = "What is to the left of the tree?"


@pytest.fixture(scope="module")
def clip(demo_model: Path) -> CLIPModel:
    return CLIPModel.from_pretrained(demo_model / "clip").eval()


@pytest.fixture
def pair(demo_model: Path) -> ClipPair:
    return ClipPair(str(demo_model / "clip"), torch.float32, CPU)


@pytest.fixture(scope="module")
def tokenize(demo_model: Path) -> ClipQueryTokenizer:
    return ClipQueryTokenizer(str(demo_model / "clip"))


def encode(clip: CLIPModel, ids: list[int]) -> torch.Tensor:
    pooled = clip.text_model(input_ids=torch.tensor([ids])).pooler_output
    return F.normalize(clip.text_projection(pooled)[0], dim=-1)


def test_short_query_is_one_segment(demo_model: Path, tokenize: ClipQueryTokenizer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model / "clip")
    assert tokenize(QUESTION).tolist() == [tokenizer(QUESTION).input_ids]


def test_no_query_has_no_segments(tokenize: ClipQueryTokenizer) -> None:
    assert len(tokenize("")) == 0


def test_special_tokens_are_words_when_the_user_writes_them(tokenize: ClipQueryTokenizer) -> None:
    ids = tokenize("a dog <|endoftext|> and a cat")[0].tolist()
    assert ids.index(tokenize._tokenizer.eos_token_id) == len(ids) - 1


@pytest.mark.parametrize("words", [75, 76, 150, 151, 400])
def test_long_query_is_cut_into_whole_segments(tokenize: ClipQueryTokenizer, words: int) -> None:
    tokenizer = tokenize._tokenizer
    query = " ".join(["dog"] * words)
    ids = tokenizer(query, add_special_tokens=False).input_ids
    segments = tokenize(query)
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert segments.shape == (-(-len(ids) // 75), 77)
    assert (segments[:, 0] == start).all()
    assert (segments[:, -1] == end).all()
    read = [i for row in segments.tolist() for i in row if i not in (start, end)]
    assert read == ids


def test_query_is_the_mean_of_its_segments(
    clip: CLIPModel, pair: ClipPair, tokenize: ClipQueryTokenizer
) -> None:
    query = "A red circle, and a blue square. " * 20
    segments = tokenize(query)
    end = tokenize._tokenizer.eos_token_id
    unpadded = [row[: row.index(end) + 1] for row in segments.tolist()]
    assert len(unpadded) > 1
    with torch.no_grad():
        expected = torch.stack([encode(clip, row) for row in unpadded]).mean(0)
        torch.testing.assert_close(pair.embed_queries([segments])[0], expected)


def test_queries_encoded_together_and_alone_agree(
    pair: ClipPair, demo_model: Path, tokenize: ClipQueryTokenizer
) -> None:
    queries = [tokenize(q) for q in (QUESTION, "dog", QUESTION, "Where is the cat? " * 30)]
    with torch.no_grad():
        together = pair.embed_queries(queries)
        for ids, embedding in zip(queries, together, strict=True):
            fresh = ClipPair(str(demo_model / "clip"), torch.float32, CPU)
            torch.testing.assert_close(fresh.embed_queries([ids])[0], embedding)


def test_a_known_query_is_not_encoded_again(
    pair: ClipPair, tokenize: ClipQueryTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    pair._text_model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr("anchorprune_vllm.signals.contrastive._CACHED_QUERIES", 2)
    a, b, c = (tokenize(q) for q in ("a dog", "a cat", "a house"))
    with torch.no_grad():
        pair.embed_queries([a, b, a])
        pair.embed_queries([b, a])
        assert calls == [2]
        pair.embed_queries([c])  # the oldest, b, goes
        pair.embed_queries([a])
        assert calls == [2, 1]
        pair.embed_queries([b])
        assert calls == [2, 1, 1]


def test_patches_are_projected_as_clip_does(clip: CLIPModel, pair: ClipPair) -> None:
    hidden = torch.randn(5, 64)
    with torch.no_grad():
        expected = clip.visual_projection(clip.vision_model.post_layernorm(hidden))
        torch.testing.assert_close(pair.embed_patches(hidden), expected)


@pytest.mark.parametrize(("similarity", "sign"), [("negated", -1), ("raw", 1)])
def test_relevance_is_similarity_with_the_question(
    clip: CLIPModel, pair: ClipPair, tokenize: ClipQueryTokenizer, similarity: Any, sign: int
) -> None:
    hidden = [torch.randn(n, 64) for n in (6, 9)]
    with torch.no_grad():
        media = [MediaFeatures(rows, aligned=pair.embed_patches(rows)) for rows in hidden]
        first, second = ContrastiveRelevance(pair, similarity)(
            media, [tokenize(QUESTION), tokenize("")]
        )
        patches = clip.visual_projection(clip.vision_model.post_layernorm(hidden[0]))
        words = encode(clip, tokenize(QUESTION)[0].tolist())
    assert first is not None
    torch.testing.assert_close(first, sign * (F.normalize(patches, dim=-1) @ words))
    assert second is None
