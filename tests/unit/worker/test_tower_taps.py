# SPDX-License-Identifier: Apache-2.0
"""What is taken from attention modules, and made of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from anchorprune_vllm.signals.attention import class_attention, received_attention
from anchorprune_vllm.worker import tower_taps
from anchorprune_vllm.worker.tower_taps import SIGNALS, RecordedCalls, measured, tapped


class Attention(nn.Module):
    """Has the attributes of vLLM's attention of encoders."""

    num_heads = 4
    num_kv_heads = 4
    head_size = 8
    scale = 0.3

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value


@pytest.mark.parametrize("by_name", [False, True])
def test_a_tap_collects_while_entered_and_changes_nothing(by_name: bool) -> None:
    module = Attention()
    calls = [torch.randn(3, b, 5, 32).unbind() for b in (2, 1)]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return module(query=query, key=key, value=value) if by_name else module(query, key, value)

    call(*calls[0])
    tap = RecordedCalls([module])
    with tapped([module], tap.add):
        assert tap.take() is None
        for tensors in calls:
            assert call(*tensors) is tensors[2]
        taken = tap.take()
        assert tap.take() is None
    call(*calls[0])
    assert tap.take() is None
    assert not module._forward_pre_hooks
    assert taken is not None
    for number, found in enumerate(taken[module]):
        wanted = torch.cat([tensors[number].reshape(-1, 4, 8) for tensors in calls])
        assert torch.equal(found, wanted)


def test_a_tap_of_which_one_module_was_not_called_gives_nothing() -> None:
    called, other = Attention(), Attention()
    tap = RecordedCalls([called, other])
    with tapped([called, other], tap.add):
        called(*torch.randn(3, 5, 32))
    assert tap.take() is None


def test_keys_of_grouped_heads_are_repeated() -> None:
    module = Attention()
    module.num_kv_heads = 2
    query, key = torch.randn(5, 32), torch.randn(5, 16)
    _, found = tower_taps.query_and_key(module, (query, key), {})
    assert torch.equal(found, key.view(5, 2, 8).repeat_interleave(2, dim=1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_signals_are_those_of_the_heads_of_all_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has some heads: scores are a mean over all of them, and keys are gathered."""
    last, middle = Attention(), Attention()
    tensors = torch.randn(2, 2, 7, 4 * ranks, 8)
    own = {
        module: (pair[0][:, :4], pair[1][:, :4])
        for module, pair in zip((last, middle), tensors, strict=True)
    }
    reduced: list[Tensor] = []

    def all_reduce(summed: Tensor) -> Tensor:
        query, key = tensors[len(reduced)]
        measure = (class_attention, received_attention)[len(reduced)]
        reduced.append(summed)
        return summed + measure(query[:, 4:], key[:, 4:], [7], 0.3)

    def all_gather(keys: Tensor, dim: int) -> Tensor:
        return torch.cat([keys, tensors[0][1][:, 4:]], dim)

    monkeypatch.setattr(tower_taps, "tensor_model_parallel_all_reduce", all_reduce)
    monkeypatch.setattr(tower_taps, "tensor_model_parallel_all_gather", all_gather)
    found = measured(
        SIGNALS.keys(), {"last": last, "middle": middle}, own, [7], ranks, class_attention
    )
    heads = 4 * ranks
    (query, key), (middle_query, middle_key) = tensors
    importance = class_attention(query, key, [7], 0.3) / heads
    objects = received_attention(middle_query, middle_key, [7], 0.3) / heads
    torch.testing.assert_close(found["importance"], importance)
    torch.testing.assert_close(found["object_attention"], objects)
    assert torch.equal(found["keys"], key)
    assert len(reduced) == (2 if ranks > 1 else 0)


def test_only_what_is_needed_is_measured() -> None:
    def refuse(*args: object) -> Tensor:
        raise AssertionError("importance was measured")

    last = Attention()
    taken = {last: (torch.randn(5, 4, 8), torch.randn(5, 4, 8))}
    found = measured({"keys", "projected"}, {"last": last}, taken, [5], 1, refuse)
    assert found.keys() == {"keys"}
