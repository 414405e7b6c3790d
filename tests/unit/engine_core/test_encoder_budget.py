# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own scheduler admits to a step, with the manager that counts the tower's work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams
from vllm.config import EncoderCacheManagerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import anchorprune_vllm
from anchorprune_vllm.engine_core.encoder_budget import CLASS_PATH
from anchorprune_vllm.item_fields import to_elems
from anchorprune_vllm.log import logger
from anchorprune_vllm.plan import ItemPlan, MediaTokens
from anchorprune_vllm.testing.demo_models.make import find_text_encoder

BUDGET = 1000
"""Of a step, in tokens of prompts and of the vision tower alike."""


_new_media = count(1000)


class Item(NamedTuple):
    """An image of so many tokens, of which so many are kept; unplanned: without a plan of ours."""

    unpruned: int
    kept: int
    is_planned: bool = True
    media: int | None = None
    """Items of one number are the same image; None: of each item another."""

    def fields(self) -> dict[str, Any]:
        if not self.is_planned:
            return {}
        tokens = MediaTokens(self.unpruned, (self.unpruned,), (1,))
        key = next(_new_media) if self.media is None else self.media
        plan = ItemPlan(self.kept, tokens, (1, key), torch.empty(0, 0))
        return to_elems("image", plan)


def arguments(model: Path, budget: int | None = 4, **options: Any) -> EngineArgs:
    """Engine arguments as a user gives them."""
    anchorprune_vllm.register()
    prune: dict[str, Any] = {"budget": budget, "text_encoder": str(find_text_encoder(model))}
    return EngineArgs(
        model=str(model),
        hf_overrides={"anchorprune": prune} if budget else {},
        max_model_len=4096,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=True,
        **options,
    )


@pytest.fixture(scope="module")
def model(demo_models: Any) -> Path:
    return demo_models("llava-1.5")


@pytest.fixture(scope="module")
def config(model: Path) -> VllmConfig:
    return arguments(model).create_engine_config()


@pytest.fixture
def scheduler(config: VllmConfig) -> Scheduler:
    return make_scheduler(config)


def make_scheduler(config: VllmConfig) -> Scheduler:
    config.cache_config.num_gpu_blocks = 10_000
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    kv_cache = KVCacheConfig(num_blocks=10_000, kv_cache_tensors=[], kv_cache_groups=groups)
    return Scheduler(config, kv_cache, StructuredOutputManager(config), block_size=32)


def add(scheduler: Scheduler, name: str, *items: Item, answer: int = 1) -> None:
    """A prompt of items, three words behind each."""
    features, length = [], 0
    for number, item in enumerate(items):
        place = PlaceholderRange(offset=length, length=item.kept)
        features.append(
            MultiModalFeatureSpec(item.fields(), "image", f"{name} {number}", place)  # type: ignore[arg-type]
        )
        length += item.kept + 3
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    request = Request(name, [7] * max(3, length), params, None, mm_features=features)
    scheduler.add_request(request)


class Step(NamedTuple):
    """Items of each request in the tower, and requests that got tokens."""

    encoded: dict[str, list[int]]
    tokens: dict[str, int]


def run(scheduler: Scheduler) -> list[Step]:
    """All steps until every request is answered."""
    steps = []
    while scheduler.has_unfinished_requests():
        assert len(steps) < 100, "a request waits for ever"
        out = scheduler.schedule()
        steps.append(Step(dict(out.scheduled_encoder_inputs), dict(out.num_scheduled_tokens)))
        ids = list(out.num_scheduled_tokens)
        done = [scheduler.requests[i].num_computed_tokens for i in ids]
        sampled = [
            [1] if computed >= scheduler.requests[i].num_tokens else []
            for i, computed in zip(ids, done, strict=True)
        ]
        places = {name: number for number, name in enumerate(ids)}
        scheduler.update_from_output(out, ModelRunnerOutput(ids, places, sampled))
    return steps


def images(steps: Sequence[Step]) -> list[int]:
    """Images in the tower, step by step."""
    counts = [sum(map(len, step.encoded.values())) for step in steps]
    return [count for count in counts if count]


def test_a_step_takes_in_as_many_images_as_unpruned(config: VllmConfig) -> None:
    counts = {}
    for kept in (300, 4):  # of 300: unpruned
        scheduler = make_scheduler(config)
        for number in range(10):
            add(scheduler, str(number), Item(300, kept))
        counts[kept] = images(run(scheduler))
    assert counts[4] == [3, 3, 3, 1]
    assert max(counts[300]) == 3


