# SPDX-License-Identifier: Apache-2.0
"""SigLIP space against transformers' own SigLIP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, SiglipModel

from anchorprune_vllm.signals.contrastive import ContrastiveRelevance
from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.signals.siglip import SiglipPair, SiglipQueryTokenizer

QUESTION = "What is to the left of the tree?"


@pytest.fixture(scope="module")
def checkpoint(demo_models: Any) -> Path:
    return demo_models("llava-video") / "siglip"


@pytest.fixture(scope="module")
def siglip(checkpoint: Path) -> SiglipModel:
    return SiglipModel.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> SiglipPair:
    return SiglipPair(str(checkpoint), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenize(checkpoint: Path) -> SiglipQueryTokenizer:
    return SiglipQueryTokenizer(str(checkpoint))


def test_short_query_is_written_as_in_training(
    checkpoint: Path, tokenize: SiglipQueryTokenizer
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    expected = tokenizer(QUESTION, padding="max_length", max_length=64).input_ids
    assert tokenize(QUESTION).tolist() == [expected]
    assert len(expected) == 64


def test_no_query_has_no_segments(tokenize: SiglipQueryTokenizer) -> None:
    assert tokenize("").shape == (0, 64)


def test_special_tokens_are_words_when_the_user_writes_them(
    tokenize: SiglipQueryTokenizer,
) -> None:
    plain, written = (tokenize(f"a dog{words} and a cat")[0].tolist() for words in ("", " </s>"))
    end = tokenize._tokenizer.eos_token_id
    assert written.index(end) > plain.index(end)


@pytest.mark.parametrize("words", [63, 64, 126, 127, 400])
def test_long_query_is_cut_into_whole_segments(tokenize: SiglipQueryTokenizer, words: int) -> None:
    query = " ".join(["a"] * words)
    ids = tokenize._tokenizer(query, add_special_tokens=False).input_ids
    segments = tokenize(query)
    end = tokenize._tokenizer.eos_token_id
    assert segments.shape == (-(-len(ids) // 63), 64)
    assert (segments[:, -1] == end).all()  # it fills up, too
    assert [i for row in segments.tolist() for i in row if i != end] == ids


def test_tokenizer_without_its_files(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        if file.name != "spiece.model":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises((OSError, ValueError)):
        SiglipQueryTokenizer(str(tmp_path))


def test_a_patch_is_embedded_as_the_head_does_alone(siglip: SiglipModel, pair: SiglipPair) -> None:
    hidden = torch.randn(3, 5, 64)
    with torch.no_grad():
        alone = siglip.vision_model.post_layernorm(hidden).flatten(0, 1)[:, None]
        expected = siglip.vision_model.head(alone).view(3, 5, 64)
        torch.testing.assert_close(pair.embed_patches(hidden), expected)


def test_relevance_is_the_mean_over_the_segments_of_a_question(
    siglip: SiglipModel, pair: SiglipPair, tokenize: SiglipQueryTokenizer
) -> None:
    item = MediaFeatures(torch.randn(6, 4), aligned=torch.randn(6, 64))
    query = "A red circle, and a blue square. " * 20
    with torch.no_grad():
        first, second = ContrastiveRelevance(pair)([item, item], [tokenize(query), tokenize("")])
        words = F.normalize(siglip.text_model(input_ids=tokenize(query)).pooler_output, dim=-1)
    assert len(words) > 1
    expected = -(F.normalize(item.aligned, dim=-1) @ words.T).mean(1)
    torch.testing.assert_close(first, expected)
    assert second is None
