# SPDX-License-Identifier: Apache-2.0
"""The compiled forms of the greedy loop choose what the plain form chooses, in the same order."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite.binding import ffi
from torch import Tensor
from triton.backends.compiler import GPUTarget

from anchorprune_vllm.selection import expand, kernels
from anchorprune_vllm.selection.cosine import unit_rows
from anchorprune_vllm.selection.expand import Worth, greedy_expansion, novelty_to_anchor
from anchorprune_vllm.selection.kernels import cpu, gpu
from tests.support.triton_compiler import A100, MI300, compiled_for
from tests.support.triton_interpreter import interpreted


class Item:
    """Drawn features [N, D], worth, an anchor and steps that are possible."""

    def __init__(self, seed: int, tokens: int, width: int, anchor_share: float) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.features = self.draw(tokens, width)
        self.factor = torch.rand(tokens, generator=self.random, dtype=torch.float64)
        self.anchor = torch.rand(tokens, generator=self.random) < anchor_share
        self.steps = int(torch.randint(int((~self.anchor).sum()) + 1, (), generator=self.random))
        if seed % 2:  # a handful of directions and worths: most scores are equal to others
            self.features = torch.randint(-1, 2, (tokens, width), generator=self.random).float()
            self.factor = torch.randint(0, 3, (tokens,), generator=self.random).double() / 4
        elif seed % 4:  # groups that look alike
            centres = self.draw(tokens // 5 + 1, width).repeat(5, 1)[:tokens]
            self.features = centres + 0.3 * self.features

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def worth(self, is_additive: bool) -> Worth:
        return Worth(self.factor, self.factor.flip(0) if is_additive else None)

    def choices(self, is_additive: bool) -> list[int]:
        """By the plain form."""
        found = kernels.plain_host_expansion(
            self.features, self.worth(is_additive), self.anchor, self.steps
        )
        return found.tolist()


ITEMS = st.builds(
    Item,
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 80),
    width=st.integers(1, 9),
    anchor_share=st.sampled_from([0, 0.2, 0.9]),
)


@settings(deadline=None, max_examples=300)
@given(ITEMS, st.booleans())
def test_cpu(item: Item, is_additive: bool) -> None:
    found = cpu.lazy_expansion(item.features, item.worth(is_additive), item.anchor, item.steps)
    assert found.tolist() == item.choices(is_additive)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cpu_with_many_tokens(seed: int, dtype: torch.dtype) -> None:
    item = Item(seed, 1201, 33, 0.05)
    item.features, item.steps = item.features.to(dtype), 300
    before = item.features.clone()
    found = cpu.lazy_expansion(item.features, item.worth(False), item.anchor, item.steps)
    assert found.tolist() == item.choices(False)
    assert torch.equal(item.features, before)


def test_cpu_tells_distances_apart_that_float32_cannot() -> None:
    """Tokens whose distances to the anchor differ by one part in 2^24, at the last entry."""
    width, tokens = 512, 40
    features = torch.full((tokens, width), 0.5, dtype=torch.float64)
    features[0, 0] = -0.5
    for token in range(1, tokens):
        features[token, -1] += (token * 7 % tokens) * 2.0**-20
    anchor = torch.arange(tokens) == 0
    worth = Worth(torch.ones(tokens, dtype=torch.float64))
    expected = kernels.plain_host_expansion(features, worth, anchor, 10)
    assert cpu.lazy_expansion(features, worth, anchor, 10).tolist() == expected.tolist()


@pytest.mark.parametrize("expand", [cpu.lazy_expansion, kernels.plain_host_expansion])
def test_copies_of_kept_tokens_tie(expand: kernels.HostExpansion) -> None:
    """Once all directions are kept, the copies that are left are worth nothing: lower index."""
    features = torch.randn(30, 500, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    worth = Worth(torch.arange(1, 61, dtype=torch.float64))
    found = expand(features, worth, torch.arange(60) < 10, 49).tolist()
    assert sorted(found[:20]) == list(range(40, 60))
    assert found[20:] == list(range(10, 39))


def test_anchors_are_compared_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, also behind the first few; of items with more and with fewer."""
    monkeypatch.setattr(expand, "_ANCHORS_AT_ONCE", 3)
    features = torch.randn(2, 40, 9, generator=torch.Generator().manual_seed(0))
    anchor = torch.stack([torch.arange(40) % 4 == 0, torch.arange(40) == 39])
    unit = torch.nn.functional.normalize(features.double(), dim=-1).numpy()
    found = novelty_to_anchor(unit_rows(features), anchor, 10)
    for rows, kept, novelty in zip(unit, anchor.numpy(), found.numpy(), strict=True):
        assert novelty == pytest.approx((1 - rows @ rows[kept].T).min(1), abs=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16, 64, 1024, 3584])
