# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL in vLLM's own classes, without an engine."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.worker.gpu.model_states.mm_pruning import MultiModalPruner

from anchorprune_vllm.log import logger
from anchorprune_vllm.models.general.media_batch import GeneralMedia
from anchorprune_vllm.plan import ItemPlan, MediaTokens, pop_plans, to_tensors
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.testing.local_model import LocalModel, plans_of
from anchorprune_vllm.worker.embedding_payload import split_numbers
from tests.support.dialects import in_dialect, prompt_of
from tests.support.pictures import QUESTIONS, clip, picture
from tests.support.reference import Reference, reference_of


@pytest.fixture(scope="module")
def model(demo_models: Any, rank: None) -> LocalModel:
    return LocalModel(demo_models("qwen2.5-vl"))


@pytest.fixture(scope="module")
def reference(demo_models: Any) -> Reference:
    return reference_of(demo_models("qwen2.5-vl"))


def process(model: LocalModel, *media: Any, budget: int | str, **options: Any) -> Any:
    images = sum(not isinstance(item, tuple) for item in media)
    prompt = prompt_of(QUESTIONS[0], images, len(media) - images)
    tokenizer = model.processor.info.get_tokenizer()
    return model.process(in_dialect(prompt, tokenizer), *media, budget=budget, **options)


def batch_of(model: LocalModel, *media: Any) -> GeneralMedia:
    """Media of one modality as the pruner gets them, and asks for them."""
    ((modality, kwargs),) = model.batches(process(model, *media, budget=10))
    plans = pop_plans(modality, kwargs)
    assert plans is not None
    return model.model._media(modality, kwargs, plans)


# One window, several, windows cut at the right, at the bottom, on both sides, several frames.
MEDIA = {
    "336x336": picture(1, (336, 336)),
    "448x336": picture(2, (448, 336)),
    "500x410": picture(3, (500, 410)),
    "150x700": picture(4, (150, 700)),
    "1008x1008": picture(5, (1008, 1008)),
    "video": clip(6, frames=7, size=(400, 300)),
}


@pytest.mark.parametrize("name", MEDIA)
def test_received_attention_equals_transformers(
    model: LocalModel, reference: Any, name: str
) -> None:
    with torch.inference_mode():
        (features,) = batch_of(model, MEDIA[name]).encode([0])
        expected = reference.received_attention(MEDIA[name])
        hidden = reference.embed(MEDIA[name])
    assert features.importance.dtype == torch.float32
    np.testing.assert_allclose(features.importance.numpy(), expected, rtol=1e-4)
    torch.testing.assert_close(features.embeddings, hidden, rtol=1e-3, atol=1e-3)


def test_several_items_in_one_call(model: LocalModel) -> None:
    images = [picture(10 + i, (336 + 56 * i, 400)) for i in range(3)]
    with torch.inference_mode():
        together = batch_of(model, *images).encode([0, 1, 2])
        for image, features in zip(images, together, strict=True):
            (expected,) = batch_of(model, image).encode([0])
            torch.testing.assert_close(features.importance, expected.importance)
            torch.testing.assert_close(features.embeddings, expected.embeddings)


