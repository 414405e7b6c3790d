# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, and a look into their workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from vllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@dataclass
class Seen:
    """What a worker did since it was last asked."""

    embed_calls: list[int] = field(default_factory=list)
    """Images in each call of the pruner."""
    tower_batches: list[int] = field(default_factory=list)
    """Tiles (an image, or its base view and crops) in each call of the vision tower."""
    kept: list[list[int]] = field(default_factory=list)
    """Indices of each selection."""


@contextmanager
def make_engine(model: Path, budget: int | str | None, **options: Any) -> Iterator[LLM]:
    """An engine on a demo model; `budget` None: pruning off."""
    settings = options.pop("settings", {})
    if budget is not None:
        prune = {"budget": budget, "text_encoder": str(model / "clip"), **settings}
        options["hf_overrides"] = {"anchorprune": prune}
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


def prompt_of(question: str, images: int = 1) -> str:
    """The demo models' chat prompt."""
    return f"USER: {'<image>' * images}\n{question} ASSISTANT:"


def request(
    question: str, *images: Image.Image, override: dict[str, Any] | None = None, **extra: Any
) -> dict[str, Any]:
    """One prompt for `LLM.generate`."""
    prompt: dict[str, Any] = {"prompt": prompt_of(question, len(images)), **extra}
    if images:
        prompt["multi_modal_data"] = {"image": list(images)}
    if override is not None:
        prompt["mm_processor_kwargs"] = {"anchorprune": override}
    return prompt


def answer(llm: LLM, *requests: dict[str, Any]) -> list[list[int]]:
    """Greedy answers as token ids, the requests given to the engine together."""
    outputs = llm.generate(list(requests), GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def visual_tokens(llm: LLM, *requests: dict[str, Any]) -> list[int]:
    """Placeholders in each prompt as the engine sees it."""
    image_token = llm.get_tokenizer().convert_tokens_to_ids("<image>")
    outputs = llm.generate(list(requests), GREEDY, use_tqdm=False)
    return [output.prompt_token_ids.count(image_token) for output in outputs]


def _watch(worker: Any) -> None:
    import anchorprune_vllm.pruner as pruner

    record = worker.anchorprune_seen = Seen()
    model = worker.model_runner.model
    model.vision_tower.register_forward_pre_hook(
        lambda module, args: record.tower_batches.append(len(args[0]))
    )
    select, embed = pruner.select_batch, pruner.VisualPruner.embed

    def select_and_record(*args: Any) -> Any:
        kept = select(*args)
        record.kept.extend(item.indices.tolist() for item in kept)
        return kept

    def embed_and_record(self: Any, images: Any, plans: Any) -> Any:
        record.embed_calls.append(len(plans))
        return embed(self, images, plans)

    pruner.select_batch = select_and_record
    pruner.VisualPruner.embed = embed_and_record


def _take_seen(worker: Any) -> Seen:
    taken, record = Seen(), worker.anchorprune_seen
    for name, values in vars(record).items():
        getattr(taken, name).extend(values)
        values.clear()
    return taken


def _forget_media(worker: Any) -> None:
    worker.model_runner.model._pruner.forget_media()
