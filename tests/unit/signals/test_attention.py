# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from anchorprune_vllm.signals import attention
from anchorprune_vllm.signals.attention import cls_attention, received_attention
from tests.support.asked_bytes import AskedBytes


class Attention(nn.Module):
    num_heads = 4
    scale = 0.3

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_first_row_of_dense_attention(dtype: torch.dtype) -> None:
    query, key = torch.randn(2, 3, 17, 4 * 8).to(dtype)
    q, k = (x.float().unflatten(2, (4, 8)).transpose(1, 2) for x in (query, key))
    dense = (q @ k.mT * 0.3).softmax(-1)
    expected = dense[:, :, 0].sum(1)
    torch.testing.assert_close(cls_attention(query, key, 4, 0.3), expected)


def dense(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Attention matrices [H, T, T] of one segment, in float64."""
    q, k = (x.double().transpose(0, 1) for x in (query, key))
    return (q @ k.mT * scale).softmax(-1)


@pytest.mark.parametrize("segments", [[1], [7], [30, 1, 12], [9] * 5])
@pytest.mark.parametrize(("rows", "numbers"), [(1, 1), (3, 1), (2, 100), (4, 200), (128, 2**20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_received_equals_the_mean_of_dense_columns(
    segments: list[int],
    rows: int,
    numbers: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_FEWEST_ROWS", rows)
    monkeypatch.setattr(attention, "_BLOCK_NUMBERS", numbers)
    query, key = (3 * torch.randn(2, sum(segments), 4, 8)).to(dtype)
    expected = [
        dense(q, k, 0.3).mean(1).sum(0)
        for q, k in zip(query.split(segments), key.split(segments), strict=True)
    ]
    received = received_attention(query, key, segments, 0.3)
    torch.testing.assert_close(received, torch.cat(expected).float())
    assert received.sum() == pytest.approx(4 * len(segments))


def test_received_has_no_gradient() -> None:
    query, key = torch.randn(2, 12, 2, 8)
    expected = received_attention(query, key, [12], 0.3)
    assert torch.equal(received_attention(query.requires_grad_(), key, [12], 0.3), expected)


def test_received_holds_no_matrix() -> None:
    """The largest tensor has as many bytes per token when there are twice as many."""
    largest = []
    for tokens in (8192, 16384):
        query, key = torch.randn(2, tokens, 1, 8)
        with AskedBytes() as asked:
            received_attention(query, key, [tokens], 0.3)
        largest.append(asked.largest / tokens)
    assert 0 < largest[1] <= min(largest[0], 1024)


@pytest.mark.parametrize("segments", [[], [5], [7, 1], [7, 0], [8, -1]])
def test_segments_have_to_make_up_the_tokens(segments: list[int]) -> None:
    query, key = torch.randn(2, 7, 2, 8)
    with pytest.raises(ValueError, match=r"do not make up 7 tokens: give their lengths, at least"):
        received_attention(query, key, segments, 0.3)


def test_keys_are_not_copied_for_one_row() -> None:
    """They lie side by side with queries and values, as a tower has them."""
    query, key, _ = torch.randn(4, 256, 3 * 512).chunk(3, 2)
    with AskedBytes() as asked:
        cls_attention(query, key, 8, 0.3)
    assert 0 < asked.total < key.nbytes / 5
