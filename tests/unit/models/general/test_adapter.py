# SPDX-License-Identifier: Apache-2.0
"""The general adapter, on tiny models: what families state, and what it finds out by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from mistral_common.protocol.instruct.messages import ImageChunk, TextChunk, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.tokenizers.mistral import MistralTokenizer

from anchorprune_vllm.models.general.adapter import LinearGeneralModel
from anchorprune_vllm.models.general.tower_order import TowerOrder, possible_orders, probe
from anchorprune_vllm.models.general.tower_signals import TowerSignals
from anchorprune_vllm.plan import ItemPlan
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, plans_of
from tests.support.pictures import picture
from tests.support.reference.selection import Tokens, largest_remainder, normalised, select
from tests.support.towers import Attention, importance_by_hand

QUESTION = "What color is the circle?"
SMALL, LARGE = picture(1, (300, 200)), picture(2, (700, 500))


class Family(NamedTuple):
    """What is known of a family from its papers and code: stated, and here found out as well."""

    order: TowerOrder
    is_divided: bool = False
    """Whether text stands between parts of a large image."""
    has_class_attention: bool = False
    """Whether importance is what the class token attends to."""
    is_padded: bool = False
    """Whether the tower gets padding behind the patches of an image."""


MERGED = TowerOrder("unit", "none", "consecutive", 4)
WINDOWED = TowerOrder("unit", "none", "consecutive", 4, window=4)
POOLED = TowerOrder("unit", "none", "raster", 4)
WITH_CLASS_TOKEN = TowerOrder("unit", "first", "raster", 4)
FAMILIES = {
    "qwen3-vl": Family(MERGED),
    "qwen3-vl-moe": Family(MERGED),
    "qwen3.5": Family(MERGED),
    "qwen3.5-moe": Family(MERGED),
    "qwen2-vl": Family(MERGED),
    "qwen2.5-omni": Family(WINDOWED),
    "exaone4.5": Family(WINDOWED),
    "muse-glimmer": Family(TowerOrder("unit", "none", "raster", 4, window=8)),
    "glm-4v": Family(MERGED),
    "glm-4v-moe": Family(MERGED),
    "glm-ocr": Family(MERGED),
    "gemma3": Family(POOLED),
    "gemma4": Family(TowerOrder("unit", "none", "raster", 9), is_padded=True),
    "mistral3": Family(POOLED),
    "lightonocr": Family(POOLED),
    "lfm2-vl": Family(POOLED, is_divided=True),
    "pixtral": Family(TowerOrder("unit", "none", "raster", 1)),
    "idefics3": Family(POOLED, is_divided=True),
    "smolvlm": Family(POOLED, is_divided=True),
    "llama4": Family(TowerOrder("unit", "last", "raster", 4), is_divided=True),
    "internvl": Family(WITH_CLASS_TOKEN, has_class_attention=True),
    "internvl-chat": Family(WITH_CLASS_TOKEN, has_class_attention=True),
}


class Loaded(NamedTuple):
    model: LocalModel
    family: Family
    words: np.ndarray
    """The language model's table of embeddings, as it is on the disk."""


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(
    request: pytest.FixtureRequest, rank: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    path = tmp_path_factory.mktemp("general") / "model"
    make_demo_model(path, arch=request.param)
    (file,) = path.glob("*.safetensors")
    names = ("embed_tokens.weight", "tok_embeddings.weight")
    (table,) = (value for name, value in load_file(file).items() if name.endswith(names))
    formats = ("tokenizer_mode", "config_format", "load_format")
    model = LocalModel(
        path,
        max_model_len=2048,
        limit_mm_per_prompt={"image": 4, "video": 0},
        **dict.fromkeys(formats, "mistral") if request.param == "pixtral" else {},
    )
    # Gemma 4 asks how much memory a device has left, and there is none.
    free = patch("torch.accelerator.get_memory_info", lambda: (2**30, 2**32))
    with free:
        yield Loaded(model, FAMILIES[request.param], table.double().numpy())


def prompt_of(model: LocalModel, images: Sequence[Image.Image]) -> str | list[int]:
    tokenizer = model.processor.info.get_tokenizer()
    if isinstance(tokenizer, MistralTokenizer):
        parts = [*(ImageChunk(image=image) for image in images), TextChunk(text=QUESTION)]
        chat = ChatCompletionRequest(messages=[UserMessage(content=parts)])
        return tokenizer.mistral.encode_chat_completion(chat).tokens
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": QUESTION}]
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )


def process(model: LocalModel, budget: int | str, *images: Image.Image) -> Any:
    return model.process(prompt_of(model, images), *images, budget=budget)


