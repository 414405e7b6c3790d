# SPDX-License-Identifier: Apache-2.0
"""vLLM's `EngineArgs`: our flags go in, our settings are checked before anything is loaded."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from anchorprune_vllm.cli import add_flags, merge_into_overrides, take_settings


def wrap_add_cli_args(original: staticmethod) -> staticmethod:  # type: ignore[type-arg]
    """Add the flags behind vLLM's own."""

    @functools.wraps(original.__func__)
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original.__func__(parser)
        add_flags(parser)
        return parser

    return staticmethod(add_cli_args)


def wrap_from_cli_args(original: classmethod) -> classmethod:  # type: ignore[type-arg]
    """Carry the flags' settings over into `hf_overrides`."""

    @functools.wraps(original.__func__)
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        from anchorprune_vllm.logger import logger

        engine_args = original.__func__(cls, args)
        engine_args.anchorprune_from_cli = True
        settings, given = take_settings(args)
        if settings is not None:
            engine_args.hf_overrides = merge_into_overrides(engine_args.hf_overrides, settings)
        elif given:
            logger.warning_once(
                "AnchorPrune is off: %s has no effect without --anchorprune-budget",
                ", ".join(given),
            )
        return engine_args

    return classmethod(from_cli_args)


def wrap_create_model_config(original: Any) -> Any:
    """Refuse settings that cannot work, at start-up, in one line."""

    @functools.wraps(original)
    def create_model_config(self: Any) -> Any:
        from anchorprune_vllm.plugin import check_model

        model_config = original(self)
        try:
            check_model(self, model_config)
        except ValueError as error:
            if getattr(self, "anchorprune_from_cli", False):
                # On the command line the message is all that helps: no traceback.
                raise SystemExit(f"vllm: error: {error}") from error
            raise
        return model_config

    return create_model_config
