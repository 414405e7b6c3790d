# SPDX-License-Identifier: Apache-2.0
"""LLaVA-NeXT in vLLM's own classes, without an engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, plans_of
from anchorprune_vllm.testing.selections import recorded_selections
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference, reference_of

PROMPT = f"USER: <image>\n{QUESTIONS[0]} ASSISTANT:"


@pytest.fixture(scope="module")
def reference(demo_models: Any) -> Reference:
    return reference_of(demo_models("llava-next"))


@pytest.fixture(scope="module")
def model(demo_models: Any, rank: None) -> LocalModel:
    return LocalModel(demo_models("llava-next"))


def placeholders(processed: Any) -> int:
    (place,) = processed["mm_placeholders"]["image"]
    ids = processed["prompt_token_ids"]
    assert ids.count(ids[place.offset]) == place.length
    return place.length


def test_500_sizes_and_budgets_have_a_row_for_each_placeholder(rank: None, tmp_path: Path) -> None:
    make_demo_model(tmp_path / "model", arch="llava-next", image_size=56)  # 4 x 4 patches a tile
    model = LocalModel(tmp_path / "model")
    rng = random.Random(0)
    seen = set()
    for batch in range(125):
        processed = []
        for number in range(4):
            size = int(10 ** rng.uniform(0, 3.1)), int(10 ** rng.uniform(0, 3.1))
            budget = rng.choice([1, rng.randrange(1, 90), f"{rng.randrange(1, 101)}%"])
            image = picture(4 * batch + number, size)
            processed.append(model.process(PROMPT, image, budget=budget))
            (plan,) = plans_of(processed[-1])
            seen.add((len(plan.tokens.unit_sizes), plan.keeps_all))
        rows = [len(item) for item in model.embed(*processed)]
        assert rows == [placeholders(item) for item in processed]
    assert seen == {(units, whole) for units in (3, 4, 5) for whole in (False, True)}


def test_an_image_beside_a_larger_one(model: LocalModel) -> None:
    """The HF processor would fill it up with empty tiles."""
    small, large = picture(1), picture(2, (336, 336))
    alone = [model.process(PROMPT, image, budget=20) for image in (small, large)]
    expected = model.embed(*alone)
    model.model._pruner.forget_media()
    tiles: list[int] = []
    handle = model.model.vision_tower.register_forward_pre_hook(
        lambda module, args: tiles.append(len(args[0]))
    )
    both = model.process(PROMPT.replace("<image>", "<image><image>"), small, large, budget=20)
    assert [len(item["pixel_values"].data) for item in both["mm_kwargs"]["image"]] == [3, 5]
    rows = model.embed(both)
    handle.remove()
    assert tiles == [3 + 5]
    for given, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(given, wanted)


def test_no_newlines_among_the_kept(model: LocalModel) -> None:
    processed = model.process(PROMPT, picture(3, (336, 336)), budget=719)  # all but one
    newline = model.model.image_newline
    (rows,) = model.embed(processed)
    assert not (rows == newline).all(dim=1).any()
    (whole,) = model.embed(model.process(PROMPT, picture(3, (336, 336)), budget="100%"))
    assert (whole == newline).all(dim=1).sum() == 24


def test_keeps_the_tokens_of_the_reference_unit_by_unit(
    model: LocalModel, reference: Reference, subtests: pytest.Subtests
) -> None:
    """Rows equal the projected candidates of the independent pipeline, in its order."""
    for size in ((336, 336), (168, 168), (450, 90)):
        with subtests.test(size=size):
            image = picture(4, size)
            (rows,) = model.embed(model.process(PROMPT, image, budget=100))
            kept = reference.kept(image, QUESTIONS[0], 100)
            with torch.inference_mode():
                expected = reference.embed(image)[kept]
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def variant(model: Path, directory: Path, **edit: Any) -> Path:
    """The demo model with another config."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).symlink_to(file)
    for name in ("config.json", "preprocessor_config.json"):
        content = json.loads((model / name).read_text())
        for key in edit.keys() & content.keys():
            nested = isinstance(content[key], dict)
            content[key] = {**content[key], **edit[key]} if nested else edit[key]
        (directory / name).unlink()
        (directory / name).write_text(json.dumps(content))
    return directory


# Of llava-hf/llava-v1.6-mistral-7b-hf and llava-hf/llama3-llava-next-8b-hf, what differs.
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
LLAMA_3 = {"num_key_value_heads": 1, "rope_theta": 500000.0}


@pytest.mark.parametrize("edit", [{"text_config": MISTRAL}, {"text_config": LLAMA_3}])
def test_text_models_by_config(
    demo_models: Any, rank: None, tmp_path: Path, edit: dict[str, Any]
) -> None:
    path = variant(demo_models("llava-next"), tmp_path / "variant", **edit)
    # Weights are made up by vLLM: the demo model's fit its own text model alone.
    loaded = LocalModel(path, load_format="dummy")
    language_model = loaded.model.language_model
    expected = edit["text_config"].get("architectures", ["LlamaForCausalLM"])
    assert [type(language_model).__name__] == expected
    attention = language_model.model.layers[0].self_attn
    assert attention.num_kv_heads == edit["text_config"].get("num_key_value_heads", 2)
    processed = loaded.process(PROMPT, picture(5), budget=20)
    assert [tuple(rows.shape) for rows in loaded.embed(processed)] == [(20, 128)]


@pytest.mark.parametrize(
    ("grids", "units"),
    [([[168, 168]], 2), ([[168, 168], [168, 672], [504, 504]], 2), ([[504, 504]], 10)],
)
def test_grids_by_config(
    demo_models: Any, rank: None, tmp_path: Path, grids: list[list[int]], units: int
) -> None:
    path = variant(demo_models("llava-next"), tmp_path / "v", image_grid_pinpoints=grids)
    loaded = LocalModel(path)
    for size in ((168, 168), (400, 90), (17, 300)):
        for budget in (20, "30%", "100%"):
            processed = loaded.process(PROMPT, picture(5, size), budget=budget)
            assert [len(rows) for rows in loaded.embed(processed)] == [placeholders(processed)]
    (plan,) = plans_of(loaded.process(PROMPT, picture(5), budget=20))
    assert len(plan.tokens.unit_sizes) == units


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(model: LocalModel, demo_models: Any, dtype: str) -> None:
    """Near-ties may fall otherwise than in float32; most choices may not."""
    images = [picture(60 + i, (336, 150 + 60 * i)) for i in range(4)]

    def kept_by(loaded: LocalModel) -> list[set[int]]:
        processed = [loaded.process(PROMPT, image, budget=64) for image in images]
        with recorded_selections(loaded.model._pruner) as selections:
            assert [tuple(rows.shape) for rows in loaded.embed(*processed)] == [(64, 128)] * 4
        return [set(kept.indices.tolist()) for _, kept in selections]

    half = LocalModel(demo_models("llava-next"), dtype=dtype)
    pairs = zip(kept_by(model), kept_by(half), strict=True)
    shared = [len(exact & rounded) / 64 for exact, rounded in pairs]
    assert min(shared) > 0.8, shared
