# SPDX-License-Identifier: Apache-2.0
"""A new budget finds the language model compiled."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

import anchorprune_vllm
from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.testing.demo_models.make import find_text_encoder


def config_of(model: Path, **settings: Any) -> Any:
    """vLLM's whole config, as its workers get it."""
    anchorprune_vllm.register()
    text_encoder = find_text_encoder(model)
    paired = {"text_encoder": str(text_encoder)} if text_encoder else {}
    args = EngineArgs(
        model=str(model), hf_overrides={"anchorprune": {"budget": 16, **paired, **settings}}
    )
    return pickle.loads(pickle.dumps(args.create_engine_config()))


def test_what_is_decided_before_the_language_model_is_left_out(
    any_model: Path, subtests: pytest.Subtests
) -> None:
    for settings in ({"budget": 8}, {"budget": "10%"}, {"query": "last"}, {"tau": 0.3}):
        with subtests.test(settings=settings):
            default, other = config_of(any_model), config_of(any_model, **settings)
            assert other.compute_hash() == default.compute_hash()
            assert PruneConfig.of_model(other.model_config.hf_config) != PruneConfig.of_model(
                default.model_config.hf_config
            )


@pytest.mark.parametrize("settings", [{"positions": "native"}, {"feature_cache_mb": 8}])
def test_what_changes_the_graph_or_the_memory_stays(
    demo_model: Path, settings: dict[str, Any]
) -> None:
    assert config_of(demo_model, **settings).compute_hash() != config_of(demo_model).compute_hash()


def test_other_settings_of_the_model_stay(demo_model: Path) -> None:
    config = config_of(demo_model)
    copied = copy.deepcopy(config)
    assert copied.compute_hash() == config.compute_hash()
    copied.model_config.hf_config.text_config.rms_norm_eps = 0.5
    assert copied.compute_hash() != config.compute_hash()


def test_hashing_changes_nothing(demo_model: Path) -> None:
    config = config_of(demo_model)
    before = config.model_config.hf_config.to_json_string()
    config.compute_hash()
    assert config.model_config.hf_config.to_json_string() == before
    assert config.compute_hash() == config.compute_hash()
