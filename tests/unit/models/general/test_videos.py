# SPDX-License-Identifier: Apache-2.0
"""Videos through the general adapter, above all those with text between their frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.multimodal.inputs import MultiModalFeatureSpec

from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, plans_of
from tests.support.pictures import clip, picture
from tests.support.reference.selection import Tokens, normalised, select
from tests.support.towers import Attention, importance_by_hand

QUESTION = "What color is the circle?"
VIDEO, OTHER = clip(1, frames=8, size=(224, 160)), clip(2, frames=22, size=(160, 224))
"""The timestamps of the second one are not all of the same length."""
IMAGE = picture(1, (300, 200))
MERGED = TowerOrder("unit", "none", "consecutive", 4)
SHUFFLED = TowerOrder("unit", "first", "raster", 4)


class Family(NamedTuple):
    order: TowerOrder
    is_behind: bool = False
    """Whether a frame's text stands behind it, as far as it does not begin it."""
    videos: int = 2


FAMILIES = {
    "qwen3-vl": Family(MERGED),
    "qwen3-vl-moe": Family(MERGED),
    "qwen3.5": Family(MERGED),
    "qwen3.5-moe": Family(MERGED),
    "glm-4v": Family(MERGED, is_behind=True, videos=1),
    "glm-4v-moe": Family(MERGED, is_behind=True, videos=1),
    "glm-ocr": Family(MERGED, is_behind=True, videos=1),
    "internvl": Family(SHUFFLED),
    "internvl-chat": Family(SHUFFLED),
}
UNDIVIDED = ("qwen2-vl", "exaone4.5", "qwen2.5-omni")
DIVIDED = ("minicpm-v-4.6",)


class Loaded(NamedTuple):
    model: LocalModel
    family: Family
    words: np.ndarray
    """The language model's table of embeddings, as it is on the disk."""


