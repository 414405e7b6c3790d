# SPDX-License-Identifier: Apache-2.0
"""The Triton form of received attention: what it computes, by Triton's interpreter, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget

from anchorprune_vllm.signals import attention
from anchorprune_vllm.signals.kernels import gpu
from tests.support.host_reads import NoHostReads
from tests.support.triton_compiler import A100, MI300, compiled_for
from tests.support.triton_interpreter import interpreted

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def plain(query: Tensor, key: Tensor, segments: Sequence[int], scale: float) -> np.ndarray:
    """Mean of each column of the softmax of each segment and head, in float64."""
    q, k = (x.double().numpy() for x in (query, key))
    received = np.zeros(len(q))
    begin = 0
    for length in segments:
        inside = slice(begin, begin + length)
        for head in range(q.shape[1]):
            logits = q[inside, head] @ k[inside, head].T * scale
            weights = np.exp(logits - logits.max(1, keepdims=True))
            received[inside] += (weights / weights.sum(1, keepdims=True)).mean(0)
        begin += length
    return received


def assert_equals_plain(query: Tensor, key: Tensor, segments: list[int], scale: float) -> None:
    received = interpreted(gpu.received_attention, query, key, segments, scale)
    assert received.dtype == torch.float32
    expected = plain(query, key, segments, scale)
    # A logit of 2^n is rounded by 2^(n - 24), which its exponential is then off by.
    np.testing.assert_allclose(received.numpy(), expected, rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(received.sum(), query.shape[1] * len(segments), rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    segments=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    head_size=st.sampled_from([1, 8, 16, 31, 64, 72, 80, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_equals_dense_attention(
    segments: list[int], heads: int, head_size: int, dtype: torch.dtype, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    shape = (2, sum(segments), heads, head_size)
    query, key = (2 * torch.randn(shape, generator=random)).to(dtype)
    assert_equals_plain(query, key, segments, head_size**-0.5)


def test_equals_dense_attention_at_the_ends_of_blocks(subtests: pytest.Subtests) -> None:
    for length, dtype in product([127, 128, 129, 64, 65], DTYPES):
        with subtests.test(length=length, dtype=dtype):
            query, key = torch.randn(2, length + 1, 1, 16).to(dtype)
            assert_equals_plain(query, key, [1, length], 0.3)


def test_takes_tensors_as_they_lie() -> None:
    """Slices of a larger one, as a tower's queries and keys are; and channels apart."""
    query, key, _ = torch.randn(70, 3 * 4 * 24).chunk(3, 1)
    query, key = (x.unflatten(1, (4, 24)) for x in (query, key))
    assert_equals_plain(query, key, [30, 40], 0.2)
    assert_equals_plain(query[..., :3].mT, key[..., :3].mT, [70], 0.2)


def test_logits_may_be_large() -> None:
    """Rows whose highest logit is thousands above or below zero, and not in the first block."""
    query = torch.ones(200, 2, 16)
    key = torch.linspace(-200, 200, 200)[:, None, None].expand(200, 2, 16).contiguous()
    query[::2] = -1
    assert_equals_plain(query, key, [200], 1.0)


def test_segments_know_nothing_of_each_other(subtests: pytest.Subtests) -> None:
    """Nor does it matter what else is in a call: the same bits."""
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            segments = [90, 3, 140]
            query, key = torch.randn(2, 233, 2, 40).to(dtype)
            together = interpreted(gpu.received_attention, query, key, segments, 0.2)
            alone = [
                interpreted(gpu.received_attention, q.clone(), k.clone(), [len(q)], 0.2)
                for q, k in zip(query.split(segments), key.split(segments), strict=True)
            ]
            assert torch.equal(together, torch.cat(alone))


def launched(query: Tensor, key: Tensor) -> tuple[Tensor, list[str]]:
    """Received attention where Triton runs, with no value read; and names of the kernels."""
    names: list[str] = []
    for name in ("row_log_sums", "column_means"):
        getattr(gpu, name).add_pre_run_hook(lambda *args, name=name, **kwargs: names.append(name))
    with pytest.MonkeyPatch.context() as patch, NoHostReads():
        patch.setattr(attention, "runs_triton", lambda device: True)
        return attention.received_attention(query, key, [5] * 20, 0.3), names


def test_kernels_are_launched_once_each_where_triton_runs() -> None:
    query, key = torch.randn(2, 100, 4, 8)
    received, names = interpreted(launched, query, key)
    assert names == ["row_log_sums", "column_means"]
    torch.testing.assert_close(received, attention.received_attention(query, key, [5] * 20, 0.3))


@pytest.mark.parametrize("kernel", [gpu.row_log_sums, gpu.column_means])
@pytest.mark.parametrize(
    ("target", "shared", "product", "dtype"),
    [
        (A100, 99 * 2**10, "mma.sync", torch.bfloat16),
        (A100, 99 * 2**10, "fma.rn.f32", torch.float32),
        (MI300, 64 * 2**10, "v_mfma", torch.bfloat16),
    ],
)
def test_compiles_for_gpus(
    kernel: Any,
    target: GPUTarget,
    shared: int,
    product: str,
    dtype: torch.dtype,
) -> None:
    """Into a product by the units for it, and within the shared memory of the smaller siblings."""
    inputs = "*fp32" if dtype == torch.float32 else "*bf16"
    types = {
        **{"query": inputs, "key": inputs, "log_sums": "*fp32", "received": "*fp32"},
        **{"blocks": "*i32", "tokens": "i32", "scale": "fp32"},
        **{name: "i32" for name in kernel.arg_names if name.endswith("stride")},
    }
    sizes = gpu.block_sizes(80, dtype.itemsize)  # Qwen2.5-VL's heads
    compiled = compiled_for(target, kernel, types, sizes, **gpu.LAUNCH)
    assert compiled.metadata.shared <= shared
    assert product in compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
