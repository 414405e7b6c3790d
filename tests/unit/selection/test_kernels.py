# SPDX-License-Identifier: Apache-2.0
"""The compiled forms of the greedy loop, held to the plain form.

On a CPU they choose the same tokens in the same order. On a GPU, where sums are rounded, no choice
scores more than 1e-5 less than the best one.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite.binding import ffi
from torch import Tensor

from anchorprune_vllm.selection import (
    AnchorParams,
    Candidates,
    batch,
    kernels,
    scores,
    select_batch,
)
from anchorprune_vllm.selection.anchorprune import contextual_expansion
from anchorprune_vllm.selection.kernels import cpu, gpu, gpu_anchor
from anchorprune_vllm.selection.kernels.gpu import Expansion
from anchorprune_vllm.selection.scores import Score
from tests.support.triton_interpreter import interpreted

LARGEST_REGRET = 1e-5


class Item:
    """Drawn features [N, D], their score, an anchor and a budget that is possible."""

    def __init__(self, seed: int, tokens: int, width: int, anchor_share: float) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.features = self.draw(tokens, width)
        self.weight = torch.rand(tokens, generator=self.random, dtype=torch.float64)
        self.anchor = torch.rand(tokens, generator=self.random) < anchor_share
        least = max(1, int(self.anchor.sum()))
        self.budget = int(torch.randint(least, tokens + 1, (), generator=self.random))
        if seed % 2:  # a handful of directions and factors: most scores are equal to others
            self.features = torch.randint(-1, 2, (tokens, width), generator=self.random).float()
            self.weight = torch.randint(0, 3, (tokens,), generator=self.random).double() / 4
        elif seed % 4:  # groups that look alike
            centres = self.draw(tokens // 5 + 1, width).repeat(5, 1)[:tokens]
            self.features = centres + 0.3 * self.features

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def score(self, is_additive: bool) -> Score:
        return Score(self.weight, is_additive)

    def chosen(self, is_additive: bool) -> list[int]:
        """By the plain form."""
        return contextual_expansion(
            self.features, self.score(is_additive), self.anchor, self.budget
        ).tolist()


ITEMS = st.builds(
    Item,
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 80),
    width=st.integers(1, 9),
    anchor_share=st.sampled_from([0, 0.2, 0.9]),
)


# -- the plain form -------------------------------------------------------------------------------


def regret(item: Item, chosen: list[int], is_additive: bool) -> float:
    """How much the worst choice scores below the best one, computed here in float64.

    An anchor that is not chosen first, in native order, counts as endless regret.
    """
    rows = item.features.double().numpy()
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    weight = item.weight.numpy()
    anchor = np.flatnonzero(item.anchor.numpy()).tolist()
    assert len(set(chosen)) == len(chosen) == item.budget
    if chosen[: len(anchor)] != anchor:
        return np.inf
    novelty = np.full(len(rows), 2.0)
    taken = np.zeros(len(rows), bool)
    worst = 0.0
    for step, choice in enumerate(chosen):
        if step >= len(anchor):
            scores = np.where(taken, -np.inf, weight + novelty if is_additive else weight * novelty)
            worst = max(worst, scores.max() - scores[choice])
        taken[choice] = True
        novelty = np.minimum(novelty, 1 - unit @ unit[choice])
    return worst


@settings(deadline=None, max_examples=100)
@given(ITEMS, st.booleans())
def test_plain_form_always_takes_the_best(item: Item, is_additive: bool) -> None:
    assert regret(item, item.chosen(is_additive), is_additive) < 1e-7


def test_a_worse_choice_would_be_noticed() -> None:
    item = Item(0, 40, 8, 0.1)
    *chosen, last = item.chosen(False)
    worst = min(set(range(40)) - set(chosen), key=lambda token: float(item.weight[token]))
    assert worst != last
    assert regret(item, [*chosen, worst], False) > LARGEST_REGRET


# -- numba ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(ITEMS, st.booleans())
def test_cpu(item: Item, is_additive: bool) -> None:
    found = cpu.expand(item.features, item.score(is_additive), item.anchor, item.budget)
    assert found.tolist() == item.chosen(is_additive)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cpu_with_many_tokens(seed: int, dtype: torch.dtype) -> None:
    item = Item(seed, 1201, 33, 0.05)
    item.features, item.budget = item.features.to(dtype), 300
    before = item.features.clone()
    found = cpu.expand(item.features, item.score(False), item.anchor, item.budget)
    assert found.tolist() == item.chosen(False)
    assert torch.equal(item.features, before)


def test_cpu_tells_distances_apart_that_float32_cannot() -> None:
    """Tokens whose distances to the anchor differ by one part in 2^24, at the last entry."""
    width, tokens = 512, 40
    features = torch.full((tokens, width), 0.5, dtype=torch.float64)
    features[0, 0] = -0.5
    for token in range(1, tokens):
        features[token, -1] += (token * 7 % tokens) * 2.0**-20
    anchor = torch.arange(tokens) == 0
    score = Score(torch.ones(tokens, dtype=torch.float64))
    expected = contextual_expansion(features, score, anchor, 11)
    assert cpu.expand(features, score, anchor, 11).tolist() == expected.tolist()


@pytest.mark.parametrize("form", [cpu.expand, contextual_expansion])
def test_copies_of_kept_tokens_tie(form: kernels.ItemExpansion) -> None:
    """Once all directions are kept, the copies that are left are worth nothing: lower index."""
    features, score, anchor = copies()
    check_copies(form(features, score, anchor, 59).tolist())


def copies() -> tuple[Tensor, Score, Tensor]:
    """Thirty directions, each twice; the later ones weigh more, the first ten are the anchor."""
    features = torch.randn(30, 500, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    score = Score(torch.arange(1, 61, dtype=torch.float64))
    return features, score, torch.arange(60) < 10


def check_copies(chosen: list[int]) -> None:
    assert chosen[:10] == list(range(10))
    assert sorted(chosen[10:30]) == list(range(40, 60))
    assert chosen[30:] == list(range(10, 39))


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


# -- which form -----------------------------------------------------------------------------------


def test_forms_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form for the CPU is numba's; on a device, Triton's where it runs, and else the plain."""
    kernels.host_expansion.cache_clear()
    assert kernels.host_expansion() is cpu.expand
    used = []
    monkeypatch.setattr(batch, "_select_by_triton", lambda items, params: used.append("triton"))
    monkeypatch.setattr(batch, "select", lambda item, params: used.append("plain"))
    item = Candidates(*(torch.rand(*s, device="meta") for s in [(6,), (6, 4), (6,)]), budget=3)
    for runs in (True, False):
        monkeypatch.setattr(batch, "runs_triton", lambda device, runs=runs: runs)
        select_batch([item], AnchorParams())
    assert used == ["triton", "plain"]


