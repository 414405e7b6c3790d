# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest
import torch

from tests.support.triton_interpreter import interpreted
from tests.support.triton_product import product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_run_on_cpu_tensors(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16).to(dtype)
    torch.testing.assert_close(interpreted(product, a, b=b), a.float() @ b.float())


def where() -> tuple[int, str | None]:
    return os.getpid(), os.environ.get("TRITON_INTERPRET")


def test_all_calls_go_to_one_other_process() -> None:
    (process, interprets), again = interpreted(where), interpreted(where)
    assert (process, interprets) == again
    assert interprets == "1"
    assert where() == (os.getpid(), None) != again


def refuse(what: str) -> None:
    raise LookupError(what)


def test_errors_come_back() -> None:
    with pytest.raises(LookupError, match="nothing here"):
        interpreted(refuse, "nothing here")
