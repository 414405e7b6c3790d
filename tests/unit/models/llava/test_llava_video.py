# SPDX-License-Identifier: Apache-2.0
"""LLaVA-Video: the original format, its pooling and newlines, without an engine."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from vllm import EngineArgs
from vllm.renderers.hf import resolve_chat_template
from vllm.tokenizers import cached_tokenizer_from_config

import anchorprune_vllm
from anchorprune_vllm.models.llava.frames import (
    count_newlines,
    newline_spacing,
    pool_frames,
    pooled_side,
    with_newlines,
)
from anchorprune_vllm.models.llava.llava_video_config import LlavaVideoConfig, read_pinpoints
from anchorprune_vllm.testing.local_model import LocalModel
from tests.support.dialects import in_dialect, prompt_of
from tests.support.pictures import clip, picture
from tests.support.reference import reference_of

POOLS = ("average", "max", "bilinear")
NEWLINES = ("grid", "frame", "one_token", "no_token")
# What is read of a flat config.json, as lmms-lab/LLaVA-Video-7B-Qwen2 has one.
ORIGINAL = {
    "architectures": ["LlavaQwenForCausalLM"],
    "model_type": "llava_qwen",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "vocab_size": 152064,
    "mm_vision_tower": "google/siglip-so400m-patch14-384",
    "mm_projector_type": "mlp2x_gelu",
    "mm_patch_merge_type": "spatial_unpad",
    "mm_newline_position": "grid",
    "mm_spatial_pool_mode": "bilinear",
    "mm_spatial_pool_stride": 2,
    "image_aspect_ratio": "anyres_max_9",
    "image_grid_pinpoints": "(1x1),...,(6x6)",
}


@pytest.fixture(scope="module")
def path(demo_models: Any) -> Path:
    anchorprune_vllm.register()
    return demo_models("llava-video")


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return reference_of(path)


class TestConfig:
    def test_original(self, tmp_path: Path) -> None:
        anchorprune_vllm.register()
        (tmp_path / "config.json").write_text(json.dumps(ORIGINAL))
        config = AutoConfig.from_pretrained(tmp_path)
        assert isinstance(config, LlavaVideoConfig)
        config.check()
        assert config.text_config.model_type == "qwen2"
        assert config.text_config.num_key_value_heads == 4
        assert config.text_config.rope_parameters["rope_theta"] == 1e6
        assert config.get_text_config().vocab_size == 152064
        assert (config.vision_config.hidden_size, config.vision_config.image_size) == (1152, 384)
        # All of the tower's layers but the last.
        assert (config.vision_config.num_hidden_layers, config.vision_feature_layer) == (27, -2)
        assert (config.image_token_index, config.video_token_index) == (151646, 151647)
        assert len(config.image_grid_pinpoints) == 36
        assert config.image_grid_pinpoints[-1] == [2304, 2304]

    def test_scaled_context(self, tmp_path: Path) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        (tmp_path / "config.json").write_text(json.dumps({**ORIGINAL, "rope_scaling": scaling}))
        anchorprune_vllm.register()
        config = AutoConfig.from_pretrained(tmp_path)
        config.check()
        assert config.text_config.rope_parameters["rope_type"] == "yarn"
        assert config.text_config.rope_parameters["factor"] == 4.0

    def test_tied_embeddings(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**ORIGINAL, "tie_word_embeddings": True}))
        anchorprune_vllm.register()
        assert AutoConfig.from_pretrained(tmp_path).text_config.tie_word_embeddings

    def test_settings_that_are_left_open(self) -> None:
        config = LlavaVideoConfig(mm_spatial_pool_stride=None, add_faster_video=None)
        config.check()
        assert config.mm_spatial_pool_stride == 2

    @pytest.mark.parametrize("written", ["(1x1),...,(2x2)", [[168, 168], [336, 336]]])
    def test_pinpoints_by_override(self, path: Path, written: Any) -> None:
        overrides = {"image_grid_pinpoints": written}
        made = EngineArgs(model=str(path), hf_overrides=overrides).create_model_config()
        assert made.hf_config.image_grid_pinpoints[-1] == [336, 336]

    def test_text_settings_by_override(self, path: Path) -> None:
        overrides = {"text_config": {"max_position_embeddings": 4096}}
        made = EngineArgs(model=str(path), hf_overrides=overrides).create_model_config()
        assert made.max_model_len == 4096

    def test_another_model_type(self, path: Path, tmp_path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llava"}))
        for file in path.glob("tokenizer*"):
            (tmp_path / file.name).symlink_to(file)
        with pytest.raises(ValueError, match=r"has model_type 'llava'; .* needs 'llava_qwen'"):
            EngineArgs(model=str(tmp_path)).create_model_config()

    def test_tokenizer_modes(self, path: Path) -> None:
        for mode in ("auto", "hf"):
            made = EngineArgs(model=str(path), tokenizer_mode=mode).create_model_config()
            assert made.tokenizer_mode == "llava_qwen"
        with pytest.raises(ValueError, match="--tokenizer-mode mistral has no placeholders"):
            EngineArgs(model=str(path), tokenizer_mode="mistral").create_model_config()

    def test_pinpoints(self) -> None:
        assert read_pinpoints("(1x1),...,(2x2)", 10) == [[10, 10], [10, 20], [20, 10], [20, 20]]

    def test_unknown_tower(self) -> None:
        with pytest.raises(ValueError, match=r"tower 'a/b' .* known: google/.* as vision_config"):
            LlavaVideoConfig(mm_vision_tower="a/b")

    @pytest.mark.parametrize(
        ("setting", "value", "words"),
        [
            ("mm_spatial_pool_mode", "sum", "is 'sum'; .* 'average', 'max', 'bilinear'"),
            ("mm_newline_position", "row", "is 'row'; .* 'grid', 'frame', 'one_token', 'no_token'"),
            ("mm_patch_merge_type", "flat", "is 'flat'; .* with 'spatial_unpad'"),
            ("image_aspect_ratio", "pad", "is 'pad'; .* with 'anyres_max_9'"),
            ("mm_resampler_type", "qformer", "is 'qformer'; .* with None, 'spatial_pool'"),
            ("add_faster_video", True, "is True; .* with False"),
            ("mm_spatial_pool_stride", 0, "is 0; give a whole number from 1 to 12"),
            ("mm_spatial_pool_stride", 40, "is 40; give a whole number from 1 to 12"),
            ("mm_spatial_pool_stride", "2", "is '2'; give a whole number from 1 to 12"),
            ("image_grid_pinpoints", "all", "is 'all'; give a list of .* or a range"),
            ("vocab_size", 7, "is a setting of the text model; give .*text_config.*vocab_size"),
            ("max_position_embeddings", 4096, "is a setting of the text model; give .*text_config"),
        ],
    )
    def test_what_cannot_be_served_is_refused_at_start_up(
        self, path: Path, setting: str, value: Any, words: str
    ) -> None:
        with pytest.raises(ValueError, match=f"llava_qwen: {setting} {words}"):
            EngineArgs(model=str(path), hf_overrides={setting: value}).create_model_config()


def test_tokenizer_has_the_placeholders(path: Path) -> None:
    model_config = EngineArgs(model=str(path)).create_model_config()
    tokenizer = cached_tokenizer_from_config(model_config)
    ids = tokenizer("<video>\nWhat?").input_ids
    assert ids[0] == model_config.hf_config.video_token_index
    assert tokenizer.decode(ids) == "<video>\nWhat?"
    assert len(tokenizer) == max(tokenizer.get_vocab().values()) + 1
    # An answer that holds one is shown without it, as with any special token.
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "What?"


def test_chat_format_of_a_tokenizer_without_a_template(path: Path, tmp_path: Path) -> None:
    """As the original code writes it."""
    for file in path.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).symlink_to(file)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model_config = EngineArgs(model=str(tmp_path)).create_model_config()
    tokenizer = cached_tokenizer_from_config(model_config)
    template = resolve_chat_template(tokenizer, None, None, model_config=model_config)
    written = tokenizer.apply_chat_template(
        [{"role": "user", "content": "<video>\nWhat?"}],
        chat_template=template,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert written == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<video>\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_vocabulary(path: Path, rank: None) -> None:
    with pytest.raises(ValueError, match=r'give --hf-overrides .*"image_token_index": \d+, "video'):
        LocalModel(path, hf_overrides={"image_token_index": 5}).processor.info.get_hf_processor()


@pytest.mark.parametrize("mode", POOLS)
@pytest.mark.parametrize(("side", "stride"), [(27, 2), (12, 2), (27, 3), (7, 4)])
def test_pooling(reference: Any, mode: str, side: int, stride: int) -> None:
    frames = torch.randn(3, side * side, 5)
    reference.settings.update(mm_spatial_pool_mode=mode, mm_spatial_pool_stride=stride)
    pooled = pool_frames(frames, mode, stride)
    torch.testing.assert_close(pooled, reference._pool(frames), rtol=1e-5, atol=1e-5)
    assert pooled.shape[1] == pooled_side(side, mode, stride) ** 2


def test_the_papers_frames() -> None:
    assert pooled_side(27, "average", 2) ** 2 * 16 == 2704
    assert pooled_side(27, "bilinear", 2) == 14


@pytest.mark.parametrize("position", NEWLINES)
@pytest.mark.parametrize("frames", [1, 4])
def test_newlines(reference: Any, position: str, frames: int) -> None:
    tokens = torch.randn(frames, 9, len(reference.newline))
    reference.settings["mm_newline_position"] = position
    line = with_newlines(tokens, reference.newline, position)
    assert torch.equal(line, reference._with_newlines(tokens))
    assert len(line) == frames * 9 + count_newlines(position, frames, 3)
    assert newline_spacing(position, 3) == {"grid": 3, "frame": 9}.get(position)


@pytest.mark.parametrize(("pool", "newline"), list(product(POOLS, NEWLINES)))
def test_tokens_of_a_video(
    demo_models: Any, rank: None, tmp_path: Path, pool: str, newline: str
) -> None:
    """Unpruned, of a tower with an odd number of patches in a row; and placeholders as many."""
    from anchorprune_vllm.testing.demo_models.make import make_demo_model

    make_demo_model(tmp_path / "model", arch="llava-video", image_size=98)
    settings = {"mm_spatial_pool_mode": pool, "mm_newline_position": newline}
    model = LocalModel(tmp_path / "model", hf_overrides=settings)
    reference: Any = reference_of(tmp_path / "model")
    reference.settings.update(settings)
    media = clip(1, frames=3, size=(120, 90))
    prompt = in_dialect(prompt_of("What?", 0, 1), model.processor.info.get_tokenizer())
    processed = model.process(prompt, media, budget="100%")
    (rows,) = model.embed(processed)
    expected = reference.embed_unpruned(media)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
    (place,) = processed["mm_placeholders"]["video"]
    assert place.length == len(expected)
    pruned = model.process(prompt, media, budget=11)
    (rows,) = model.embed(pruned)
    with torch.inference_mode():
        kept = reference.embed(media)[reference.kept(media, "What?", 11)]
    torch.testing.assert_close(rows, kept, rtol=1e-4, atol=1e-4)


def test_videos_of_one_call_may_differ_in_length(path: Path, rank: None) -> None:
    model = LocalModel(path)
    prompt = in_dialect(prompt_of("What?", 0, 1), model.processor.info.get_tokenizer())
    processed = [
        model.process(prompt, clip(number, frames=frames), budget="100%")
        for number, frames in enumerate((2, 5))
    ]
    alone = [model.embed(item)[0] for item in processed]
    pixels = [item["mm_kwargs"]["video"][0]["pixel_values_videos"].data for item in processed]
    with torch.inference_mode():
        together = model.model.embed_multimodal(pixel_values_videos=pixels)
    assert [len(rows) for rows in together] == [2 * 42, 5 * 42]
    for rows, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(rows, expected)


def test_original_names_are_read_from_disk(path: Path, rank: None, tmp_path: Path) -> None:
    """In two files and other numbers than the demo's: what was written is what is loaded."""
    for file in path.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
    weights = {
        name: weight + 0.01 * torch.randn_like(weight)
        for name, weight in load_file(path / "model.safetensors").items()
    }
    names = {
        "model.embed_tokens.weight": "language_model.model.embed_tokens.weight",
        "model.norm.weight": "language_model.model.norm.weight",
        "lm_head.weight": "language_model.lm_head.weight",
        "model.image_newline": "image_newline",
        "model.mm_projector.0.bias": "multi_modal_projector.linear_1.bias",
        "model.mm_projector.2.weight": "multi_modal_projector.linear_2.weight",
        "model.layers.1.input_layernorm.weight": (
            "language_model.model.layers.1.input_layernorm.weight"
        ),
        "model.vision_tower.vision_tower.vision_model.embeddings.position_embedding.weight": (
            "vision_tower.vision_model.embeddings.position_embedding.weight"
        ),
        "model.vision_tower.vision_tower.vision_model.encoder.layers.2.mlp.fc2.bias": (
            "vision_tower.vision_model.encoder.layers.2.mlp.fc2.bias"
        ),
    }
    half = sorted(weights)[: len(weights) // 2]
    parts = [half, [name for name in weights if name not in half]]
    index = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, tmp_path / file)
        index |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    loaded = dict(LocalModel(tmp_path).model.named_parameters())
    for original, here in names.items():
        assert torch.equal(loaded[here], weights[original]), original
    # Without the tower's last layer.
    assert not any("layers.3" in name for name in loaded if name.startswith("vision_tower"))