@pytest.mark.parametrize(
    ("device", "triton", "capability", "runs"),
    [
        ("cpu", True, (9, 0), False),
        ("cuda", True, (8, 0), True),
        ("cuda", True, (12, 0), True),
        ("cuda", True, (7, 5), False),
        ("cuda", False, (8, 0), False),
    ],
)
def test_where_triton_runs(
    device: str,
    triton: bool,
    capability: tuple[int, int],
    runs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernels.runs_triton.__wrapped__(torch.device(device)) is runs


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "find_spec", lambda name: None)
        kernels.host_expansion.cache_clear()
        assert kernels.host_expansion() is contextual_expansion
    kernels.host_expansion.cache_clear()


# -- Triton ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    st.lists(ITEMS, min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_gpu(items: list[Item], is_additive: bool, dtype: torch.dtype) -> None:
    width = max(item.features.shape[1] for item in items)
    for item in items:
        padded = torch.nn.functional.pad(item.features, (0, width - item.features.shape[1]))
        item.features = padded.to(dtype)
    check_gpu(items, is_additive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [0, 4])
def test_gpu_with_many_scores_that_are_nearly_the_same(seed: int, dtype: torch.dtype) -> None:
    """Where half of the tokens are chosen, distances in half precision would show."""
    item = Item(seed, 300, 64, 0.05)
    item.features, item.budget = item.features.to(dtype), 150
    check_gpu([item], False)


