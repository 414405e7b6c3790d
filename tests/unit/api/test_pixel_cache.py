# SPDX-License-Identifier: Apache-2.0
"""A known picture is not prepared again for a new question, and comes out the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BatchFeature
from vllm.multimodal.processing import InputProcessingContext

from anchorprune_vllm.api.pixel_cache import PixelCache, joined
from tests.support.dialects import in_dialect, prompt_of
from tests.support.pictures import clip, picture
from tests.unit.api.test_processor import ask, make, process


class TestPixelCache:
    @staticmethod
    def output(size: int) -> BatchFeature:
        return BatchFeature({"pixels": torch.zeros(size, dtype=torch.uint8)})

    def test_the_least_recently_used_goes_first(self) -> None:
        cache, made = PixelCache(10), []

        def get(key: str) -> None:
            def process() -> BatchFeature:
                made.append(key)
                return self.output(4)

            cache.get(key, process)

        for key in "abacab":
            get(key)
        assert made == ["a", "b", "c", "b"]

    def test_what_is_too_large_is_not_kept(self) -> None:
        cache = PixelCache(10)
        small, large = self.output(10), self.output(11)
        assert cache.get("small", lambda: small) is small
        assert cache.get("large", lambda: large) is large
        assert cache.get("small", lambda: large) is small
        assert cache.get("large", lambda: small) is small

    def test_what_is_on_a_device_is_not_kept(self) -> None:
        cache = PixelCache(10)
        there = BatchFeature({"pixels": torch.zeros(4, dtype=torch.uint8, device="meta")})
        here = self.output(4)
        assert cache.get("image", lambda: there) is there
        assert cache.get("image", lambda: here) is here


def test_joined_outputs() -> None:
    one = BatchFeature({"same": torch.zeros(1, 2), "unlike": torch.zeros(1, 3), "list": [1]})
    two = BatchFeature({"same": torch.ones(2, 2), "unlike": torch.ones(1, 4), "list": [2]})
    found = joined([one, two, BatchFeature({"other": torch.ones(1)})])
    assert found["same"].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert [row.tolist() for row in found["unlike"]] == [[0, 0, 0], [1, 1, 1, 1]]
    assert found["list"] == [1, 2]
    assert found["other"].tolist() == [1]


def outputs(out: Any, modality: str = "image") -> list[dict[str, Any]]:
    return [
        {name: torch.as_tensor(field.data).tolist() for name, field in item.items()}
        for item in out["mm_kwargs"][modality]
    ]


def test_a_new_question_does_not_prepare_the_picture_again(
    any_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = make(any_model)
    prepared = []
    plain = InputProcessingContext.call_hf_processor

    def call(self: Any, hf_processor: Any, data: Any, kwargs: Any, **more: Any) -> Any:
        prepared.append(data)
        return plain(self, hf_processor, data, kwargs, **more)

    monkeypatch.setattr(InputProcessingContext, "call_hf_processor", call)
    both = f"{ask('Why?')} A dog. USER: <image>\nWho? ASSISTANT:"
    first = process(processor, ask("Why?"), picture(1, (300, 200)), cached=True)
    assert len(prepared) == 1
    again = process(processor, ask("Where?"), picture(1, (300, 200)), cached=True)
    process(processor, ask("Where?"), picture(1, (300, 200)), override={"budget": 5}, cached=True)
    assert len(prepared) == 1
    assert again["mm_hashes"] != first["mm_hashes"]
    process(processor, both, picture(1, (300, 200)), picture(2, (90, 400)), cached=True)
    assert len(prepared) == 2

    forgetful = make(any_model, pixel_cache_mb=0)
    for question in ("Why?", "Where?"):
        process(forgetful, ask(question), picture(1, (300, 200)), cached=True)
    assert len(prepared) == 4


def test_known_and_new_pictures_together(any_model: Path) -> None:
    """Of unlike sizes, as an engine without pixels in memory gives them."""
    sizes = [(300, 200), (90, 400), (168, 168)]
    prompt = prompt_of("Why?", images=len(sizes))
    images = [picture(seed, size) for seed, size in enumerate(sizes)]
    processor = make(any_model)
    process(processor, ask("Who?"), images[1])
    mixed = process(processor, prompt, *images)
    for image, item in zip(images, outputs(mixed), strict=True):
        alone = process(make(any_model), ask("Why?"), image)
        assert item == outputs(alone)[0]
    # A second time all of them are known.
    assert outputs(process(processor, prompt, *images)) == outputs(mixed)


@pytest.mark.parametrize("arch", ["qwen2.5-vl", "llava-onevision", "llava-video"])
def test_videos_and_images_together(demo_models: Any, arch: str) -> None:
    model = demo_models(arch)

    def processed(processor: Any, question: str) -> Any:
        return processor(
            in_dialect(prompt_of(question, images=1, videos=2), processor.info.get_tokenizer()),
            processor.info.parse_mm_data(
                {"image": [picture(1)], "video": [clip(2, frames=6), clip(3, frames=4)]}
            ),
        )

    known = make(model)
    processed(known, "Who?")
    again, fresh = processed(known, "Why?"), processed(make(model, pixel_cache_mb=0), "Why?")
    for modality in ("image", "video"):
        assert outputs(again, modality) == outputs(fresh, modality)


def test_a_uuid_that_names_another_picture_later(any_model: Path) -> None:
    processor = make(any_model)
    process(processor, ask("Why?"), picture(1, (600, 500)), uuids=["mine"])
    later = process(processor, ask("Who?"), picture(2, (336, 336)), uuids=["mine"])
    fresh = process(make(any_model), ask("Who?"), picture(2, (336, 336)), uuids=["mine"])
    assert outputs(later) == outputs(fresh)
