# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from anchorprune_vllm import PruneConfig
from anchorprune_vllm.budget import Budget


def test_dictionary_and_back() -> None:
    settings = {"budget": "10%", "video_budget": 256, "tau": 0.3, "text_encoder": "a/b"}
    config = PruneConfig.from_dict(settings)
    assert config.budget == Budget.parse("10%")
    assert config.video_budget == Budget.parse(256)
    written = json.loads(json.dumps(config.to_dict()))
    assert PruneConfig.from_dict(written) == config


def test_off_without_settings() -> None:
    assert PruneConfig.of_model(SimpleNamespace()) is None
    assert PruneConfig.of_model(SimpleNamespace(anchorprune=None)) is None
    assert PruneConfig.of_model(SimpleNamespace(anchorprune={"budget": 8})) == PruneConfig(8)


def test_video_budget_is_for_videos_alone() -> None:
    config = PruneConfig.from_dict({"budget": 64, "video_budget": 256})
    assert str(config.budget_for("image")) == "64"
    assert str(config.budget_for("video")) == "256"
    assert str(PruneConfig(64).budget_for("video")) == "64"


def test_fingerprint(subtests: pytest.Subtests) -> None:
    for change, same in (
        ({"tau": 0.3}, False),
        ({"patience": 4}, False),
        ({"min_anchor": 2}, False),
        ({"max_anchor_ratio": 0.4}, False),
        ({"text_encoder": "a/b"}, False),
        # These are in an item's identity by themselves, or change no token.
        ({"budget": 32}, True),
        ({"query": "last"}, True),
        ({"feature_cache_mb": 1}, True),
        ({"pixel_cache_mb": 1}, True),
        ({"level": "full"}, True),
    ):
        with subtests.test(change=change, same=same):
            base = {"budget": 64}
            fingerprints = {
                PruneConfig.from_dict(s).fingerprint() for s in (base, {**base, **change})
            }
            assert (len(fingerprints) == 1) == same


def test_refusals(subtests: pytest.Subtests) -> None:
    for settings, words in (
        ({}, 'settings need a budget, such as {"budget": 64}'),
        ("64", "settings must be a dictionary"),
        ({"budget": 0}, "Budget 0 is not allowed"),
        ({"budget": 8, "method": "magic"}, "method must be one of anchorprune, visionzip, "),
        ({"budget": 8, "query": "words"}, "query must be one of turn, last, all, none, got"),
        ({"budget": 8, "taus": 1}, "unknown setting 'taus' (did you mean 'tau'?); allowed: budget"),
        ({"budget": 8, "tau": -0.1}, "tau must be a number from 0 to 2, got -0.1"),
        ({"budget": 8, "tau": float("nan")}, "tau must be a number from 0 to 2, got nan"),
        ({"budget": 8, "tau": True}, "tau must be a number from 0 to 2, got True"),
        ({"budget": 8, "patience": 0}, "patience must be a whole number of at least 1, got 0"),
        ({"budget": 8, "patience": 1.5}, "patience must be a whole number of at least 1, got 1.5"),
        ({"budget": 8, "min_anchor": 0}, "min_anchor must be a whole number of at least 1"),
        ({"budget": 8, "max_anchor_ratio": 1.1}, "max_anchor_ratio must be a number above 0"),
        ({"budget": 8, "max_anchor_ratio": 0}, "max_anchor_ratio must be a number above 0 and up"),
        ({"budget": 8, "feature_cache_mb": -1}, "feature_cache_mb must be a whole number of at"),
        ({"budget": 8, "level": "half"}, "level must be one of any, full, got 'half'"),
        ({"budget": 8, "text_encoder": ""}, "text_encoder must be a hub id or a local path"),
    ):
        with subtests.test(settings=settings):
            with pytest.raises(ValueError) as error:  # noqa: PT011
                PruneConfig.from_dict(settings)  # type: ignore[arg-type]
            assert words in str(error.value)
            assert "\n" not in str(error.value)