def test_gpu_chooses_none_twice_where_all_are_nearly_copies() -> None:
    """By rounding, the cosine of two of them may be above 1."""
    item = Item(0, 40, 64, 0)
    noise = torch.randn(40, 64, generator=item.random)
    item.features, item.budget = item.features[:1] * (1 + 1e-7 * noise), 40
    check_gpu([item], False)


def test_gpu_chooses_none_twice_where_sums_are_zero() -> None:
    item = Item(0, 12, 8, 0)
    item.features, item.budget = item.features[:1].repeat(12, 1), 12
    item.weight = torch.eye(12, dtype=torch.float64)[0]
    check_gpu([item], True)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_gpu_with_long_and_short_rows(scale: float) -> None:
    """The squares of rows are numbers still, where products of two of them are not."""
    item = Item(0, 60, 24, 0.1)
    item.features *= scale
    check_gpu([item], False)


def test_the_largest_image_of_qwen_fits_the_workspace() -> None:
    """So vLLM's profiling, which has an image of that size, sees the whole of it."""
    most_pixels, of_a_token = 12_845_056, 28**2
    assert gpu.fits(most_pixels // of_a_token)


def test_gpu_with_several_blocks_of_tokens_and_columns() -> None:
    """More tokens than a tile, and than the loop takes at a time; items of unlike sizes."""
    one, other = Item(2, 1500, 150, 0.004), Item(0, 300, 150, 0.1)
    one.budget, other.budget = 20, 40
    check_gpu([one, other], False)


def check_gpu(
    items: list[Item], is_additive: bool, form: Callable[..., Expansion] = gpu.expand
) -> None:
    found = on_gpu(items, is_additive, form)
    ends = np.cumsum([item.budget for item in items]).tolist()
    for item, end in zip(items, ends, strict=True):
        part = slice(end - item.budget, end)
        chosen, ascending = found.chosen[part].tolist(), found.ascending[part]
        assert regret(item, chosen, is_additive) <= LARGEST_REGRET
        assert ascending.tolist() == sorted(chosen)
        assert found.is_anchor[part].tolist() == item.anchor[ascending].tolist()


def on_gpu(
    items: list[Item], is_additive: bool, form: Callable[..., Expansion] = gpu.expand
) -> Expansion:
    return interpreted(
        form,
        torch.cat([item.features for item in items]),
        [len(item.features) for item in items],
        Score(torch.cat([item.weight for item in items]).float(), is_additive),
        torch.cat([item.anchor for item in items]),
        [item.budget for item in items],
    )


def test_gpu_gives_an_item_the_same_tokens_in_every_batch() -> None:
    items = [Item(seed, 60 + seed, 40, 0.1) for seed in (2, 6, 10)]
    alone = [on_gpu([item], False).chosen.tolist() for item in items]
    together = on_gpu(items, False).chosen.tolist()
    assert together == [token for chosen in alone for token in chosen]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_copies_of_kept_tokens_tie(dtype: torch.dtype) -> None:
    features, score, anchor = copies()
    given = features.to(dtype), [60], Score(score.weight.float()), anchor, [59]
    check_copies(interpreted(gpu.expand, *given).chosen.tolist())


def test_gpu_rows_without_a_direction() -> None:
    """Zeros and what is not finite are as far from everything as a right angle."""
    features = torch.eye(6)
    features[1], features[2], features[3, 3] = 0, torch.nan, torch.inf
    score = Score(torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6, 0.5]))
    given = features, [6], score, torch.zeros(6, dtype=torch.bool), [6]
    assert interpreted(gpu.expand, *given).chosen.tolist() == [0, 1, 2, 3, 4, 5]