def test_pixels_are_prepared_as_the_original_does(path: Path, rank: None) -> None:
    """Whole frames squeezed into a square by PIL, bicubic, then to between -1 and 1."""
    processor = LocalModel(path).processor.info.get_hf_processor()
    frames, _ = clip(1, frames=2, size=(300, 200))
    given = processor.video_processor([frames], return_tensors="pt").pixel_values_videos[0]
    for pixels, frame in zip(given, frames, strict=True):
        squeezed = Image.fromarray(frame).resize((168, 168), Image.Resampling.BICUBIC)
        expected = (np.asarray(squeezed) / 255 - 0.5) / 0.5
        difference = np.abs(pixels.permute(1, 2, 0).numpy() - expected)
        assert difference.max() < 2.5 * 2 / 255  # two levels of 256: another implementation
        assert difference.mean() < 0.5 / 255
    tiles = processor.image_processor(picture(2, (300, 200)), return_tensors="pt").pixel_values[0]
    base = Image.Image.resize(picture(2, (300, 200)), (168, 168), Image.Resampling.BICUBIC)
    expected = (np.asarray(base) / 255 - 0.5) / 0.5
    assert np.abs(tiles[0].permute(1, 2, 0).numpy() - expected).mean() < 0.5 / 255


@pytest.mark.parametrize(("kwargs", "frames"), [({}, 32), ({"video": {"num_frames": 8}}, 8)])
def test_memory_is_reserved_for_the_frames_that_are_sampled(
    path: Path, rank: None, kwargs: dict[str, Any], frames: int
) -> None:
    info = LocalModel(path, media_io_kwargs=kwargs).processor.info
    assert info.get_num_frames_with_most_features(100_000, {"video": 1}) == frames
    assert info.get_max_video_tokens(100_000, {"video": 1}) == frames * 6 * 7
    assert info.get_num_frames_with_most_features(200, {"video": 1}) == 4  # of 42 tokens each
