# SPDX-License-Identifier: Apache-2.0
"""What the plugin does to the vLLM that it finds: run this with that vLLM on PYTHONPATH.

Argument: a model that cannot be pruned. Prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

import anchorprune_vllm
from anchorprune_vllm.vllm_patches import PATCHES, Patch
from tests.support.cli_args import make_arg_parser


def parse(*arguments: str) -> Namespace:
    return make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m", *arguments])


def refusal(model: str, budget: int | None) -> str | None:
    """What is said of a budget for this model, if anything."""
    overrides = {"anchorprune": {"budget": budget}} if budget else {}
    try:
        EngineArgs(
            model=model, skip_tokenizer_init=True, hf_overrides=overrides
        ).create_model_config()
    except ValueError as error:
        return str(error)
    return None


def is_replaced(patch: Patch) -> bool:
    """Whether the code of the target is another than vLLM's."""
    module, class_name = patch.owner.split(":")
    target = getattr(getattr(importlib.import_module(module), class_name), patch.name)
    ours = Path(anchorprune_vllm.__file__).parent
    codes = {function.__code__.co_filename for function in _layers(target)}
    return any(Path(file).is_relative_to(ours) for file in codes)


def _layers(function: object) -> list[object]:
    """A function and those that it wraps."""
    layers = [function]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    return layers


if __name__ == "__main__":
    model = sys.argv[1]
    flags = parse("--anchorprune-budget", "16").hf_overrides
    report = {
        "vllm": str(Path(vllm.__file__).parents[1]),
        "plugin": str(Path(anchorprune_vllm.__file__).parents[1]),
        "flags": flags,
        "refused": refusal(model, 16),
        "not_refused": refusal(model, None),
        "replaced": [patch.diff for patch in PATCHES if is_replaced(patch)],
    }
    print(json.dumps(report))
