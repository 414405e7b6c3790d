# SPDX-License-Identifier: Apache-2.0
"""Ways to deploy vLLM that do not go with pruning are refused at start-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import envs
from vllm.config import ECTransferConfig
from vllm.engine.arg_utils import EngineArgs

import anchorprune_vllm
from anchorprune_vllm.startup import prepare_model
from anchorprune_vllm.vllm_patches.hooks import Hook, HookGone

PRODUCER = {"ec_connector": "ECExampleConnector", "ec_role": "ec_producer"}
CONSUMER = {**PRODUCER, "ec_role": "ec_consumer"}


@pytest.fixture(scope="module")
def model(demo_models: Any) -> Path:
    anchorprune_vllm.register()
    return demo_models("qwen2.5-vl")


def start(model: Path, budget: int | None, **options: Any) -> Any:
    """What `vllm serve` and `LLM` do first."""
    overrides = {"anchorprune": {"budget": budget}} if budget else {}
    return EngineArgs(model=str(model), hf_overrides=overrides, **options).create_model_config()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mm_encoder_only": True}, "leave out --mm-encoder-only, so that one instance does both"),
        ({"ec_transfer_config": ECTransferConfig(**PRODUCER)}, "leave out --ec-transfer-config"),
        ({"ec_transfer_config": PRODUCER}, "leave out --ec-transfer-config"),
        (
            {"prefill_context_parallel_size": 2},
            "give --prefill-context-parallel-size 1 instead of 2",
        ),
        ({"decode_context_parallel_size": 4}, "give --decode-context-parallel-size 1 instead of 4"),
    ],
)
def test_refused(model: Path, options: dict[str, Any], words: str) -> None:
    start(model, None, **options)
    with pytest.raises(ValueError, match=f"anchorprune: .*{words}"):
        start(model, 16, **options)


def test_a_consumer_of_encoder_outputs_has_a_language_model(model: Path) -> None:
    start(model, 16, ec_transfer_config=ECTransferConfig(**CONSUMER))


def test_the_rust_front_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    start(model, None)
    with pytest.raises(ValueError, match=r"Rust front end .*unset VLLM_USE_RUST_FRONTEND"):
        start(model, 16)


class Without:
    """Settings of vLLM without some of them, as a newer vLLM may have them."""

    def __init__(self, settings: object, *gone: str) -> None:
        self.__dict__ = {k: v for k, v in vars(settings).items() if k not in gone}


def test_a_vllm_without_what_is_only_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(
        model=str(model), hf_overrides={"anchorprune": {"budget": 16}}, disable_log_stats=True
    )
    model_config = args.create_model_config()
    monkeypatch.delitem(envs.environment_variables, "VLLM_USE_RUST_FRONTEND")
    newer: Any = Without(
        args,
        *("mm_encoder_only", "enable_tower_connector_lora", "ec_transfer_config"),
        *("prefill_context_parallel_size", "decode_context_parallel_size", "enable_prompt_embeds"),
    )
    newer.enable_lora = True
    newer.compilation_config = Without(args.compilation_config, "compile_mm_encoder")
    monkeypatch.setattr(
        model_config,
        "multimodal_config",
        Without(model_config.multimodal_config, "video_pruning_rate"),
    )
    prepare_model(newer, model_config)


def test_a_missing_hook_is_named_before_anything_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hook, "is_there", lambda hook: False)
    with pytest.raises(HookGone):
        start(model, 16, mm_encoder_only=True)
