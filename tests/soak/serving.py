# SPDX-License-Identifier: Apache-2.0
"""The soak of one model: cold answers first, then all requests to the engine as it is by then."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import SamplingParams
from vllm.v1.core.sched import output as sched_output

from tests.soak.comparing import BFLOAT16, FLOAT32, Precision, Scored, compare
from tests.soak.drawing import SIZES, Asked, draw_batches, draw_pool
from tests.support.checkpoints import Checkpoint, write_checkpoint
from tests.support.engine import forget_everything

BUDGET = 12
_BLOCK = 32
_LONG_PROMPTS = ("llava-next", "llava-onevision", "llava-video")
_PAGES = 20
"""Pages that the feature cache is left with: all of them would hold every image."""

_SHOWN = 10
"""Requests with another answer that are written down."""


@dataclass
class Settings:
    """The settings that decide which requests are made."""

    requests: int = 2000
    minutes: float = 15
    """The most that warm requests may take."""
    pool: int = 150
    seed: int = 0
    runner: str = "V1"


@dataclass
class Soak:
    """The result of one model, as far as it is known."""

    model: str
    settings: dict[str, Any]
    requests: int = 0
    """Requests that the warm engine has answered, and whose answers were compared."""
    equal: int = 0
    near_ties: int = 0
    seconds: float = 0
    """Seconds since the first warm request."""
    counts: dict[str, int] = field(default_factory=dict)
    """Numbers of preemptions, and of hits, misses and evictions."""
    differing: list[dict[str, Any]] = field(default_factory=list)
    """The first few requests with another answer."""
    is_finished: bool = False
    why: str = ""
    """The reason why it ended early, if it did."""

    @property
    def different(self) -> int:
        return self.requests - self.equal - self.near_ties

    @property
    def is_well(self) -> bool:
        """Whether it ran to its end, and no answer was another one."""
        return self.is_finished and not self.different


def soak_model(name: str, directory: Path, settings: Settings) -> Iterator[Soak]:
    """Make all requests to a model, and yield after each batch what is known by then."""
    checkpoint = write_checkpoint(name, directory / "model")
    soak = Soak(name, vars(settings))
    pool = draw_pool(
        settings.seed,
        settings.pool,
        checkpoint.images,
        videos=bool(checkpoint.video),
        # On a CPU vLLM 0.32 fails, without a budget too, if a whole image is one tile of Llama's.
        sizes=[size for size in SIZES if name != "llama4" or max(size) > 112],
    )
    with serve(name, checkpoint, settings.runner) as llm:
        yield soak
        cold = [ask_cold(llm, asked) for asked in pool]
        yield from ask_warm(llm, soak, pool, cold, settings, precision_of(checkpoint))
    soak.is_finished = True
    yield soak


@contextmanager
def serve(name: str, checkpoint: Checkpoint, runner: str) -> Iterator[Any]:
    """Start an engine with short steps, a small KV cache and a small feature cache."""
    is_gemma = "gemma" in name
    context = 2048 if name in _LONG_PROMPTS else 1024
    # As few as vLLM lets it: those of a whole context, and for layers with a window one more.
    # Gemma's layers of two kinds each take blocks of their own, and Qwen3.5's are larger ones.
    blocks = 16 if name == "qwen3.5" else (context // _BLOCK + 2) * (1 + is_gemma)
    with (
        patch.object(sched_output, "strip_covered_mm_data", leave_media),
        checkpoint.served(
            BUDGET,
            runner,
            max_model_len=context,
            # Of Gemma's images, whose tokens see each other, vLLM cuts none between steps.
            max_num_batched_tokens=512 if is_gemma else 96,
            num_gpu_blocks_override=blocks,
            block_size=_BLOCK,
            # Begin requests whose whole prompt may not fit, which makes for preemptions.
            scheduler_reserve_full_isl=False,
            enable_prefix_caching=True,
            # vLLM's cache of processed items stays large: when it drops some, its two halves fall
            # out of step over requests with a video before an image, also without a budget, and
            # requests are refused with MultiModalCacheMissError.
            disable_log_stats=False,
            settings={"feature_cache_mb": 16, "pixel_cache_mb": 16},
        ) as llm,
    ):
        yield llm


def leave_media(features: Any, computed_tokens: int, uses_mrope: bool = False) -> Any:
    """Leave a request its media.

    vLLM 0.32 sends none to the worker for what its prefix cache has. When the request is preempted
    and that part of the cache goes, its first runner has nothing to encode: the engine ends with
    "Encoder cache miss", without a budget too.
    """
    return features


def precision_of(checkpoint: Checkpoint) -> Precision:
    return BFLOAT16 if checkpoint.options.get("dtype") == "bfloat16" else FLOAT32


def ask_cold(llm: Any, asked: Asked) -> Scored:
    """Answer a request alone, after all that was asked before is forgotten."""
    forget(llm)
    (answer,) = ask(llm, [asked])
    return answer


def forget(llm: Any) -> None:
    """Empty all caches, also of prepared pixels."""
    forget_everything(llm)
    llm.renderer.mm_processor._pixel_cache._outputs.clear()


def ask(llm: Any, batch: Sequence[Asked]) -> list[Scored]:
    """Answer requests at once."""
    for asked in batch:
        params = SamplingParams(
            temperature=0, max_tokens=asked.answer_tokens, logprobs=2, ignore_eos=True
        )
        llm.enqueue_chat([asked.messages], params, use_tqdm=False, **asked.options)
    return [Scored.of(output) for output in llm.wait_for_completion(use_tqdm=False)]


def ask_warm(
    llm: Any,
    soak: Soak,
    pool: Sequence[Asked],
    cold: Sequence[Scored],
    settings: Settings,
    precision: Precision,
) -> Iterator[Soak]:
    """Make requests in batches, compare the answers, and yield what is known after each batch."""
    forget(llm)
    llm.collective_rpc(watch_features)
    before = read_counts(llm)
    start = time.monotonic()
    for batch in draw_batches(settings.seed, len(pool), settings.requests):
        answers = ask(llm, [pool[number] for number in batch])
        for number, warm in zip(batch, answers, strict=True):
            verdict = compare(cold[number], warm, precision)
            soak.requests += 1
            soak.equal += verdict == "equal"
            soak.near_ties += verdict == "near-tie"
            if verdict == "different" and len(soak.differing) < _SHOWN:
                soak.differing.append(
                    {
                        "place": soak.requests,
                        "number": number,
                        "asked": pool[number]._asdict(),
                        "cold": cold[number]._asdict(),
                        "warm": warm._asdict(),
                    }
                )
        soak.seconds = time.monotonic() - start
        soak.counts = {name: now - before[name] for name, now in read_counts(llm).items()}
        yield soak
        if soak.seconds > 60 * settings.minutes and soak.requests < settings.requests:
            soak.why = f"ended after {settings.minutes:g} minutes"
            return


def read_counts(llm: Any) -> dict[str, int]:
    """Return what the engine and its caches have counted."""
    (counts,) = llm.collective_rpc(read_features)
    for metric in llm.get_metrics():
        if metric.name in _METRICS:
            counts[_METRICS[metric.name]] = metric.value
    return counts


_METRICS = {"vllm:num_preemptions": "preemptions", "vllm:prefix_cache_hits": "prefix tokens"}


def watch_features(worker: Any) -> None:
    """Leave an empty feature cache few pages, and begin to count what it has, lacks and drops."""
    cache = worker.model_runner.model._pruner._cache
    del cache._free[_PAGES:]
    cache._pages = len(cache._free)
    counts = worker.anchorprune_features = {"hits": 0, "misses": 0, "evictions": 0}
    get, put = cache.get, cache.put

    def get_and_count(key: Any) -> Any:
        found = get(key)
        counts["misses" if found is None else "hits"] += 1
        return found

    def put_and_count(key: Any, features: Any) -> None:
        before = {*cache._entries}
        put(key, features)
        counts["evictions"] += len(before - {*cache._entries})

    cache.get, cache.put = get_and_count, put_and_count


def read_features(worker: Any) -> dict[str, int]:
    """Return what was counted so far."""
    return dict(worker.anchorprune_features)
