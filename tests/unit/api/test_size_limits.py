# SPDX-License-Identifier: Apache-2.0
"""How large an image or video may be, and what is said of a larger one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from anchorprune_vllm.api.size_limits import SizeLimits
from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.plan import ItemPlan, MediaTokens


def plan(*units: int, kept: int = 4) -> ItemPlan:
    return ItemPlan(kept, MediaTokens(sum(units), units, units), (1, 1), torch.empty(0, 0))


LIMITS = SizeLimits(largest=100, method="scope", of_method=None)


def test_allowed(subtests: pytest.Subtests) -> None:
    for units in ((100,), (100, 100), (50,) * 8, (1,) * 400):
        with subtests.test(units=units):
            LIMITS.check("video", plan(*units))


def test_a_video_of_too_many_tokens() -> None:
    with pytest.raises(ValueError, match=r"this video has 402 visual tokens .* at most 400 are"):
        LIMITS.check("video", plan(*[67] * 6))


def test_an_image_or_frame_of_too_many_tokens() -> None:
    with pytest.raises(ValueError, match=r"this video has 101 visual tokens in one frame .* 100"):
        LIMITS.check("video", plan(101))
    with pytest.raises(ValueError, match=r"image has 101 visual tokens in one tile .* it smaller"):
        LIMITS.check("image", plan(101))


def test_an_image_of_too_many_tiles_has_no_frames() -> None:
    with pytest.raises(ValueError, match=r"image has 402 visual .* set aside for: send it smaller"):
        LIMITS.check("image", plan(*[67] * 6))


def test_memory_is_set_aside_for_what_a_prompt_may_hold(subtests: pytest.Subtests) -> None:
    for images, videos, largest in ((1, 1, 500), (1, 0, 100), (0, 1, 500)):
        with subtests.test(images=images, videos=videos):
            info = SimpleNamespace(
                allowed_mm_limits={"image": images, "video": videos},
                ctx=SimpleNamespace(model_config=SimpleNamespace(max_model_len=4096)),
                get_mm_max_tokens_per_item=lambda length, counts: {"image": 100, "video": 500},
            )
            limits = SizeLimits.of(SimpleNamespace(info=info), PruneConfig(budget=4))
            assert limits.largest == largest


def test_dummies_tell_where_the_model_does_not() -> None:
    info = SimpleNamespace(
        allowed_mm_limits={"image": 2, "audio": 1},
        ctx=SimpleNamespace(model_config=SimpleNamespace(max_model_len=4096)),
        get_mm_max_tokens_per_item=lambda length, counts: None,
    )
    mask = torch.tensor([False] + [True] * 70)
    made = {"mm_placeholders": {"image": [PlaceholderRange(offset=1, length=71, is_embed=mask)]}}
    processor = SimpleNamespace(info=info, get_dummy_mm_inputs=lambda counts: made)
    assert SizeLimits.of(processor, PruneConfig(budget=4)).largest == 70


def test_methods_that_take_so_many() -> None:
    limits = SizeLimits(largest=100, method="scope", of_method=150)
    limits.check("video", plan(75, 75))
    with pytest.raises(ValueError, match="151 visual tokens, and the method scope takes at most"):
        limits.check("video", plan(75, 76))
