# SPDX-License-Identifier: Apache-2.0
"""The offline engine of an evaluation, and the questions that it is asked."""

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

from anchorprune_vllm.commands.checks import check_engine_options, refusal
from anchorprune_vllm.commands.eval.asked_thing import tell
from anchorprune_vllm.commands.eval.data import DataSet
from anchorprune_vllm.commands.eval.plan import PERFECT, Configuration
from anchorprune_vllm.config import CONFIG_KEY

_QUESTIONS_AT_ONCE = 256  # between two steps of the progress bar


def check_engine(model: str, settings: dict[str, Any] | None, options: dict[str, Any]) -> None:
    """Raise ValueError for a model or options that vLLM refuses, without starting an engine."""
    own = inspect.signature(LLM).parameters.keys() - inspect.signature(EngineArgs).parameters.keys()
    check_engine_options(options, also=own)
    arguments = _arguments(settings, options)
    log = logging.getLogger("vllm")  # VLLM_LOGGING_LEVEL takes effect only in an engine
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        known = {name: arguments[name] for name in arguments.keys() - own}
        EngineArgs(model=model, **known).create_model_config()
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(_cannot_start(model, options, error)) from error
    finally:
        log.setLevel(level)


@contextmanager
def start_engine(
    model: str, settings: dict[str, Any] | None, options: dict[str, Any]
) -> Iterator[LLM]:
    """Start an engine that gives back all its memory when the block ends.

    `settings` are those of pruning, None for the unpruned model; `options` those of `vllm.LLM`.
    """
    disable_progress_bar()  # the evaluation has one of its own
    if current_platform.is_cpu():
        # On a GPU, memory is given back when the engine's own process ends, which is vLLM's
        # default. Main memory needs no such process, and starting it would take half a minute.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # Without a process of its own the binding to cores would outlive the engine.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
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
    """Return the arguments of `vllm.LLM`."""
    arguments: dict[str, Any] = {
        "seed": 0,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "use_tqdm_on_load": False,
        "disable_log_stats": True,  # nobody scrapes this process
        "mm_processor_cache_gb": 0.25,  # no question is asked twice, so vLLM's 4 would fill up
    }
    if current_platform.is_cpu():
        # vLLM's defaults would take most of the memory, and compile for minutes.
        arguments |= {"kv_cache_memory_bytes": 2**30, "enforce_eager": True, "dtype": "float32"}
    arguments |= options
    if settings is not None:
        arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), CONFIG_KEY: settings}
    return arguments


def ask_all(
    llm: LLM,
    data: DataSet,
    configuration: Configuration,
    *,
    prompt: str,
    max_tokens: int,
    add_special_tokens: bool,
    advance: Callable[[int], None],
) -> tuple[list[str], float]:
    """Return greedy answers to all questions, and the mean number of prompt tokens.

    `advance` is called with the number of answers whenever some have arrived.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    override = None
    if configuration.budget is not None:
        choice = {"budget": configuration.budget, "query": configuration.query}
        override = {CONFIG_KEY: choice}
    answers: list[str] = []
    prompt_tokens = 0
    is_told = configuration.method == PERFECT
    at_once = 1 if is_told else _QUESTIONS_AT_ONCE
    for start in range(0, len(data.questions), at_once):
        numbers = range(len(data.questions))[start : start + at_once]
        if is_told:
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


def _conversations(
    data: DataSet, numbers: Sequence[int], prompt: str
) -> list[list[dict[str, Any]]]:
    """Return the questions with these numbers as chats, each with its image before it."""
    images = {n: data.pictures[n].load() for n in {data.picture_of[each] for each in numbers}}
    chats = []
    for number in numbers:
        image = {"type": "image_pil", "image_pil": images[data.picture_of[number]]}
        text = prompt.replace("{question}", data.questions[number].text)
        chats.append([{"role": "user", "content": [image, {"type": "text", "text": text}]}])
    return chats
