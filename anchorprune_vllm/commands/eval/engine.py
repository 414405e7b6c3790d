# SPDX-License-Identifier: Apache-2.0
"""The offline engine of an evaluation, and the questions put to it."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers.utils.logging import disable_progress_bar
from vllm import LLM, EngineArgs, SamplingParams
from vllm.platforms import current_platform

from anchorprune_vllm.commands.engine_options import check_engine_options, refusal
from anchorprune_vllm.commands.eval.asked_thing import tell
from anchorprune_vllm.commands.eval.data import DataSet
from anchorprune_vllm.commands.eval.plan import PERFECT, Configuration
from anchorprune_vllm.config import CONFIG_KEY

_AT_ONCE = 256  # questions given to the engine together, between two steps of the progress bar


def check_engine(model: str, settings: dict[str, Any] | None, options: dict[str, Any]) -> None:
    """Raise ValueError for a model or for options that vLLM refuses, without starting an engine."""
    own = inspect.signature(LLM).parameters.keys() - inspect.signature(EngineArgs).parameters.keys()
    check_engine_options(options, also=own)
    arguments = _arguments(settings, options)
    # Until an engine starts, vLLM's level is not the one that was asked for.
    log = logging.getLogger("vllm")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        EngineArgs(
            model=model, **{name: arguments[name] for name in arguments.keys() - own}
        ).create_model_config()
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(_cannot_start(model, options, error)) from error
    finally:
        log.setLevel(level)


@contextmanager
def start_engine(
    model: str, settings: dict[str, Any] | None, options: dict[str, Any]
) -> Iterator[LLM]:
    """An engine that gives all its memory back; `settings` None: without pruning.

    `options` are those of `vllm.LLM`.
    """
    disable_progress_bar()  # one is enough
    if current_platform.is_cpu():
        # A GPU's memory comes back when the process that used it ends, so there the engine has one
        # of its own, vLLM's way. For main memory that is not needed, and would cost half a minute.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # it would last beyond it
    try:
        llm = LLM(model=model, **_arguments(settings, options))
    except (OSError, TypeError, ValueError) as error:
        raise RuntimeError(_cannot_start(model, options, error)) from error
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def _cannot_start(model: str, options: dict[str, Any], error: Exception) -> str:
    given = f" and {json.dumps(options)}" if options else ""
    return f"vLLM cannot start with {model}{given}: {refusal(error)}"


def _arguments(settings: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Of `vllm.LLM`."""
    defaults: dict[str, Any] = {
        "seed": 0,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "use_tqdm_on_load": False,
        "disable_log_stats": True,  # as vllm.LLM has it; nobody scrapes this process
        "mm_processor_cache_gb": 0.25,  # no question is asked twice: vLLM's own 4 would fill up
    }
    if current_platform.is_cpu():
        # vLLM's own defaults would take most of the memory, and compile for minutes.
        defaults |= {"kv_cache_memory_bytes": 2**30, "enforce_eager": True, "dtype": "float32"}
    arguments = {**defaults, **options}
    if settings is not None:
        arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), CONFIG_KEY: settings}
    return arguments


def ask(
    llm: LLM,
    data: DataSet,
    configuration: Configuration,
    *,
    prompt: str,
    max_tokens: int,
    add_special_tokens: bool,
    advance: Callable[[int], None],
) -> tuple[list[str], float]:
    """Greedy answers to all questions of a data set, and the mean number of prompt tokens.

    `advance` is told of each number of answers as they come.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    override = None
    if configuration.budget is not None:
        choice = {"budget": configuration.budget, "query": configuration.query}
        override = {CONFIG_KEY: choice}
    answers: list[str] = []
    prompt_tokens = 0
    at_once = 1 if configuration.method == PERFECT else _AT_ONCE
    for start in range(0, len(data.questions), at_once):
        numbers = range(len(data.questions))[start : start + at_once]
        if configuration.method == PERFECT:
            llm.apply_model(partial(tell, boxes=data.questions[start].about))
        outputs = llm.chat(
            _conversations(data, numbers, prompt),
            params,
            use_tqdm=False,
            mm_processor_kwargs=override,
            tokenization_kwargs={"add_special_tokens": add_special_tokens},
        )
        answers += [output.outputs[0].text for output in outputs]
        prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)
        advance(len(numbers))
    return answers, prompt_tokens / len(answers)


def device_name() -> str:
    """The device that vLLM computes on."""
    return str(current_platform.get_device_name())


def _conversations(
    data: DataSet, numbers: Sequence[int], prompt: str
) -> list[list[dict[str, Any]]]:
    """The questions with these numbers, each with its picture before it."""
    needed = {data.picture_of[number] for number in numbers}
    images = {number: data.pictures[number].load() for number in needed}
    return [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_pil", "image_pil": images[data.picture_of[number]]},
                    {
                        "type": "text",
                        "text": prompt.replace("{question}", data.questions[number].text),
                    },
                ],
            }
        ]
        for number in numbers
    ]