def load(arch: str, tmp_path_factory: pytest.TempPathFactory, **options: Any) -> Loaded:
    path = tmp_path_factory.mktemp("videos") / "model"
    make_demo_model(path, arch=arch)
    weights = load_file(path / "model.safetensors")
    tables = [value for name, value in weights.items() if name.endswith("embed_tokens.weight")]
    family = FAMILIES.get(arch, Family(MERGED))
    limits = {"image": 2, "video": family.videos}
    model = LocalModel(path, max_model_len=4096, limit_mm_per_prompt=limits, **options)
    return Loaded(model, family, tables[0].double().numpy())


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(
    request: pytest.FixtureRequest, rank: None, tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    found = load(request.param, tmp_path_factory)
    found.model.embed(process(found.model, 12, VIDEO))  # the first item is looked at for order
    return found


def process(model: LocalModel, budget: int | str, *media: Any) -> Any:
    kinds = ["image" if isinstance(item, Image.Image) else "video" for item in media]
    content = [{"type": kind} for kind in kinds] + [{"type": "text", "text": QUESTION}]
    prompt = model.processor.info.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return model.process(prompt, *media, budget=budget)


class Unpruned(NamedTuple):
    """A video's part of an unpruned prompt, token by token."""

    ids: list[int]
    is_row: list[bool]
    frames: list[int | None]
    """Of each token; None: of no frame."""

    @property
    def text(self) -> list[list[int]]:
        """The places of each frame's text."""
        return [
            [i for i, frame in enumerate(self.frames) if frame == number and not self.is_row[i]]
            for number in range(max(frame for frame in self.frames if frame is not None) + 1)
        ]

    def stays(self, kept: Sequence[int]) -> list[int]:
        """Return the places that stay if so many rows are kept, by the rule for text."""
        rows = np.flatnonzero(self.is_row)[list(kept)].tolist()
        text = self.text
        room = sum(sorted(map(len, text), reverse=True)[: len(kept)])
        filled = {self.frames[place] for place in rows}
        order = sorted(range(len(text)), key=lambda frame: (frame not in filled, frame))
        outside = [i for i, frame in enumerate(self.frames) if frame is None]
        return sorted(rows + outside + [i for frame in order for i in text[frame]][:room])


def unpruned_video(loaded: Loaded, whole: Any, number: int = 0) -> Unpruned:
    """Read the frames of a video by what stands behind and before their rows."""
    place = whole["mm_placeholders"]["video"][number]
    ids = whole["prompt_token_ids"][place.offset : place.offset + place.length]
    is_row = place.is_embed.tolist()
    frames: list[int | None] = [None] * len(ids)
    firsts = [i for i, flag in enumerate(is_row) if flag and not is_row[i - 1]]
    lasts = [i for i, flag in enumerate(is_row) if flag and not is_row[i + 1]]
    # The token before the rows and the one behind them are the frame's own.
    for frame, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        if loaded.family.is_behind:
            end = firsts[frame + 1] - 1 if frame + 1 < len(firsts) else len(ids) - 1
            begin = first - 1
        else:
            begin, end = lasts[frame - 1] + 2 if frame else 0, last + 2
        frames[begin:end] = [frame] * (end - begin)
    return Unpruned(ids, is_row, frames)


def test_keeps_what_the_paper_keeps(loaded: Loaded, subtests: pytest.Subtests) -> None:
    """Anchors of each frame, stage 2 over all of them; and the text of frames."""
    model, width = loaded.model, loaded.words.shape[1]
    ids = model.processor.info.get_tokenizer().encode(QUESTION, add_special_tokens=False)
    # Fewer rows than frames lose some of the text, which is not alike in the long video.
    for video, budgets in ((VIDEO, (2, 12)), (OTHER, (2, 5, 40))):
        whole = process(model, "100%", video)
        attention = Attention(model.model)
        (rows,) = model.embed(whole)
        parts = attention.received(from_first=loaded.family.order is SHUFFLED)
        unpruned = unpruned_video(loaded, whole)
        owners = zip(unpruned.frames, unpruned.is_row, strict=True)
        units = np.array([frame for frame, flag in owners if flag])
        wide = rows.shape[1] - 9 * model.model._native_positions  # without the positions behind
        for budget in budgets:
            with subtests.test(frames=len(unpruned.text), budget=budget):
                cut = process(model, budget, video)
                (plan,) = plans_of(cut, "video")
                (found,) = model.embed(cut)
                importance = importance_by_hand(
                    parts, loaded.family.order, plan.layout, plan.tokens.grids
                )
                plain = rows[: plan.tokens.unpruned, :width]
                features = normalised(plain.double().numpy())
                relevance = (features @ normalised(loaded.words[ids]).T).max(1)
                tokens = Tokens(importance, features, features, units)
                stays = set(unpruned.stays(select(tokens, relevance, budget)))
                expected, number = [], -1
                for place, flag in enumerate(unpruned.is_row):
                    number += flag
                    if place in stays:
                        word = torch.tensor(loaded.words[unpruned.ids[place]])
                        text = torch.nn.functional.pad(word, (0, wide - width)).float()
                        expected.append(rows[number, :wide] if flag else text)
                assert torch.equal(found[:, :wide], torch.stack(expected))


def test_prompt_is_known_before_selection(loaded: Loaded, subtests: pytest.Subtests) -> None:
    """K, and the text of as many frames as may keep a token."""
    whole = process(loaded.model, "100%", OTHER)
    unpruned = unpruned_video(loaded, whole)
    (before,) = whole["mm_placeholders"]["video"]
    row = unpruned.is_row.index(True)
    for budget in (1, 5, 8, 30):
        cut = process(loaded.model, budget, OTHER)
        (place,) = cut["mm_placeholders"]["video"]
        longest = sorted((len(text) for text in unpruned.text), reverse=True)[:budget]
        length = budget + sum(longest) + unpruned.frames.count(None)
        end = place.offset + length
        with subtests.test(budget=budget):
            assert (place.offset, place.length, place.is_embed) == (before.offset, length, None)
            ids = cut["prompt_token_ids"]
            assert ids[place.offset : end] == [unpruned.ids[row]] * length
            assert ids[: place.offset] == whole["prompt_token_ids"][: before.offset]
            assert ids[end:] == whole["prompt_token_ids"][before.offset + before.length :]
            (rows,) = loaded.model.embed(cut)
            assert len(rows) == length


def test_all_tokens_are_the_models_own(loaded: Loaded) -> None:
    model: Any = loaded.model.model
    whole = process(loaded.model, "100%", VIDEO)
    tokens = plans_of(whole, "video")[0].tokens.unpruned
    for budget in (tokens, 5000):
        given = process(loaded.model, budget, VIDEO)
        assert given["prompt_token_ids"] == whole["prompt_token_ids"]
        (rows,) = loaded.model.embed(given)
        ((_, kwargs),) = loaded.model.batches(given)
        plain = {name: value for name, value in kwargs.items() if "anchorprune" not in name}
        with torch.inference_mode():
            (own,) = model.embed_unpruned(**plain)
        assert torch.equal(rows[:, : own.shape[1]], own)


def test_native_positions_are_the_unpruned_ones(loaded: Loaded) -> None:
    """Number by number, for an image and videos: text in the prompt and in videos, and rows."""
    model: Any = loaded.model.model
    if not model.has_mrope:
        assert not model._native_positions
        return
    media = (IMAGE, VIDEO, OTHER)[: 1 + loaded.family.videos]
    whole = process(loaded.model, "100%", *media)
    full, delta = unpruned_positions(loaded.model, whole)
    end = len(whole["prompt_token_ids"]) + delta
    for budget in (5, 12, 40):
        cut = process(loaded.model, budget, *media)
        ids = cut["prompt_token_ids"]
        rows, plain = loaded.model.embed(cut), loaded.model.embed(whole)
        positions, given = model.get_mrope_input_positions(ids, features_of(cut))
        assert len(ids) + given == end
        cleaned, placed, delta = model.recompute_mrope_positions(ids, rows, positions, 0)
        assert len(ids) + delta == end

        expected, at = [], 0
        places = [
            (kind, number, place)
            for kind, found in whole["mm_placeholders"].items()
            for number, place in enumerate(found)
        ]
        for (kind, number, before), part, other in zip(places, cleaned, plain, strict=True):
            stays = [find(row, other[:, : part.shape[1]]) for row in part]
            if kind == "video":
                kept = [row for row in stays if row is not None]
                stays = unpruned_video(loaded, whole, number).stays(kept)
            expected.append(full[:, at : before.offset])
            expected.append(full[:, before.offset : before.offset + before.length][:, stays])
            at = before.offset + before.length
        expected.append(full[:, at:])
        assert placed[:, : len(ids)].tolist() == torch.cat(expected, dim=1).tolist()


def find(row: Tensor, rows: Tensor) -> int | None:
    """Return which of some rows a row is; None: it is text."""
    found = (rows == row).all(1).nonzero()
    return int(found[0]) if len(found) else None


def test_positions_are_placed_for_any_chunk(loaded: Loaded) -> None:
    """A prompt may be cut anywhere inside of a video, and start again."""
    model: Any = loaded.model.model
    if not model.has_mrope:
        return
    cut = process(loaded.model, 6, VIDEO)
    ids, (place,) = cut["prompt_token_ids"], cut["mm_placeholders"]["video"]
    (rows,) = loaded.model.embed(cut)
    laid_out, _ = model.get_mrope_input_positions(ids, features_of(cut))
    _, at_once, _ = model.recompute_mrope_positions(ids, [rows], laid_out.clone(), 0)
    step, positions = 7, laid_out.clone()
    for start in range(0, len(ids), step):
        part = rows[max(0, start - place.offset) : max(0, start + step - place.offset)]
        _, positions, _ = model.recompute_mrope_positions(
            ids, [part] if len(part) else [], positions, start
        )
    assert torch.equal(positions, at_once)


def test_rotary_embeddings_go_as_far_as_positions_may(loaded: Loaded) -> None:
    """Native positions may be higher than a pruned prompt is long, as in vLLM's own pruning."""
    rotary = [m for m in loaded.model.model.modules() if isinstance(m, MRotaryEmbedding)]
    assert bool(rotary) == loaded.model.model.has_mrope
    text = loaded.model.config.model_config.hf_text_config
    for module in rotary:
        assert len(module.cos_sin_cache) == 4 * text.max_position_embeddings


@pytest.mark.parametrize("arch", UNDIVIDED)
def test_videos_without_text(
    arch: str, rank: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The whole video has one budget, and each frame its anchors."""
    model = load(arch, tmp_path_factory).model
    whole, cut = process(model, "100%", VIDEO), process(model, 12, VIDEO)
    (plan,) = plans_of(cut, "video")
    assert len(plan.tokens.grids) == 4
    assert not plan.moves_text
    assert plan.shares == [12]
    (rows,), (plain,) = model.embed(cut), model.embed(whole)
    assert len(rows) == 12
    kept = [find(row, plain) for row in rows]  # positions behind them are the same, too
    assert None not in kept
    shorter = len(whole["prompt_token_ids"]) - len(cut["prompt_token_ids"])
    assert shorter == plan.tokens.unpruned - 12


@pytest.mark.parametrize("arch", DIVIDED)
def test_videos_whose_text_stays_in_the_prompt(
    arch: str, rank: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each frame has its share, as for tags of tiles."""
    model = load(arch, tmp_path_factory).model
    whole, cut = process(model, "100%", VIDEO), process(model, 12, VIDEO)
    (plan,) = plans_of(cut, "video")
    assert not plan.moves_text
    assert plan.shares == [2, 2, 2, 2, 1, 1, 1, 1]
    (place,), (before,) = (each["mm_placeholders"]["video"] for each in (cut, whole))
    assert place.get_num_embeds() == 12
    assert before.length - place.length == plan.tokens.unpruned - 12
    (rows,), (plain,) = model.embed(cut), model.embed(whole)
    frames = [find(row, plain) // plain.shape[0] for row in rows]  # type: ignore[operator]
    assert len(frames) == 12


def features_of(processed: Any) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(item, kind, "", place)
        for kind, items in processed["mm_kwargs"].items()
        for item, place in zip(items, processed["mm_placeholders"][kind], strict=True)
    ]


def unpruned_positions(local: LocalModel, processed: Any) -> tuple[Tensor, int]:
    """What vLLM's own class makes of the prompt."""
    base: Any = next(c for c in type(local.model).__mro__ if c.__module__.startswith("vllm."))
    return base.get_mrope_input_positions(
        local.model, processed["prompt_token_ids"], features_of(processed)
    )
