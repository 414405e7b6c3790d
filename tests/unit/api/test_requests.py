# SPDX-License-Identifier: Apache-2.0
"""Keys of `mm_processor_kwargs`: what is meant for us is read or refused, never passed over."""

from __future__ import annotations

import pytest

from anchorprune_vllm.api.requests import check_request_keys
from anchorprune_vllm.config import resembles_config_key

# Of the HF processors that vLLM knows, as of transformers 5.
OTHERS = ("size", "crop_size", "min_pixels", "max_pixels", "fps", "num_frames", "images_kwargs")


def test_what_is_meant_for_us(subtests: pytest.Subtests) -> None:
    for key in (
        *("anchor_prune", "anchor-prune", "AnchorPrune", "anchorPrune", "anchorpruning"),
        *("anchorprun", "anchoprune", "ancorprune", "anchor prune", "anchorprune-vllm"),
        "anchorprune_budget",
        *("budget", "query", "video_budget", "tau", "method", "method_options"),
        *("bugdet", "budgets", "querys", "qurey"),
    ):
        words = rf"unknown key '{key}' in mm_processor_kwargs; .*budget"
        with subtests.test(key=key), pytest.raises(ValueError, match=words):
            check_request_keys(["size", key], known=lambda: {"size"})


def test_what_is_not(subtests: pytest.Subtests) -> None:
    for key in (*OTHERS, "anchor", "anchors", "anchor_boxes", "prune", "unknown"):
        with subtests.test(key=key):
            check_request_keys([key], known=set)


def test_what_the_hf_processor_takes() -> None:
    check_request_keys(["anchorprune", "query", "anchor_prune"], lambda: {"query", "anchor_prune"})


def test_the_hf_processor_is_asked_only_if_needed() -> None:
    def fail() -> set[str]:
        raise AssertionError("not needed")

    check_request_keys(["anchorprune", *OTHERS], known=fail)


def test_the_exact_name_resembles_itself() -> None:
    assert resembles_config_key("anchorprune")