def in_a_small_workspace(*given: Any) -> Expansion:
    """Where the process is that interprets kernels."""
    with mock.patch.object(gpu, "WORKSPACE_BYTES", 4 * 80**2):
        return gpu.expand(*given)


def test_gpu_items_beyond_the_workspace_among_others() -> None:
    """Two in one group, one that is too large, one more group."""
    items = [Item(seed, size, 40, 0.1) for seed, size in ((2, 50), (6, 60), (10, 81), (14, 80))]
    check_gpu(items, False, in_a_small_workspace)


def test_gpu_items_go_through_the_workspace_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WORKSPACE_BYTES", 4 * 50)
    groups = list(gpu.groups([3, 4, 5, 6, 2], [1, 2, 3, 4, 2]))
    assert groups == [
        [(0, 3, 0, 1, 0), (3, 4, 9, 2, 1), (7, 5, 25, 3, 3)],
        [(12, 6, 0, 4, 6), (18, 2, 36, 2, 10)],
    ]
    assert not gpu.fits(8)
    assert [len(group) for group in gpu.groups([2, 8, 2], [1, 1, 1])] == [1, 1, 1]


class CompiledForms:
    """Stand in the place of kernels, and note for what Triton would compile them."""

    def __init__(self) -> None:
        self.forms: set[tuple[object, ...]] = set()

    def of(self, kernel: Any) -> Any:
        """What is launched in the place of a kernel."""
        fixed = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}

        def launched(*args: Any, **constants: Any) -> None:
            arguments = zip(kernel.arg_names, args, strict=False)
            kinds = [self.kind(value, name in fixed) for name, value in arguments]
            self.forms.add((kernel.__name__, *kinds, *sorted(constants.items())))

        return defaultdict(lambda: launched)

    @staticmethod
    def kind(value: Any, is_fixed: bool) -> object:
        """A pointer by dtype and alignment; a whole number by whether it is 1 or divides by 16."""
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if is_fixed or isinstance(value, float):
            return type(value)
        return type(value), value == 1, value % 16 == 0


@pytest.mark.parametrize("stage2", ["importance", "additive"])
def test_a_second_item_compiles_nothing(stage2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever size, budget, units and anchor; the first is too large for the workspace."""
    compiled = CompiledForms()
    for module, name in (
        *((gpu, name) for name in ("pair_distances", "choose", "put_in_native_order")),
        *((gpu_anchor, name) for name in ("measure_novelty", "mark_anchors")),
    ):
        monkeypatch.setattr(module, name, compiled.of(getattr(module, name)))
    monkeypatch.setattr(batch, "runs_triton", lambda device: True)
    monkeypatch.setattr(batch, "reads_are_free", lambda tensor: False)
    monkeypatch.setattr(scores, "working_dtype", lambda device: torch.float32)
    gpu.compile_for.cache_clear()

    def choose(*sizes: tuple[int, int], units: int = 1, **params: Any) -> None:
        items = [
            Candidates(
                torch.rand(n), torch.rand(n, 16), torch.rand(n), k, torch.rand(n, 32),
                torch.arange(units).repeat_interleave(n // units),
            )
            for n, k in sizes
        ]  # fmt: skip
        select_batch(items, AnchorParams(stage2=stage2, **params))

    choose((16_400, 3))
    first = set(compiled.forms)
    assert {form[0] for form in first} == {
        *("pair_distances", "choose", "put_in_native_order"),
        *("measure_novelty", "mark_anchors"),
    }
    for tokens in (1, 16, 576, 1024, 1025, 2880, 5000, 9000, 16384):
        for budget in (1, 57, 64):
            choose((tokens, budget), tau=1 if tokens == 16 else 0.2, patience=budget)
    choose((576, 57), (577, 33), (20, 4), units=2, min_anchor=16)
    assert compiled.forms == first
    gpu.compile_for.cache_clear()