def test_order_of_the_tower_is_found_as_it_is_stated(loaded: Loaded) -> None:
    model: Any = loaded.model.model
    processed = process(loaded.model, 12, SMALL)
    loaded.model.embed(processed)
    assert model.tower_signals.order == loaded.family.order

    whole = process(loaded.model, "100%", SMALL)
    (plan,) = plans_of(whole)
    media = [plan.tokens]

    def run() -> Tensor:
        return loaded.model.embed(whole)[0]

    if loaded.family.is_padded:  # then the sizes of its parts cannot be counted
        orders = possible_orders(media, loaded.family.order.segments(media))
        found = probe(orders, media, model.tower_attention(), run)
    else:
        looking = TowerSignals(model)
        with patch.object(type(model), "tower_order", lambda self, ratio: None):
            looking.learn(media, run)
        found = looking.order
    assert found is not None
    assert found.segments(media) == loaded.family.order.segments(media)
    assert torch.equal(found.groups(media), loaded.family.order.groups(media))


def test_keeps_what_the_paper_keeps(loaded: Loaded, subtests: pytest.Subtests) -> None:
    """Each size, and each kind of budget; large images are divided by some families."""
    model, width = loaded.model, loaded.words.shape[1]
    ids = model.processor.info.get_tokenizer().encode(QUESTION, add_special_tokens=False)
    for image, budgets in ((SMALL, (5, "25%")), (LARGE, (12,))):
        whole = process(model, "100%", image)
        attention = Attention(model.model)
        (rows,) = model.embed(whole)
        parts = attention.received(loaded.family.has_class_attention)
        features = normalised(rows[:, :width].double().numpy())
        relevance = (features @ normalised(loaded.words[ids]).T).max(1)
        for budget in budgets:
            with subtests.test(size=image.size, budget=budget):
                (plan,) = plans_of(process(model, budget, image))
                (kept_rows,) = model.embed(process(model, budget, image))
                importance = importance_by_hand(
                    parts, loaded.family.order, plan.layout, plan.tokens.grids
                )
                kept = kept_by_hand(plan, importance, features, relevance)
                assert len(kept) == plan.kept
                assert torch.equal(kept_rows[:, :width], rows[kept, :width])


def kept_by_hand(
    plan: ItemPlan, importance: np.ndarray, features: np.ndarray, relevance: np.ndarray
) -> list[int]:
    """Return the tokens to keep: each part of a divided image has its share of the budget."""
    sizes = plan.layout.unit_sizes
    shares = largest_remainder(plan.kept, list(sizes)) if len(sizes) > 1 else [plan.kept]
    kept, start = [], 0
    for size, share in zip(sizes, shares, strict=True):
        part = slice(start, start + size)
        units = plan.units.numpy() if plan.units is not None and len(sizes) == 1 else None
        tokens = Tokens(
            importance[part],
            features[part],
            features[part],
            np.zeros(size, int) if units is None else units,
        )
        kept += [start + i for i in (select(tokens, relevance[part], share) if share else [])]
        start += size
    return kept


def test_images_of_one_call_are_pruned_as_each_alone(loaded: Loaded) -> None:
    """Whatever their sizes, and whatever order the tower takes them in."""
    model = loaded.model
    images = [LARGE, SMALL, LARGE.resize((200, 700)), SMALL]
    alone = [model.embed(process(model, 7, image))[0] for image in images]
    for rows, expected in zip(model.embed(process(model, 7, *images)), alone, strict=True):
        assert torch.allclose(rows, expected, atol=1e-4)


def test_prompt_holds_what_is_kept_and_all_text(loaded: Loaded) -> None:
    model = loaded.model
    whole = process(model, "100%", SMALL, LARGE)
    plans = plans_of(whole)
    if loaded.family.is_divided:
        assert len(plans[1].layout.unit_sizes) > 1
    cut = process(model, 12, SMALL, LARGE)
    rows = model.embed(cut)
    places = cut["mm_placeholders"]["image"]
    assert [place.get_num_embeds() for place in places] == [len(part) for part in rows] == [12, 12]
    embedded = {
        token
        for plan in plans
        for token, flag in zip(plan.layout.tokens(), plan.layout.is_embedding(), strict=True)
        if flag
    }
    breaks = {
        token for plan in plans if plan.layout.is_in_rows for token in plan.layout.tokens()[:-1]
    }
    text = [
        [token for token in out["prompt_token_ids"] if token not in embedded | breaks]
        for out in (whole, cut)
    ]
    assert text[0] == text[1]


def test_native_positions_are_the_unpruned_ones(loaded: Loaded) -> None:
    """Of M-RoPE models, number by number: text, kept tokens, and where the answer begins."""
    model: Any = loaded.model.model
    if not model.has_mrope:
        assert not model._native_positions
        return
    whole = process(loaded.model, "100%", SMALL, LARGE)
    full, delta = unpruned_positions(loaded.model, whole)
    end = len(whole["prompt_token_ids"]) + delta

    cut = process(loaded.model, 7, SMALL, LARGE)
    ids, places = cut["prompt_token_ids"], cut["mm_placeholders"]["image"]
    rows = loaded.model.embed(cut)
    plain = loaded.model.embed(whole)
    positions, given = model.get_mrope_input_positions(ids, features_of(cut))
    assert len(ids) + given == end
    cleaned, placed, delta = model.recompute_mrope_positions(ids, rows, positions, 0)
    assert len(ids) + delta == end

    expected, at = [], 0
    for part, other, place, before in zip(
        cleaned, plain, places, whole["mm_placeholders"]["image"], strict=True
    ):
        expected.append(full[:, at : before.offset])
        width = part.shape[1]
        kept = [int((other[:, :width] == row).all(1).nonzero()[0]) for row in part]
        expected.append(full[:, before.offset : before.offset + before.length][:, kept])
        at = before.offset + before.length
        assert place.length == len(part)
    expected.append(full[:, at:])
    assert placed[:, : len(ids)].tolist() == torch.cat(expected, dim=1).tolist()