def test_the_coarse_products_are_as_near_as_is_said(width: int) -> None:
    """And not much nearer: rows of equal entries are all off in the same way."""
    drawn = torch.randn(40, width, generator=torch.Generator().manual_seed(width))
    rows = torch.cat([drawn, drawn.sign(), drawn.sign() + 0.01 * drawn]).numpy()
    unit, coarse = np.empty_like(rows), np.empty(rows.shape, np.int16)
    halves = [cpu._unit_row(*each) for each in zip(rows, unit, coarse, strict=True)]
    said, most = cpu._coarse_error(width), 0.0
    for one in range(len(rows)):
        for other in range(len(rows)):
            distance = halves[one] + halves[other] - cpu._product(unit[one], unit[other])
            rough = 1 - cpu._coarse_product(coarse[one], coarse[other]) / cpu.COARSE**2
            most = max(most, rough - distance)
    assert most <= said
    assert most > 0.01 * said or width == 1


def test_vllm_may_look_into_all_modules_beside_numba() -> None:
    """As it does when an engine starts on a CPU."""
    from vllm.triton_utils.dispatcher import _rebind_kernels

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _rebind_kernels([])
    assert vars(ffi.lib) == {}


def test_cpu_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    kernels.host_expansion.cache_clear()
    assert kernels.host_expansion() is kernels.plain_host_expansion
    assert kernels.device_expansion.__wrapped__(torch.device("cuda")) is greedy_expansion
    monkeypatch.undo()
    kernels.host_expansion.cache_clear()
    assert kernels.host_expansion() is cpu.lazy_expansion
    assert kernels.device_expansion.__wrapped__(torch.device("cuda")) is gpu.lazy_expansion


@settings(deadline=None, max_examples=25)
@given(st.lists(ITEMS, min_size=1, max_size=3), st.booleans())
def test_gpu(items: list[Item], is_additive: bool) -> None:
    check_gpu(items, is_additive)


def test_gpu_with_several_blocks_of_tokens_and_columns() -> None:
    """More than 256 tokens, 128 columns and 16 choices at once; items of unlike sizes."""
    one, other = Item(2, 700, 150, 0.03), Item(0, 300, 150, 0.1)
    one.steps, other.steps = 60, 3
    check_gpu([one, other], False)


def check_gpu(items: list[Item], is_additive: bool) -> None:
    tokens = max(len(item.features) for item in items)
    width = max(item.features.shape[1] for item in items)

    def padded(tensor: Tensor) -> Tensor:
        grown = tensor.new_zeros(tokens, *tensor.shape[1:])
        grown[: len(tensor)] = tensor
        return grown

    rows = torch.stack(
        [
            padded(torch.nn.functional.pad(i.features, (0, width - i.features.shape[1])))
            for i in items
        ]
    )
    rows = unit_rows(rows)
    worths = [item.worth(is_additive) for item in items]
    worth = Worth(
        torch.stack([padded(w.factor) for w in worths]),
        torch.stack([padded(w.addend) for w in worths]) if is_additive else None,
    )
    anchor = torch.stack([padded(item.anchor) for item in items])
    there = torch.stack([padded(torch.ones_like(item.anchor)) for item in items])
    steps = torch.tensor([item.steps for item in items])
    most = int(steps.max()) + 2
    novelty = novelty_to_anchor(rows, anchor, int(anchor.sum(1).max()))
    given = rows, worth, novelty, anchor | ~there, steps, most
    found = interpreted(gpu.lazy_expansion, *given)
    assert found.shape == (len(items), most)
    for item, row in zip(items, found.tolist(), strict=True):
        assert row == item.choices(is_additive) + [tokens] * (most - item.steps)
    assert found.tolist() == greedy_expansion(*given).tolist()


@pytest.mark.parametrize("has_addend", [False, True])
@pytest.mark.parametrize("target", [A100, MI300])
def test_gpu_form_compiles(target: GPUTarget, has_addend: bool) -> None:
    types = {
        **{
            "rows": "*fp32",
            "halves": "*fp64",
            "factor": "*fp64",
            "addend": "*fp64",
            "score": "*fp64",
        },
        **{"novelty": "*fp64", "compared": "*i32", "steps": "*i64", "choices": "*i64"},
        **{"tokens": "i32", "width": "i32", "most": "i32", "farthest": "fp32"},
    }
    constants = {"HAS_ADDEND": has_addend, "BLOCKS": gpu.FEWEST_BLOCKS, **gpu.SIZES}
    compiled = compiled_for(target, gpu.expand, types, constants)
    assert compiled.metadata.shared <= 48 * 2**10
    written = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    assert ("fma.rn.f64" if target.backend == "cuda" else "_f64") in written