def test_without_it_a_step_takes_in_all(config: VllmConfig, monkeypatch: Any) -> None:
    monkeypatch.setattr(config, "ec_manager_config", EncoderCacheManagerConfig())
    scheduler = make_scheduler(config)
    for number in range(10):
        add(scheduler, str(number), Item(300, 4))
    assert images(run(scheduler)) == [10]


def test_images_of_one_request_count_as_those_of_several(scheduler: Scheduler) -> None:
    add(scheduler, "one", *[Item(300, 4)] * 5)
    add(scheduler, "two", *[Item(300, 4)] * 2)
    steps = run(scheduler)
    assert images(steps) == [3, 3, 1]
    assert steps[0].encoded == {"one": [0, 1, 2]}
    assert steps[1].encoded == {"one": [3, 4], "two": [0]}


@pytest.mark.parametrize("size", [BUDGET, BUDGET + 1, 5 * BUDGET])
def test_an_item_as_large_as_the_budget_or_larger_is_alone(scheduler: Scheduler, size: int) -> None:
    for name, item in (("a", Item(300, 4)), ("b", Item(size, 4)), ("c", Item(300, 4))):
        add(scheduler, name, item)
    first, second, *rest = [list(step.encoded) for step in run(scheduler) if step.encoded]
    assert second == ["b"]
    # From 0.33 on, vLLM does not let "c" wait for "b", which is first in the next step.
    assert (first, rest) in [(["a"], [["c"]]), (["a", "c"], [])]


def test_requests_that_decode_go_on(scheduler: Scheduler) -> None:
    add(scheduler, "text", answer=5)
    for number in range(10):
        add(scheduler, str(number), Item(300, 4))
    assert all("text" in step.tokens for step in run(scheduler)[:5])


def test_what_needs_no_tower_is_counted_as_by_vllm(scheduler: Scheduler) -> None:
    """Embeddings of the client's, and items that only workers can read."""
    for number in range(10):
        add(scheduler, str(number), Item(300, 4, is_planned=False))
    assert images(run(scheduler)) == [10]


def test_space_is_that_of_what_is_kept(scheduler: Scheduler) -> None:
    add(scheduler, "one", Item(300, 4))
    free = scheduler.encoder_cache_manager.num_free_slots
    scheduler.schedule()
    assert scheduler.encoder_cache_manager.num_free_slots == free - 4


def test_an_item_that_is_there_costs_nothing(scheduler: Scheduler) -> None:
    """The same image with the same question, in the same step and later."""
    for _ in range(2):
        for number in range(5):
            add(scheduler, str(number), Item(600, 4))
        for request in scheduler.requests.values():
            request.mm_features[0].identifier = "the same"
        encoded = images(run(scheduler))
    assert encoded == []


def test_questions_about_one_image_run_the_tower_once(scheduler: Scheduler) -> None:
    """Another question, or another budget: the first counts whole, others an eighth of 300."""
    for number in range(10):
        add(scheduler, str(number), Item(300, 4 + number, media=1))
    add(scheduler, "other", Item(300, 4, media=2))
    assert images(run(scheduler)) == [11]  # 300 + 9 * 37 + 300


def test_further_questions_still_count_for_their_pixels(scheduler: Scheduler) -> None:
    for number in range(30):
        add(scheduler, str(number), Item(300, 4, media=1))
    assert images(run(scheduler)) == [19, 11]  # 300 + 18 * 37


def test_the_tower_runs_each_time_for_what_keeps_all(scheduler: Scheduler) -> None:
    for number in range(5):
        add(scheduler, str(number), Item(300, 300, media=1))
    assert max(images(run(scheduler))) == 3


def test_only_with_a_budget(model: Path) -> None:
    for budget, expected in ((4, CLASS_PATH), (None, None)):
        given = arguments(model, budget)
        given.create_model_config()
        assert given.ec_manager_config.encoder_cache_manager_cls == expected


def test_a_manager_of_the_users_own_stays(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda line, *args: lines.append(line % args))
    own = "vllm.v1.core.encoder_cache_manager.EncoderCacheManager"
    given = arguments(model, ec_manager_config=EncoderCacheManagerConfig(own))
    given.create_model_config()
    assert given.ec_manager_config.encoder_cache_manager_cls == own
    assert len(lines) == 1
    assert own in lines[0]


def test_shared_memory_hides_the_sizes_of_items(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda line, *args: lines.append(line % args))
    for budget, cache in ((4, "lru"), (None, "shm"), (4, "shm")):
        assert not lines
        arguments(model, budget, mm_processor_cache_type=cache).create_model_config()
    assert len(lines) == 1
    assert "cache type lru" in lines[0]
