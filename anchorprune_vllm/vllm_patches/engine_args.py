# SPDX-License-Identifier: Apache-2.0
"""Add our flags to vLLM's `EngineArgs`, and check our settings before anything is loaded."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from anchorprune_vllm.config import CONFIG_KEY
from anchorprune_vllm.flags import CommandLineSettings, add_flags


def wrap_add_cli_args(original: staticmethod) -> staticmethod:  # type: ignore[type-arg]
    """Wrap `add_cli_args` to add our flags after vLLM's own."""

    @functools.wraps(original.__func__)
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original.__func__(parser)
        add_flags(parser)
        return parser

    return staticmethod(add_cli_args)


def wrap_create_model_config(original: Any) -> Any:
    """Wrap `create_model_config` to check each model config as soon as it is made."""

    @functools.wraps(original)
    def create_model_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        model_config = original(self, *args, **kwargs)
        check_model_config(self, model_config)
        return model_config

    return create_model_config


def check_model_config(engine_args: Any, model_config: Any) -> None:
    """Refuse settings that cannot work, at start-up and in one line."""
    from anchorprune_vllm.startup import prepare_model

    try:
        prepare_model(engine_args, model_config)
    except ValueError as error:
        overrides = engine_args.hf_overrides
        settings = overrides.get(CONFIG_KEY) if isinstance(overrides, dict) else None
        if isinstance(settings, CommandLineSettings):
            # On the command line only the message helps, so there is no traceback.
            raise SystemExit(f"vllm: error: {error}") from error
        raise
