# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from anchorprune_vllm.worker.embedding_payload import append_numbers, split_numbers


def test_numbers_are_exact_in_every_dtype(subtests: pytest.Subtests) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        with subtests.test(dtype=dtype):
            numbers = torch.tensor([[0, 1, 255], [256, 257, 65535], [65536, 2**24 - 1, 123457]])
            rows = torch.randn(3, 5).to(dtype)
            carried = append_numbers(rows, numbers, digits=3)
            assert carried.dtype == dtype
            assert carried.shape == (3, 5 + 3 * 3)
            again, read = split_numbers(carried, count=3, digits=3)
            assert torch.equal(again, rows)
            assert read.tolist() == numbers.tolist()


def test_no_rows() -> None:
    carried = append_numbers(torch.empty(0, 5), torch.empty(0, 2, dtype=torch.long), digits=3)
    rows, numbers = split_numbers(carried, count=2, digits=3)
    assert rows.shape == (0, 5)
    assert numbers.shape == (0, 2)
