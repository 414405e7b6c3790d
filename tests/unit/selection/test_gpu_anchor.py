# SPDX-License-Identifier: Apache-2.0
"""The anchors of Triton's kernels, interpreted, against the plain form's in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget

from anchorprune_vllm.anchor_params import AnchorParams
from anchorprune_vllm.selection.anchorprune import relevance_anchor
from anchorprune_vllm.selection.kernels import gpu_anchor
from anchorprune_vllm.selection.units import Unit
from tests.support.triton_compiler import NVIDIA, compiled_for, reported_by_ptxas
from tests.support.triton_interpreter import interpreted


class Item:
    """An image with features around a few directions, so that some ranks are novel."""

    def __init__(self, seed: int, sizes: list[int], width: int, minimum: int, share: float) -> None:
        random = torch.Generator().manual_seed(seed)
        tokens = sum(sizes)
        directions = torch.randn(5, width, generator=random)
        noise = 0.1 * torch.randn(tokens, width, generator=random)
        self.features = directions[torch.randint(5, (tokens,), generator=random)] + noise
        self.relevance = torch.randn(tokens, generator=random)
        if seed % 3 == 0:
            self.relevance = self.relevance.round()  # ties
        if seed % 4 == 0:
            self.features[seed % tokens] = torch.nan
            self.relevance[seed % tokens] = torch.nan
        starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
        self.units = [
            Unit(start, size, least := min(minimum, size), max(least, int(share * size)))
            for start, size in zip(starts, sizes, strict=False)
        ]


ITEMS = st.builds(
    Item,
    st.integers(0, 1000),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.just(24),
    st.integers(1, 20),
    st.floats(0, 1),
)


def anchors(items: list[Item], tau: float, patience: int, dtype: torch.dtype) -> list[Tensor]:
    found: list[Tensor] = interpreted(
        gpu_anchor.relevance_anchors,
        [item.relevance for item in items],
        [item.features.to(dtype) for item in items],
        [item.units for item in items],
        tau,
        patience,
    )
    return found


def expected(items: list[Item], tau: float, patience: int, dtype: torch.dtype) -> list[Tensor]:
    params = AnchorParams(tau=tau, patience=patience)
    found = []
    for item in items:
        marks = torch.zeros(len(item.features), dtype=torch.bool)
        for unit in item.units:
            features = item.features[unit.tokens].to(dtype)
            anchor = relevance_anchor(item.relevance[unit.tokens], features, unit, params)
            marks[unit.tokens].scatter_(0, anchor.ranking, anchor.is_kept)
        found.append(marks)
    return found


@settings(deadline=None, max_examples=40)
@given(
    st.lists(ITEMS, min_size=1, max_size=3),
    st.sampled_from([0.0311, 0.2, 0.987]),
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_anchors(items: list[Item], tau: float, patience: int, dtype: torch.dtype) -> None:
    found = anchors(items, tau, patience, dtype)
    wanted = expected(items, tau, patience, dtype)
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]


@pytest.mark.parametrize(("minimum", "tau"), [(3, 0.5), (40, 0.0078)])
def test_more_ranks_and_seeds_and_columns_than_a_tile(minimum: int, tau: float) -> None:
    item = Item(1, [700], 150, minimum, 0.9)
    (found,) = anchors([item], tau, 200, torch.float32)
    (wanted,) = expected([item], tau, 200, torch.float32)
    assert found.tolist() == wanted.tolist()
    assert minimum < int(found.sum()) < 630, "the anchor ends by patience, in a later tile"


def test_copies_are_not_novel() -> None:
    """Where any distance is enough, those that rounding makes of copies must not be."""
    item = Item(1, [400], 768, 40, 0.9)
    directions = torch.randn(20, 768, generator=torch.Generator().manual_seed(0))
    item.features = directions[torch.arange(400) % 20]
    (found,) = anchors([item], 0.0, 3, torch.float16)
    (wanted,) = expected([item], 0.0, 3, torch.float16)
    assert found.tolist() == wanted.tolist()
    assert int(found.sum()) > 40 + 3, "copies went on beyond the patience"


@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: f"sm_{target.arch}")
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_novelty_compiles_without_spills(target: GPUTarget, dtype: str) -> None:
    sizes = gpu_anchor.tile_sizes(torch.float32 if dtype == "fp32" else torch.float16)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    types = {
        **{"rows": f"*{dtype}", "bounds": "*i64", "tokens": "*i64", "novelty": "*fp32"},
        **{"width": "i32", "ranks": "i32"},
    }
    compiled = compiled_for(
        target, gpu_anchor.measure_novelty, types, sizes, multiples_of_16=["width"], **options
    )
    assert reported_by_ptxas(compiled, target).spilled_bytes == 0
    assert ".f64" not in compiled.asm["ptx"]


@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: f"sm_{target.arch}")
def test_marking_compiles_without_spills(target: GPUTarget) -> None:
    types = {
        **{"bounds": "*i64", "tokens": "*i64", "novelty": "*fp32", "anchor": "*i1"},
        **{"tau": "fp32", "patience": "i32", "ranks": "i32"},
    }
    constants = {"BLOCK": gpu_anchor.MARK["BLOCK"]}
    options = {"num_warps": gpu_anchor.MARK["num_warps"]}
    compiled = compiled_for(target, gpu_anchor.mark_anchors, types, constants, **options)
    assert reported_by_ptxas(compiled, target).spilled_bytes == 0
    assert ".f64" not in compiled.asm["ptx"]
