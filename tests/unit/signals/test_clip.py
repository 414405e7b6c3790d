# SPDX-License-Identifier: Apache-2.0
"""CLIP space against transformers' own CLIP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, CLIPModel

from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.signals.clip import ClipPair, ClipQueryTokenizer, ClipSignals
from anchorprune_vllm.worker.feature_cache import MediaFeatures

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


def test_relevance_is_negated_similarity(
    clip: CLIPModel, pair: ClipPair, tokenize: ClipQueryTokenizer
) -> None:
    media = [MediaFeatures(torch.randn(n, 64), torch.rand(n)) for n in (6, 9)]
    asked = ItemPlan(3, MediaTokens(6, (6,), (3,)), (1, 1), tokenize(QUESTION))
    silent = ItemPlan(4, MediaTokens(9, (2, 7), (2, 7)), (2, 2), tokenize(""))
    with torch.no_grad():
        first, second, third = ClipSignals(pair).candidates(
            [media[0], media[1], media[0]], [asked, silent, silent]
        )
        patches = F.normalize(
            clip.visual_projection(clip.vision_model.post_layernorm(media[0].hidden)), dim=-1
        )
        words = encode(clip, tokenize(QUESTION)[0].tolist())
    assert first.relevance is not None
    torch.testing.assert_close(first.relevance, -(patches @ words))
    torch.testing.assert_close(first.features, patches)
    assert first.context_features is media[0].hidden
    assert first.importance is media[0].importance
    assert (first.budget, second.budget) == (3, 4)
    assert second.relevance is None
    assert third.relevance is None
    assert second.features.shape == (9, 32)
    assert first.units is None
    assert second.units is not None
    assert second.units.tolist() == [0] * 2 + [1] * 7
