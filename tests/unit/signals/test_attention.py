# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from anchorprune_vllm.signals.attention import cls_attention, tap_cls_attention


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


def test_tap_records_while_entered_and_changes_nothing() -> None:
    attention = Attention()
    calls = [torch.randn(3, b, 5, 32).unbind() for b in (2, 1)]
    attention(*calls[0])
    with tap_cls_attention(attention) as taken:
        for call in calls:
            assert attention(*call) is call[2]
    attention(*calls[0])
    assert [len(rows) for rows in taken] == [2, 1]
    for rows, (query, key, _) in zip(taken, calls, strict=True):
        assert torch.equal(rows, cls_attention(query, key, 4, 0.3))
    assert not attention._forward_pre_hooks
