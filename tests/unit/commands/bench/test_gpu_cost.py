# SPDX-License-Identifier: Apache-2.0
"""What choosing costs on a GPU: its counts against what kernels do, its figures against a limit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from anchorprune_vllm.commands.bench.choices import Choice
from anchorprune_vllm.commands.bench.flops import Tower, Transformer
from anchorprune_vllm.commands.bench.gpu_cost import (
    CHOICES,
    GPUS,
    TOWERS,
    cost_of,
    gpu_named,
    launch_seconds,
)
from anchorprune_vllm.commands.bench.launches import Launch, TorchRecorder, count_launches
from anchorprune_vllm.selection import AnchorParams, batch, scores, select_batch
from anchorprune_vllm.selection.kernels import gpu
from anchorprune_vllm.signals.kernels.gpu import received_attention
from tests.support.triton_interpreter import interpreted
from tests.support.triton_work import Work, work_of

IMAGE = CHOICES[0]
SMALL = (
    replace(IMAGE, tokens=128, budget=64, anchor_size=128, context_size=128),
    replace(IMAGE, tokens=192, budget=128, anchor_size=256, context_size=192, units=2),
    replace(IMAGE, tokens=64, budget=64, anchor_size=128, context_size=64, items=3),
)


def chosen_by_kernels(choice: Choice) -> None:
    """As on a GPU, with items on the CPU: for the process that interprets kernels."""
    torch.manual_seed(0)
    with (
        mock.patch.object(batch, "runs_triton", return_value=True),
        mock.patch.object(gpu, "compile_for"),  # once in a process, which is not counted
        mock.patch.object(batch, "reads_are_free", return_value=False),
        mock.patch.object(scores, "working_dtype", return_value=torch.float32),
    ):
        select_batch(choice.candidates("cpu"), AnchorParams())


@pytest.mark.parametrize("choice", SMALL, ids=lambda choice: f"{choice.items} x {choice.tokens}")
def test_kernels_do_what_is_counted(choice: Choice) -> None:
    """Tokens, ranks and widths are whole tiles here: elsewhere a part of some reads is masked."""
    done: dict[str, Work] = interpreted(work_of, chosen_by_kernels, choice)
    said: dict[str, list[Launch]] = {}
    for launch in count_launches(choice.candidates("meta")):
        if launch.is_triton:
            said.setdefault(launch.name, []).append(launch)
    assert said.keys() == done.keys()
    for name, launches in said.items():
        work = done[name]
        assert work.launches == len(launches)
        assert work.operations == sum(each.operations for each in launches)
        read = sum(each.cache_bytes for each in launches)
        assert read <= work.read_bytes <= 1.2 * read
        assert len(work.programs) == sum(each.programs for each in launches)
        memory = sum(each.memory_bytes for each in launches)
        assert memory <= work.memory_bytes <= 1.2 * memory


def test_the_greedy_loop_reads_one_row_a_step() -> None:
    choice = SMALL[0]
    done = interpreted(work_of, chosen_by_kernels, choice)["choose"]
    (loop,) = [each for each in count_launches(choice.candidates("meta")) if each.name == "choose"]
    assert loop.steps == choice.budget
    # A distance in each step; before them weight and anchor, and where the item is.
    assert done.read_bytes == choice.tokens * (4 * loop.steps + 4 + 1) + 5 * 8


def test_operations_of_torch_are_counted_with_their_bytes() -> None:
    launches: list[Launch] = []
    numbers = torch.empty(6, 4, device="meta")
    with TorchRecorder(launches):
        torch.empty_like(numbers)
        (numbers.view(24) + 1).sort()
    seen = [(each.name, each.memory_bytes, each.kernels) for each in launches]
    assert seen == [("add", 2 * 96, 1), ("sort", 96 + 96 + 192, 8)]


def test_launches_do_not_grow_with_tokens_or_budget() -> None:
    assert {
        len(count_launches(choice.candidates("meta"))) for choice in CHOICES if choice.items == 1
    } == {26}
    # Joining the items of a batch takes four more.
    assert [
        len(count_launches(choice.candidates("meta"))) for choice in CHOICES if choice.items > 1
    ] == [30]


LIMITS = dict(zip(CHOICES, (0.5e-3, 3e-3, 2e-3, 30e-3, 30e-3, 3e-3), strict=True))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.model)
def test_choosing_is_cheap(choice: Choice) -> None:
    assert cost_of(choice, GPUS[0]).device <= LIMITS[choice]
    for each in GPUS:
        cost = cost_of(choice, each)
        assert cost.device <= 0.06 * cost.prefill or choice.tokens > 10_000


def test_importance_multiplies_as_often_as_is_counted() -> None:
    """Whole tiles, by Triton's interpreter."""
    tokens, heads, head_size = 256, 2, 64
    query, key = torch.randn(2, tokens, heads, head_size)
    done: dict[str, Work] = interpreted(work_of, received_attention, query, key, [tokens], 0.1)
    tower = Tower(Transformer(1, heads * head_size, 1), projector=0)
    assert sum(work.operations for work in done.values()) == tower.importance_flops(tokens)


@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_importance_is_a_small_part_of_a_tower_in_which_all_see_all(tokens: int) -> None:
    tower = TOWERS["Qwen3-VL-8B"]
    assert 0 < tower.importance_flops(4 * tokens) < 0.05 * tower.flops(1, 4 * tokens)


def test_a_launch_takes_as_long_as_the_slowest_thing_it_needs() -> None:
    a100 = GPUS[0]
    time = partial(launch_seconds, gpu=a100)
    assert time(Launch("", 0)) == pytest.approx(2.5e-6)
    assert time(Launch("", 0, kernels=8)) == pytest.approx(20e-6)
    assert time(Launch("", int(2.039e9))) == pytest.approx(1e-3 / 0.8)
    assert time(Launch("", 0, operations=int(312e9), on_tensor_cores=True)) == pytest.approx(2e-3)
    assert time(Launch("", 0, operations=int(19.5e9))) == pytest.approx(2e-3)
    assert time(Launch("", 0, cache_bytes=16 * 108 * 1_410_000)) == pytest.approx(1e-3)
    one_wave = Launch("", 0, cycles=1_410_000, programs=216, programs_at_once=2)
    assert time(one_wave) == pytest.approx(1e-3)
    assert time(replace(one_wave, programs=217)) == pytest.approx(2e-3)


def test_gpus_by_the_names_that_torch_gives_them() -> None:
    a100, h100, l4 = GPUS
    assert gpu_named("NVIDIA A100-SXM4-80GB") is a100
    assert gpu_named("NVIDIA H100 80GB HBM3") is h100
    assert gpu_named("NVIDIA L4") is l4
    assert gpu_named("NVIDIA L40S") is None
