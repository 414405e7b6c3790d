# SPDX-License-Identifier: Apache-2.0
"""Under VLLM_BATCH_INVARIANT vLLM replaces operators of torch by ones that know no float64.

Selection is exact, so it needs none of them; here they are refused, as they would fail on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.determinism import batch_invariant

from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.methods.registry import method_of, names
from anchorprune_vllm.selection import batch
from anchorprune_vllm.selection.exact_cosine import distances, products, unit_rows
from anchorprune_vllm.signals.features import MediaFeatures
from anchorprune_vllm.signals.word_matching import WordMatching
from tests.unit.selection.drawn import drawn


@pytest.fixture(scope="module")
def replaced() -> set[str]:
    """Names of all operators that vLLM replaces on GPUs, read from where it does."""
    found: set[str] = set()

    class Library:
        def __init__(self, *args: Any) -> None:
            pass

        def impl(self, name: str, *args: Any, **kwargs: Any) -> None:
            found.add(name.removeprefix("aten::").split(".")[0])

    platform = SimpleNamespace(
        dispatch_key="CUDA",
        is_cuda_alike=lambda: True,
        is_rocm=lambda: True,  # replaces most
        is_xpu=lambda: False,
        is_cuda=lambda: False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_invariant, "_batch_invariant_MODE", False)
        patch.setattr(batch_invariant, "_batch_invariant_LIB", None)
        patch.setattr(batch_invariant, "current_platform", platform)
        patch.setattr(batch_invariant, "_resolve_block_sizes", lambda: None)
        patch.setattr(torch.library, "Library", Library)
        patch.setattr(torch.backends.cuda, "matmul", SimpleNamespace())  # its options are set too
        batch_invariant.enable_batch_invariant_mode()
    assert {"mm", "bmm", "matmul", "mean"} <= found
    return found


class _Operators(TorchDispatchMode):
    """Refuses float64 in operators."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check(func.overloadpacket.__name__, self._names, args)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Refuses float64, and vectors, in functions: some operators are taken apart before they are
    dispatched, if nothing replaces them."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        name = {"rmatmul": "matmul"}.get(name, name)
        check(name, self._names, args)
        if name == "matmul":
            assert min(operand.ndim for operand in args[:2]) > 1, "matmul takes no vectors"
        return func(*args, **(kwargs or {}))


def check(name: str, names: set[str], args: Any) -> None:
    if name in names:
        wide = [arg for arg in args if isinstance(arg, Tensor) and arg.dtype == torch.float64]
        assert not wide, f"{name} is replaced, and knows no float64"


@pytest.fixture
def invariant(replaced: set[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """While entered, torch is as vLLM makes it on a GPU."""
    monkeypatch.setattr(batch, "reads_are_free", lambda tensor: False)
    modes = _Operators(replaced), _Functions(replaced)
    for mode in modes:
        mode.__enter__()
    yield
    for mode in reversed(modes):
        mode.__exit__(None, None, None)


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize(
    "product",
    [
        lambda wide: wide @ wide.T,
        lambda wide: torch.mm(wide, wide.T),
        lambda wide: torch.bmm(wide[None], wide.T[None]),
        lambda wide: torch.nn.functional.linear(wide, wide),
        lambda wide: wide.mean(1),
        lambda wide: wide.float() @ wide.float()[0],
    ],
)
def test_what_vllm_replaces_is_refused_here(product: Any) -> None:
    with pytest.raises(AssertionError, match=r"float64|no vectors"):
        product(torch.ones(3, 3, dtype=torch.float64))


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("seed", [1, 2])
def test_methods_use_no_operator_that_is_replaced(name: str, seed: int) -> None:
    select_tokens = method_of(PruneConfig(budget=7, method=name)).select
    items = [drawn(seed, tokens=(20, 60))._replace(budget=k) for k in (7, 11)]
    for item, kept in zip(items, select_tokens(items), strict=True):
        assert len(kept.rows_of(item.features)) == item.budget


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("matching", ["max", "mean"])
def test_word_matching_uses_no_operator_that_is_replaced(matching: Any) -> None:
    table = torch.randn(50, 5)
    match = WordMatching(lambda ids: table[ids], matching)
    (relevance,) = match([MediaFeatures(embeddings=torch.randn(8, 5))], [torch.tensor([[3, 4, 5]])])
    assert relevance.shape == (8,)


def test_products_are_those_of_a_plain_product() -> None:
    rows = unit_rows(torch.randn(70, 99))
    assert torch.equal(products(rows, rows[:9]), rows @ rows[:9].T)
    found = distances(rows[None], rows[None, :9])[0]
    assert torch.equal(found, ((rows[:, None] - rows[:9]) ** 2).sum(2).div(2).clamp_max(2))
