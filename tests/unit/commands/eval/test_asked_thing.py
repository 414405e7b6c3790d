# SPDX-License-Identifier: Apache-2.0
"""Tokens on the thing that a question is about."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from anchorprune_vllm.commands.eval.asked_thing import tell, tokens_on
from anchorprune_vllm.methods.registry import Method, probe_item
from anchorprune_vllm.selection import Candidates, KeptTokens


def test_tokens_on_boxes() -> None:
    """By their middles: the left half, and the last token; a box that is between them has none."""
    left, corner = (0.0, 0.0, 0.5, 1.0), (0.7, 0.6, 1.0, 1.0)
    grid = (2, 4)
    assert tokens_on([left], grid).int().tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert tokens_on([left, corner], grid).int().tolist() == [1, 1, 0, 0, 1, 1, 0, 1]
    assert not tokens_on([(0.3, 0.3, 0.37, 0.7)], grid).any()
    assert not tokens_on([], grid).any()


def test_a_model_that_is_told_takes_the_boxes_for_relevance() -> None:
    given: list[Candidates] = []

    def select(items: Sequence[Candidates]) -> list[KeptTokens]:
        given.extend(items)
        return []

    item = probe_item()
    model = SimpleNamespace(_pruner=SimpleNamespace(_method=Method(select)))
    for boxes in ([(0.0, 0.0, 0.5, 0.5)], []):
        tell(model, boxes)
        model._pruner._method.select([item])
    told, own = given
    assert told.relevance.tolist() == tokens_on([(0.0, 0.0, 0.5, 0.5)], (3, 4)).float().tolist()
    assert torch.equal(own.relevance, item.relevance)
