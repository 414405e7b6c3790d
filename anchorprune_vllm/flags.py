# SPDX-License-Identifier: Apache-2.0
"""The `--anchorprune-*` flags of vLLM's commands, and their way into the HF config."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from anchorprune_vllm.budget import Budget
from anchorprune_vllm.config import CONFIG_KEY, SCOPES, PruneConfig, check_names
from anchorprune_vllm.methods import registry

_PREFIX = "anchorprune_"


class CommandLineSettings(dict[str, Any]):
    """Settings that were given as flags, so that errors in them are reported in one line."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group of AnchorPrune flags, which have no effect without a budget.

    Their values are in `hf_overrides` as soon as arguments are parsed, because vLLM passes parsed
    arguments to processes that read them before they load any plugin.
    """
    parse = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse(*args, **kwargs)
        try:
            _fold(namespace)
        except ValueError as error:
            parser.error(str(error))
        return namespace, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    group = parser.add_argument_group(
        title="AnchorPrune",
        description="Visual-token pruning: keep the visual tokens that the question needs. "
        "Off unless a budget is given.",
        argument_default=argparse.SUPPRESS,  # otherwise vLLM's help says "(default: None)"
    )
    group.add_argument(
        "--anchorprune-budget",
        type=_one_line(lambda text: str(Budget.parse(text))),
        metavar="K",
        help="Visual tokens kept per image (and per video, unless --anchorprune-video-budget is "
        "given): a whole number such as 64, or a share such as 10%%. 100%% keeps all tokens unless "
        "a request asks for fewer.",
    )
    group.add_argument(
        "--anchorprune-video-budget",
        type=_one_line(lambda text: str(Budget.parse(text))),
        metavar="K",
        help="Visual tokens kept per video: a whole number or a share. Without "
        "--anchorprune-budget, images keep all their tokens.",
    )
    group.add_argument(
        "--anchorprune-method",
        choices=registry.names(),
        help="How tokens are chosen (default: anchorprune). The others are published selectors and "
        "controls (random, uniform, first) on the same signals, for comparison.",
    )
    group.add_argument(
        "--anchorprune-query",
        choices=SCOPES,
        help="The question that tokens are chosen for. turn (default): the user turn with the "
        "image or video, or the user's words nearest to it, so that later turns still hit the "
        "prefix cache. last: the last user turn. all: all user turns. none: no question.",
    )
    group.add_argument(
        "--anchorprune-text-encoder",
        metavar="ID_OR_PATH",
        help="The CLIP or SigLIP checkpoint that the vision tower comes from. It is known for the "
        "published LLaVAs (openai/clip-vit-large-patch14-336, OneVision and Video: "
        "google/siglip-so400m-patch14-384). Models that match words (Qwen2.5-VL) take none.",
    )
    group.add_argument(
        "--anchorprune-config",
        type=_one_line(_read_config),
        metavar="JSON",
        help='Further settings, such as \'{"tau": 0.2, "patience": 3, "positions": "native"}\'. '
        "Other flags override the same settings here, and all flags override --hf-overrides.",
    )


def _fold(args: argparse.Namespace) -> None:
    """Write the settings given as flags into `args.hf_overrides`, beside the user's own.

    Single flags override `--anchorprune-config`, which overrides `--hf-overrides`. All settings are
    checked together, because one may depend on another, such as `method_options` on the method.
    """
    flags = {
        name.removeprefix(_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(_PREFIX)
    }
    if not flags:
        return
    given = ", ".join(f"--{_PREFIX}{name}".replace("_", "-") for name in flags)
    overrides = dict(args.hf_overrides or {})
    own = overrides.get(CONFIG_KEY, {})
    check_names(own)
    settings = CommandLineSettings({**own, **flags.pop("config", {}), **flags})
    PruneConfig.from_dict({"budget": "100%", **settings})  # checked even without a budget
    if "video_budget" in settings:  # without a budget of their own, images are not pruned
        settings.setdefault("budget", "100%")
    if "budget" in settings:
        args.hf_overrides = {**overrides, CONFIG_KEY: settings}
        return
    from anchorprune_vllm.log import logger

    logger.warning_once(
        "AnchorPrune is off: without --anchorprune-budget these flags have no effect: %s", given
    )


def _one_line(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a converter whose errors argparse shows as text, without a traceback."""

    def converter(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converter


def _read_config(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"anchorprune: settings must be JSON, got {text!r} ({error})") from error
    check_names(settings)
    return settings
