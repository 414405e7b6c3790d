# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, and a look into their workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vllm import LLM, SamplingParams

from anchorprune_vllm.testing.demo_models.make import find_text_encoder
from tests.support.dialects import in_dialect, prompt_of
from tests.support.reference import Reference

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@dataclass
class Seen:
    """What a worker did since it was last asked."""

    embed_calls: list[int] = field(default_factory=list)
    """Images in each call of the pruner."""
    tower_batches: list[int] = field(default_factory=list)
    """Length of the vision tower's input (images, tiles, patches) in each call."""
    kept: list[list[int]] = field(default_factory=list)
    """Indices of the tokens kept of each pruned item."""


@contextmanager
def make_engine(model: Path, budget: int | str | None, **options: Any) -> Iterator[LLM]:
    """An engine on a demo model, in this process; `budget` None: pruning off.

    In a process of its own, as `vllm serve` has it, it would start in 30 s instead of 3.
    """
    settings = options.pop("settings", {})
    if budget is not None:
        prune = {"budget": budget, **settings}
        if text_encoder := find_text_encoder(model):
            prune["text_encoder"] = str(text_encoder)
        options["hf_overrides"] = {"anchorprune": prune, **options.get("hf_overrides", {})}
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "block_size": 32,
        # Not a share of the memory: several engines live side by side.
        "kv_cache_memory_bytes": 128 * 2**20,
        "limit_mm_per_prompt": {"image": 8},
        "seed": 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # engines share this process's threads
        llm = LLM(model=str(model), **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def watch(llm: LLM) -> None:
    """Begin to record in every worker; recording lasts as long as the engine."""
    llm.collective_rpc(_watch)


def seen(llm: LLM, rank: int = 0) -> Seen:
    """What a worker did since this was last called."""
    return llm.collective_rpc(_take_seen)[rank]


def forget_everything(llm: LLM) -> None:
    """Empty vLLM's caches and ours."""
    llm.reset_prefix_cache()
    llm.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()
    llm.collective_rpc(_forget_media)


def request(
    question: str, *media: Any, override: dict[str, Any] | None = None, **extra: Any
) -> dict[str, Any]:
    """One prompt for `LLM.generate`: images, videos, then the question."""
    images = [item for item in media if isinstance(item, Image.Image)]
    videos = [item for item in media if not isinstance(item, Image.Image)]
    prompt: dict[str, Any] = {"prompt": prompt_of(question, len(images), len(videos)), **extra}
    data = {"image": images, "video": videos}
    if media:
        prompt["multi_modal_data"] = {name: items for name, items in data.items() if items}
    if override is not None:
        prompt["mm_processor_kwargs"] = {"anchorprune": override}
    return prompt


def media_of(item: dict[str, Any]) -> list[Any]:
    """The images, then the videos of a `request`."""
    data = item.get("multi_modal_data", {})
    return [*data.get("image", []), *data.get("video", [])]


def generate(llm: LLM, *requests: dict[str, Any], params: Any = GREEDY) -> list[Any]:
    """What vLLM gives back for requests given to it together."""
    tokenizer = llm.get_tokenizer()
    prompts = [
        {**item, "prompt": in_dialect(item["prompt"], tokenizer)} if "prompt" in item else item
        for item in requests
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def answer(llm: LLM, *requests: dict[str, Any]) -> list[list[int]]:
    """Greedy answers as token ids."""
    return [list(output.outputs[0].token_ids) for output in generate(llm, *requests)]


def visual_tokens(llm: LLM, reference: Reference, *requests: dict[str, Any]) -> list[int]:
    """Placeholders in each prompt as the engine sees it."""
    placeholders = reference.placeholder_ids()
    return [
        sum(output.prompt_token_ids.count(token) for token in placeholders)
        for output in generate(llm, *requests)
    ]


def _watch(worker: Any) -> None:
    record = worker.anchorprune_seen = Seen()
    model = worker.model_runner.model
    towers = "vision_tower", "visual", "vision_model", "vision_encoder"
    tower = next(m for name, m in model.named_modules() if name.split(".")[-1] in towers)

    def record_batch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        record.tower_batches.append(len([*args, *kwargs.values()][0]))

    tower.register_forward_pre_hook(record_batch, with_kwargs=True)
    if model._pruner is None:
        return
    embed, prune = model._pruner.embed, model._pruner._prune

    def embed_and_record(images: Any, plans: Any) -> Any:
        record.embed_calls.append(len(plans))
        return embed(images, plans)

    def prune_and_record(*args: Any) -> Any:
        rows, kept, encoded = prune(*args)
        record.kept.extend(each.indices.tolist() for each in kept)
        return rows, kept, encoded

    model._pruner.embed, model._pruner._prune = embed_and_record, prune_and_record


def _take_seen(worker: Any) -> Seen:
    taken, record = Seen(), worker.anchorprune_seen
    for name, values in vars(record).items():
        getattr(taken, name).extend(values)
        values.clear()
    return taken


def _forget_media(worker: Any) -> None:
    worker.model_runner.model._pruner.forget_media()
