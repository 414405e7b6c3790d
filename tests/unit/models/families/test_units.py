# SPDX-License-Identifier: Apache-2.0
"""How the general adapter counts the units of items of which no family tells anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.models.general.media_batch import GeneralMedia
from anchorprune_vllm.models.general.processor import pruning_processor
from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.models.general.tower_signals import TowerSignals
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout


def units_of(tokens: int, modality: str = "image", **fields: list[Any]) -> MediaTokens:
    item: Any = {name: SimpleNamespace(data=torch.tensor(value)) for name, value in fields.items()}
    return Family.units(None, modality, item, PromptLayout.of([1] * tokens))


def test_units(subtests: pytest.Subtests) -> None:
    for units, expected in (
        (units_of(144), MediaTokens(144, (144,), (12,))),
        (units_of(24), MediaTokens(24, (24,), (24,))),
        (units_of(24, image_grid_thw=[1, 8, 12]), MediaTokens(24, (24,), (6,))),
        (units_of(144, image_grid_hws=[18, 32]), MediaTokens(144, (144,), (16,))),
        (
            units_of(48, "video", video_grid_thw=[2, 8, 12]),
            MediaTokens(48, (24, 24), (6, 6)),
        ),
        # A grid for each part of a video, and frames of which two become one: no grid of the item.
        (
            units_of(36, "video", video_grid_thw=[[1, 6, 8], [1, 6, 8]]),
            MediaTokens(36, (36,), (6,)),
        ),
        (units_of(18, "video", video_grid_thw=[4, 6, 6]), MediaTokens(18, (18,), (18,))),
    ):
        with subtests.test(units=units):
            assert units == expected
            assert units.candidates == units.unpruned


class Info:
    def __init__(self, *modalities: str) -> None:
        self.supported_mm_limits = dict.fromkeys(modalities)
        self.ctx = SimpleNamespace(model_config=SimpleNamespace(architecture="KimiK25"))

    def get_hf_config(self) -> None:
        return None


class Plain:
    """vLLM's processor, as far as it is needed."""

    def __init__(self, info: Info) -> None:
        self.info = info


class Lossy(Family):
    """It counts a candidate too few."""

    @classmethod
    def units(cls, *args: Any) -> MediaTokens:
        tokens = super().units(*args)
        return tokens._replace(unit_sizes=(tokens.unpruned - 1,))


def processor_of(family: type, *modalities: str) -> Any:
    kind: Any = pruning_processor(Plain, family, "compact")
    with (
        patch("anchorprune_vllm.api.processor.PruningProcessor.__init__", Plain.__init__),
        patch.object(kind, "__abstractmethods__", frozenset()),
    ):
        return kind(Info(*modalities))


def test_units_that_do_not_add_up_are_refused() -> None:
    layout = PromptLayout.of([1] * 16)
    item: Any = {}
    assert processor_of(Family, "image")._count_tokens("image", item, layout).candidates == 16
    with pytest.raises(ValueError, match="image have 15 candidates, and 16 are found"):
        processor_of(Lossy, "image")._count_tokens("image", item, layout)


def test_a_model_that_takes_its_images_by_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="KimiK25 takes vision_chunk, and neither images"):
        processor_of(Family, "vision_chunk")


class Unread:
    """A model whose family states nothing."""

    has_data_parallel_tower = False
    needs = frozenset({"importance"})

    def modules(self) -> list[Any]:
        return []

    def tower_attention(self) -> None:
        return None

    object_attention = tower_attention


def test_a_guessed_grid_is_relied_on_for_the_size_by_which_the_order_was_found() -> None:
    tower = TowerSignals(Unread())  # type: ignore[arg-type]
    tower.order, tower._sizes = TowerOrder("unit", "none", "raster", 4), {256}
    square, other = MediaTokens(256, (256,), (16,)), MediaTokens(144, (144,), (12,))
    assert tower._has_grids([square])
    assert not tower._has_grids([other])
    tower.is_stated = True
    assert tower._has_grids([other])


def test_an_item_is_encoded_alone_where_nothing_is_stated() -> None:
    calls: list[list[int]] = []
    batch = object.__new__(GeneralMedia)
    tower = SimpleNamespace(needed=frozenset({"importance"}), is_stated=False)
    batch._model = SimpleNamespace(tower_signals=tower)  # type: ignore[assignment]
    with patch.object(GeneralMedia, "_encode", lambda self, items: calls.append(items) or items):
        for is_stated in (False, True):
            tower.is_stated = is_stated
            assert batch.encode([0, 1, 2]) == [0, 1, 2]  # type: ignore[comparison-overlap]
    assert calls == [[0], [1], [2], [0, 1, 2]]