def test_items_whose_attention_cannot_be_read(
    rank: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """MiniCPM-V's order is found with a square slice; others are padded, or of unknown grids."""
    path = tmp_path_factory.mktemp("unread") / "model"
    make_demo_model(path, arch="minicpm-v-4.6")
    local = LocalModel(path, dtype="bfloat16")
    square = process(local, 12, picture(1, (224, 224)))
    local.embed(square)
    model: Any = local.model
    assert model.tower_signals.order == POOLED
    with model.tower_signals.tapped() as take:
        pass  # as for padded slices, which do not go through vLLM's attention module
    assert take([plan.tokens for plan in plans_of(square)]) is None
    for size in ((300, 300), (300, 200)):
        (kept,) = local.embed(process(local, 12, picture(1, size)))
        with patch.object(model.tower_signals, "order", None):
            local.model.reset_encoder_cache()
            (at_the_reduced_level,) = local.embed(process(local, 12, picture(1, size)))
        assert torch.equal(kept, at_the_reduced_level)


def test_ordinary_positions_of_a_class_with_mrope(
    rank: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """EXAONE's is a subclass of Qwen2.5-VL's; also with the channels that native positions need."""
    path = tmp_path_factory.mktemp("ordinary") / "model"
    make_demo_model(path, arch="exaone4.5")
    for positions in ("compact", "native"):
        local = LocalModel(path, settings={"positions": positions})
        model: Any = local.model
        assert isinstance(model, LinearGeneralModel)
        assert not model.has_mrope
        assert model._native_positions == (positions == "native")
    ids, carried = process(local, 7, SMALL)["prompt_token_ids"], process(local, 7, SMALL)
    positions, delta = model.get_mrope_input_positions(ids, features_of(carried))
    _, placed, _ = model.recompute_mrope_positions(ids, local.embed(carried), positions, 0)
    whole = process(local, "100%", SMALL)["prompt_token_ids"]
    assert len(ids) + delta == len(whole)
    assert placed[0].tolist() == sorted({*placed[0].tolist()})
    assert placed[0, -1] == len(whole) - 1


def test_sound_beside_an_image_is_placed_too(
    rank: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("sound") / "model"
    make_demo_model(path, arch="qwen2.5-omni")
    local = LocalModel(path)
    model: Any = local.model
    tone = np.sin(np.arange(16000) / 20).astype(np.float32)
    data = local.processor.info.parse_mm_data({"image": [SMALL], "audio": [(tone, 16000)]})
    laid_out = {}
    for budget in ("100%", 7):
        kwargs = {"anchorprune": {"budget": budget}}
        prompt = f"<|IMAGE|>{QUESTION}<|AUDIO|>What is heard?"
        processed = local.processor(prompt, data, hf_processor_mm_kwargs=kwargs)
        features = features_of(processed, "image", "audio")
        rows = [row for feature in features for row in embed(local, feature)]
        ids = processed["prompt_token_ids"]
        positions, delta = model.get_mrope_input_positions(ids, features)
        _, placed, _ = model.recompute_mrope_positions(ids, rows, positions, 0)
        laid_out[budget] = placed[:, : len(ids)], len(ids) + delta
        if budget == "100%":
            full, own_delta = unpruned_positions(local, processed, "image", "audio")
            assert laid_out[budget][0].tolist() == full.tolist()
            assert len(ids) + own_delta == laid_out[budget][1]
    (full, end), (few, same_end) = laid_out.values()
    assert same_end == end
    behind = few.shape[1] - 7
    assert few[:, 7:].tolist() == full[:, -behind:].tolist()


def embed(local: LocalModel, feature: MultiModalFeatureSpec) -> Sequence[Tensor]:
    """Return the rows of one item."""
    ((_, _, kwargs),) = group_and_batch_mm_kwargs([(feature.modality, feature.data)])
    with torch.inference_mode():
        return local.model.embed_multimodal(**kwargs)


def features_of(processed: Any, *modalities: str) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(item, modality, "", place)
        for modality in modalities or ("image",)
        for item, place in zip(
            processed["mm_kwargs"][modality], processed["mm_placeholders"][modality], strict=True
        )
    ]


def unpruned_positions(local: LocalModel, processed: Any, *modalities: str) -> tuple[Tensor, int]:
    """What vLLM's own class makes of the prompt."""
    base: Any = next(c for c in type(local.model).__mro__ if c.__module__.startswith("vllm."))
    return base.get_mrope_input_positions(
        local.model, processed["prompt_token_ids"], features_of(processed, *modalities)
    )