@pytest.mark.parametrize("tokens", [1, 140, 300, 700])
def test_a_long_video_comes_to_the_tower_in_groups_of_frames(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Attention is within frames, so the outputs are those of all at once."""
    needs = frozenset({"importance", "object_attention", "keys"})
    monkeypatch.setattr(model.model, "needs", needs)
    batch = batch_of(model, clip(60, frames=9, size=(400, 300)))
    of_frame = batch._plans[0].tokens.unit_sizes[0]
    calls: list[int] = []
    hook = model.model.visual.register_forward_pre_hook(
        lambda module, args: calls.append(len(args[0]))
    )
    with hook, torch.inference_mode():
        (together,) = batch.encode([0])
        monkeypatch.setattr(model.model, "_max_encoder_tokens", tokens)
        (in_groups,) = batch.encode([0])
    patches = 5 * 4 * of_frame
    frames_at_once = max(1, tokens // of_frame)
    assert calls[0] == sum(calls[1:]) == patches
    assert calls[1] == min(5, frames_at_once) * 4 * of_frame
    assert together.parts().keys() == in_groups.parts().keys() == {"embeddings", *needs}
    for name, part in together.parts().items():
        # CPUs add up batches of other sizes in another order.
        torch.testing.assert_close(in_groups.parts()[name], part, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["500x410", "video"])
@pytest.mark.parametrize("needs", [{"importance"}, {"keys"}, {"importance", "object_attention"}])
def test_signals_ride_on_the_outputs_of_a_data_parallel_tower(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, name: str, needs: set[str]
) -> None:
    """They come out as they went in; two ranks are in the engine's tests."""
    media = [MEDIA[name], MEDIA[name]]
    monkeypatch.setattr(model.model, "needs", frozenset(needs))
    size = model.model.visual.out_hidden_size
    with torch.inference_mode():
        expected = batch_of(model, *media).encode([0, 1])
        monkeypatch.setattr(model.model, "has_data_parallel_tower", True)
        carried = batch_of(model, *media).encode([0, 1])
    assert model.model.visual.out_hidden_size == size
    for one, other in zip(expected, carried, strict=True):
        assert one.parts().keys() == other.parts().keys() == {"embeddings", *needs}
        for part, values in one.parts().items():
            assert torch.equal(other.parts()[part], values), part


def test_a_video_beyond_all_bounds_is_refused(demo_models: Any, rank: None) -> None:
    """vLLM sees K tokens, and so would let it pass."""
    small = LocalModel(
        demo_models("qwen2.5-vl"),
        max_model_len=512,
        mm_processor_kwargs={"max_pixels": 56 * 56 * 8},
    )
    largest = small.processor._size_limits.largest
    process(small, clip(63, frames=4, size=(112, 112)), budget=4)
    frames = 2 * (4 * largest // 16 + 1)  # 16 tokens in each pair of frames
    with pytest.raises(ValueError, match=rf"at most {4 * largest} are allowed"):
        process(small, clip(64, frames=frames, size=(112, 112)), budget=4)


def test_the_tower_is_left_as_it_was(model: LocalModel) -> None:
    visual = model.model.visual
    size = visual.out_hidden_size
    model.embed(process(model, MEDIA["336x336"], budget=10))
    attention = model.model.tower_attention()
    assert visual.out_hidden_size == size
    assert not visual._forward_hooks
    assert not visual._forward_pre_hooks
    assert not attention._forward_pre_hooks


@pytest.mark.parametrize("name", ["500x410", "video"])
@pytest.mark.parametrize("budget", [1, 7, 100])
def test_kept_rows_carry_their_positions(
    model: LocalModel, reference: Reference, name: str, budget: int
) -> None:
    item = MEDIA[name]
    (rows,) = model.embed(process(model, item, budget=budget))
    rows, numbers = split_numbers(rows, 3, 3)
    kept = reference.kept(item, QUESTIONS[0], budget)
    with torch.inference_mode():
        expected = reference.embed(item)[kept]
    torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-3)
    # Seen from the item's first position, as transformers numbers a prompt of that item alone.
    prompt = prompt_of("", 0 if isinstance(item, tuple) else 1, int(isinstance(item, tuple)))
    positions = reference.native_positions(prompt, [item], [kept], 0).T
    is_media = [
        i
        for i, token in enumerate(reference.prompt_ids(prompt))
        if token in reference.placeholder_ids()
    ]
    first = is_media[0]
    assert (numbers + first).tolist() == positions[first : first + budget].tolist()


def test_placeholders_equal_rows(model: LocalModel) -> None:
    rng = random.Random(0)
    for number in range(60):
        size = rng.randrange(60, 900), rng.randrange(60, 900)
        media = picture(number, size) if number % 3 else clip(number, rng.randrange(1, 9), size)
        budget = rng.choice([1, rng.randrange(1, 400), f"{rng.randrange(1, 101)}%"])
        processed = process(model, media, budget=budget)
        ((modality, places),) = processed["mm_placeholders"].items()
        (plan,) = plans_of(processed, modality)
        assert [len(rows) for rows in model.embed(processed)] == [places[0].length]
        assert len(plan.tokens.unit_sizes) == (1 if modality == "image" else -(-len(media[0]) // 2))


def test_the_clients_own_embeddings_get_positions(model: LocalModel) -> None:
    given = torch.randn(30, 128)
    (rows,) = model.model.embed_multimodal(
        image_embeds=given, image_grid_thw=torch.tensor([[1, 10, 12]])
    )
    clean, numbers = split_numbers(rows, 3, 3)
    assert torch.equal(clean, given)
    assert numbers.tolist() == [[0, row, column] for row in range(5) for column in range(6)]


class Feature(SimpleNamespace):
    """One item of a request, as the model is told of it."""

    @classmethod
    def of(
        cls, modality: str, offset: int, kept: int, grid: list[int], seconds: float, token: int
    ) -> Any:
        frames, of_frame = grid[0], grid[1] * grid[2] // 4
        tokens = MediaTokens(frames * of_frame, (of_frame,) * frames, (grid[2] // 2,) * frames)
        layout = PromptLayout.of([token] * tokens.unpruned)
        plan = ItemPlan(kept, tokens, (1, 1), torch.empty(0, 0, dtype=torch.int64), layout)
        values = {f"{modality}_grid_thw": torch.tensor(grid), **to_tensors(modality, plan)}
        if modality == "video":
            values["second_per_grid_ts"] = torch.tensor(seconds)
        data = {name: SimpleNamespace(data=value) for name, value in values.items()}
        return cls(modality=modality, mm_position=PlaceholderRange(offset, kept), data=data)


def test_text_goes_on_where_it_does_unpruned(model: LocalModel) -> None:
    """Text positions of pruned prompts against vLLM's own of the unpruned ones."""
    rng = random.Random(1)
    for _ in range(100):
        whole, cut, text = [], [], []
        at, at_cut = 0, 0
        for _ in range(rng.randrange(1, 4)):
            words = rng.randrange(0, 6)
            text += [(at + i, at_cut + i) for i in range(words)]
            at, at_cut = at + words, at_cut + words
            modality = rng.choice(["image", "video"])
            frames = 1 if modality == "image" else rng.randrange(1, 6)
            grid = [frames, 2 * rng.randrange(1, 9), 2 * rng.randrange(1, 9)]
            tokens = grid[0] * grid[1] * grid[2] // 4
            seconds = rng.choice([0.3, 1.0, 7.5])
            kept = rng.randrange(1, tokens + 1)
            config = model.model.config
            token = config.image_token_id if modality == "image" else config.video_token_id
            whole.append(Feature.of(modality, at, tokens, grid, seconds, token))
            cut.append(Feature.of(modality, at_cut, kept, grid, seconds, token))
            at, at_cut = at + tokens, at_cut + kept
        text += [(at + i, at_cut + i) for i in range(5)]
        unpruned, _ = Qwen2_5_VLForConditionalGeneration.get_mrope_input_positions(
            model.model, [0] * (at + 5), whole
        )
        pruned, delta = model.model.get_mrope_input_positions([0] * (at_cut + 5), cut)
        for token, token_cut in text:
            assert pruned[:, token_cut].tolist() == unpruned[:, token].tolist()
        assert delta == int(unpruned.max()) + 1 - (at_cut + 5)


@pytest.mark.usefixtures("rank")
def test_encoder_cuda_graphs_are_switched_off(
    demo_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They bypass `embed_multimodal`, where pruning is."""
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning_once", lines.append)
    asked = {"cudagraph_mm_encoder": True}
    loaded = LocalModel(demo_models("qwen2.5-vl"), compilation_config=asked)
    assert not loaded.config.compilation_config.cudagraph_mm_encoder
    assert lines == ["AnchorPrune: CUDA graphs of the vision encoder are switched off"]


class Rows:
    """vLLM's second runner keeps positions per request; the real one needs a GPU."""

    def __init__(self, positions: list[Tensor]) -> None:
        self.stored = [part.to(torch.int32) for part in positions]

    def read_prefill_positions(self, request: int, length: int) -> Tensor:
        return self.stored[request][:, :length]

    def update_prefill_positions(self, request: int, positions: Tensor, delta: None) -> None:
        self.stored[request][:, : positions.shape[1]].copy_(positions)


def test_the_second_runner(model: LocalModel, reference: Reference) -> None:
    """Two requests in one batch, the second in two steps, with vLLM's own `MultiModalPruner`."""
    media = [picture(20, (500, 410)), clip(21, frames=4)]
    processed = [process(model, item, budget=30) for item in media]
    rows = [model.embed(out)[0] for out in processed]
    ids = [out["prompt_token_ids"] for out in processed]
    features = []
    for modality, out in zip(("image", "video"), processed, strict=True):
        (place,) = out["mm_placeholders"][modality]
        (item,) = out["mm_kwargs"][modality]
        features.append([SimpleNamespace(modality=modality, mm_position=place, data=item)])
    laid_out = [
        model.model.get_mrope_input_positions(tokens, items)
        for tokens, items in zip(ids, features, strict=True)
    ]
    states = Rows([positions for positions, _ in laid_out])
    longest = max(map(len, ids))
    all_ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in ids])
    cache = SimpleNamespace(mm_features=dict(enumerate(features)))
    runner = MultiModalPruner(model.model, states, cache, inputs_embeds_size=128)
    offset = features[1][0].mm_position.offset
    cut = offset + 11
    for computed, scheduled, parts in (
        ([0, 0], [len(ids[0]), cut], [rows[0], rows[1][:11]]),
        ([len(ids[0]), cut], [1, len(ids[1]) - cut], [rows[1][11:]]),
    ):
        batch = SimpleNamespace(
            req_ids=[0, 1],
            idx_mapping_np=np.array([0, 1]),
            prefill_len_np=np.array([len(tokens) for tokens in ids]),
            num_computed_prefill_tokens_np=np.array(computed),
            num_scheduled_tokens=np.array(scheduled),
        )
        requests = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=all_ids))
        clean = runner.recompute(parts, batch, requests)
        assert [tuple(part.shape) for part in clean] == [(len(part), 128) for part in parts]
    for number, item in enumerate(media):
        prompt = prompt_of(QUESTIONS[0], 1 - number, number)
        kept = reference.kept(item, QUESTIONS[0], 30)
        expected = reference.native_positions(prompt, [item], [kept], 1)
        assert states.stored[number].tolist() == expected[:, :-1].tolist()
        assert laid_out[number][1] == int(expected[0, -1]) - len(ids[number])
