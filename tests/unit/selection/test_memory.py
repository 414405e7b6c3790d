# SPDX-License-Identifier: Apache-2.0
"""Selection asks for memory as the tokens grow, and for no N x N matrix: counted, not measured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from anchorprune_vllm.selection import AnchorParams, Candidates, select_batch
from tests.support.asked_bytes import AskedBytes


def candidates(tokens: int) -> Candidates:
    noise = torch.Generator().manual_seed(0)
    return Candidates(
        relevance=torch.randn(tokens, generator=noise),
        features=torch.randn(tokens, 12, generator=noise),
        importance=torch.rand(tokens, generator=noise),
        budget=tokens // 9,
        context_features=torch.randn(tokens, 16, generator=noise),
    )


@pytest.mark.parametrize("compiled", [True, False])
def test_no_tensor_has_a_row_of_all_tokens_for_each_token(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """In both forms: the plain one has all steps in torch."""
    if not compiled:
        monkeypatch.setattr("anchorprune_vllm.selection.batch.reads_are_free", lambda _: False)
    item = candidates(10_000)
    with AskedBytes() as asked:
        (kept,) = select_batch([item], AnchorParams())
    assert len(kept.indices) == item.budget
    # Rows in float64 are the largest, and the products of a token's unit with its first ranks.
    assert 0 < asked.largest <= 10_000 * 256 * 8


COUNTS_ARRAYS = """
import numpy as np
import torch
from anchorprune_vllm.selection.scores import Score
from anchorprune_vllm.selection.kernels import cpu

class Counting:
    def __getattr__(self, name):
        return getattr(np, name)

for name in ("empty", "zeros", "full", "arange"):
    def make(*args, made=getattr(np, name)):
        array = made(*args)
        sizes.append(array.nbytes)
        return array
    setattr(Counting, name, staticmethod(make))

cpu.np = Counting()
for tokens in (90, 720):
    sizes = []
    noise = torch.Generator().manual_seed(0)
    features = torch.randn(tokens, 8, generator=noise)
    score = Score(torch.rand(tokens, generator=noise, dtype=torch.float64))
    anchor = torch.arange(tokens) < tokens // 18
    chosen = cpu.expand(features, score, anchor, tokens // 9)
    print(len(chosen), sum(sizes))
"""


def test_the_compiled_form_asks_for_memory_as_the_tokens_grow() -> None:
    """Its arrays are numba's, which says nothing of them: here it runs as plain Python."""
    ended = subprocess.run(
        [sys.executable, "-c", COUNTS_ARRAYS],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    (few, small), (many, large) = (map(int, line.split()) for line in ended.stdout.splitlines())
    assert (few, many) == (10, 80)
    assert 0 < large <= 8.5 * small  # the tree of the tournament has a power of two of leaves
