# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be pruned are refused before anything is loaded."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_architecture
from vllm.utils.argparse_utils import FlexibleArgumentParser

import anchorprune_vllm
from anchorprune_vllm.metrics.files import directory_of
from anchorprune_vllm.models.general.adapter import GeneralModel
from anchorprune_vllm.models.llava.contrastive import ContrastivePrunedModel
from anchorprune_vllm.testing.demo_models.make import DEMO_MODELS, find_text_encoder


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Path:
    anchorprune_vllm.register()
    return demo_model


def start(model: Path, **options: Any) -> Any:
    """What `vllm serve` and `LLM` do first."""
    text_encoder = find_text_encoder(model)
    paired = {"text_encoder": str(text_encoder)} if text_encoder else {}
    settings = {"budget": 16, **paired, **options.pop("settings", {})}
    overrides = {"anchorprune": settings, **options.pop("hf_overrides", {})}
    return EngineArgs(model=str(model), hf_overrides=overrides, **options).create_model_config()


def test_a_good_model_passes(demo_models: Any, subtests: pytest.Subtests) -> None:
    anchorprune_vllm.register()
    for arch in DEMO_MODELS:
        with subtests.test(arch=arch):
            start(demo_models(arch))


def test_where_metrics_go_travels_with_the_config(model: Path) -> None:
    on, off = start(model), start(model, disable_log_stats=True)
    assert directory_of(on) is not None
    assert directory_of(off) is None
    assert directory_of(pickle.loads(pickle.dumps(on))) == directory_of(on)
    # vLLM finds compiled code by this hash, in every run.
    assert on.compute_hash() == off.compute_hash()


def edited_clip(model: Path, tmp_path: Path, edit: dict[str, Any]) -> str:
    config = json.loads((model / "clip" / "config.json").read_text())
    config["vision_config"].update(edit.pop("vision_config", {}))
    (tmp_path / "config.json").write_text(json.dumps({**config, **edit}))
    return str(tmp_path)


def test_text_encoder_of_another_tower(model: Path, tmp_path: Path) -> None:
    other = edited_clip(model, tmp_path, {"vision_config": {"hidden_size": 128}})
    with pytest.raises(
        ValueError, match=r"does not fit the vision tower: .* hidden_size 128.* has"
    ):
        start(model, settings={"text_encoder": other})


def test_text_encoder_that_is_no_clip(model: Path) -> None:
    with pytest.raises(ValueError, match="is a 'llava' model, but this vision tower needs a full"):
        start(model, settings={"text_encoder": str(model)})


def test_text_encoder_that_is_missing(model: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"cannot read the text encoder .*nowhere.*give --anchor"):
        start(model, settings={"text_encoder": missing})


@pytest.mark.parametrize(
    ("without", "words"), [("tokenizer*", "has no tokenizer of its own"), ("*.saf*", "no weights")]
)
def test_incomplete_text_encoder(model: Path, tmp_path: Path, without: str, words: str) -> None:
    for file in (model / "clip").iterdir():
        if not file.match(without):
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ValueError, match=f"{words}.*; give --anchorprune-text-encoder a complete"):
        start(model, settings={"text_encoder": str(tmp_path)})


def test_another_implementation_of_the_model(model: Path) -> None:
    with pytest.raises(ValueError, match=r"is the Transformers backend, which cannot be pruned"):
        start(model, model_impl="transformers")


def test_unknown_tower_without_text_encoder(model: Path) -> None:
    with pytest.raises(ValueError, match="no text encoder is known for this vision tower"):
        start(model, settings={"text_encoder": None})


@pytest.mark.parametrize(
    ("arch", "vision"),
    [
        ("llava-1.5", "siglip_vision_model"),
        ("llava-1.5", "pixtral"),
        ("llava-next", "siglip_vision_model"),
        ("llava-onevision", "clip_vision_model"),
    ],
)
def test_another_kind_of_tower_is_for_the_general_adapter(
    demo_models: Any, tmp_path: Path, arch: str, vision: str
) -> None:
    """It needs no text encoder, and refuses one."""
    anchorprune_vllm.register()
    model = demo_models(arch)
    for file in model.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config["vision_config"]["model_type"] = vision
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    unpruned = EngineArgs(model=str(tmp_path)).create_model_config()
    get_model_architecture(unpruned)  # vLLM remembers the class
    for path, adapter in ((tmp_path, GeneralModel), (model, ContrastivePrunedModel)):
        served, _ = get_model_architecture(start(path))
        assert issubclass(served, adapter)
    with pytest.raises(ValueError, match=r"needs no text encoder.*leave out --anchorprune-text"):
        start(tmp_path, settings={"text_encoder": str(find_text_encoder(model))})


def test_siglip_towers_need_siglip(
    demo_models: Any, model: Path, subtests: pytest.Subtests
) -> None:
    for arch in ("llava-onevision", "llava-video"):
        with subtests.test(arch=arch):
            with pytest.raises(
                ValueError, match=r"is a 'clip' model, but .* needs a full SigLIP checkpoint"
            ):
                start(demo_models(arch), settings={"text_encoder": str(model / "clip")})
            with pytest.raises(
                ValueError, match=r"no text encoder is known .* paired SigLIP checkpoint"
            ):
                start(demo_models(arch), settings={"text_encoder": None})


def test_several_layers_of_the_tower(model: Path) -> None:
    with pytest.raises(ValueError, match=r"list of layers .*\(vision_feature_layer \[-3, -2\]\)"):
        start(model, hf_overrides={"vision_feature_layer": [-3, -2]})


def test_llava_next_with_class_tokens(demo_models: Any) -> None:
    anchorprune_vllm.register()
    with pytest.raises(ValueError, match="select_strategy 'full'; only 'default'"):
        start(demo_models("llava-next"), hf_overrides={"vision_feature_select_strategy": "full"})


class TestQwen:
    """It has its own positions and words."""

    @pytest.fixture
    def qwen(self, demo_models: Any) -> Path:
        anchorprune_vllm.register()
        return demo_models("qwen2.5-vl")

    def test_settings_of_other_models(self, qwen: Path, subtests: pytest.Subtests) -> None:
        for settings, words in (
            ({"positions": "compact"}, "'compact' are for models with 1-D positions"),
            ({"text_encoder": "openai/clip"}, "needs no text encoder.*leave out"),
        ):
            with subtests.test(settings=settings), pytest.raises(ValueError, match=words):
                start(qwen, settings=settings)

    def test_vllms_own_pruning(self, qwen: Path) -> None:
        with pytest.raises(ValueError, match="--video-pruning-rate and --anchorprune-budget both"):
            start(qwen, video_pruning_rate=0.5)

    def test_pipeline_parallel(self, qwen: Path) -> None:
        with pytest.raises(ValueError, match="give --pipeline-parallel-size 1 instead of 2"):
            start(qwen, pipeline_parallel_size=2)


class TestNativePositions:
    def test_pipeline_parallel(self, model: Path) -> None:
        start(model, pipeline_parallel_size=2)
        with pytest.raises(ValueError, match="native positions cannot be combined with pipeline"):
            start(model, pipeline_parallel_size=2, settings={"positions": "native"})

    def test_embeddings_as_prompts(self, model: Path) -> None:
        start(model, enable_prompt_embeds=True)
        with pytest.raises(ValueError, match="leave out --enable-prompt-embeds"):
            start(model, settings={"positions": "native"}, enable_prompt_embeds=True)


def test_architecture_that_cannot_be_pruned(model: Path, tmp_path: Path) -> None:
    config = {
        **{"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 64},
        **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "ffn_dim": 64},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="OPTForCausalLM is not a decoder that sees images"):
        EngineArgs(
            model=str(tmp_path), hf_overrides={"anchorprune": {"budget": 8}}
        ).create_model_config()


def test_bad_settings(model: Path) -> None:
    with pytest.raises(ValueError, match="Budget -3 is not allowed"):
        start(model, settings={"budget": -3})


def test_lora_on_the_tower(model: Path) -> None:
    with pytest.raises(ValueError, match="leave out --enable-tower-connector-lora"):
        start(model, enable_lora=True, enable_tower_connector_lora=True)


def test_compiled_encoder(model: Path) -> None:
    with pytest.raises(ValueError, match="leave out compile_mm_encoder in --compilation-config"):
        start(model, compilation_config={"compile_mm_encoder": True})


@pytest.mark.parametrize("key", ["anchorprune", "anchor_prune"])
def test_server_defaults_do_not_go_through_processor_kwargs(model: Path, key: str) -> None:
    words = f"'{key}' in --mm-processor-kwargs is for single requests; set the server's defaults"
    with pytest.raises(ValueError, match=words):
        start(model, mm_processor_kwargs={key: {"budget": 8}})
    start(model, mm_processor_kwargs={"do_rescale": True})


def test_off_looks_at_nothing(model: Path) -> None:
    EngineArgs(model=str(model)).create_model_config()


def test_command_line_gets_the_message_alone(model: Path) -> None:
    flags = ["--model", str(model), "--anchorprune-budget", "8"]
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    with pytest.raises(SystemExit, match="vllm: error: anchorprune: no text encoder is known"):
        EngineArgs.from_cli_args(args).create_model_config()


def test_what_the_general_level_lacks(demo_models: Any, subtests: pytest.Subtests) -> None:
    for arch, options, settings, words in (
        ("cohere2-vision", {}, {"method": "hiprune"}, "hiprune needs object_attention of the"),
        ("qwen3-vl", {}, {"similarity": "raw"}, "for CLIP and SigLIP pairs; Qwen3VL"),
        ("qwen3-vl", {}, {"text_encoder": "clip"}, "Qwen3VL.* needs no text encoder"),
        ("qwen3-vl", {}, {"positions": "compact"}, "Qwen3VL.* has M-RoPE: leave positions out"),
        ("glm-4v", {"mm_encoder_tp_mode": "data"}, {}, "leave out --mm-encoder-tp-mode data"),
        ("qwen3-vl", {"enable_mm_embeds": True}, {}, "leave out --enable-mm-embeds"),
        ("qwen3-vl", {"skip_mm_profiling": True}, {"level": "full"}, "out --skip-mm-profiling"),
    ):
        with subtests.test(arch=arch, options=options, settings=settings):
            model = demo_models(arch)
            start(model)
            with pytest.raises(ValueError, match=words):
                start(model, settings=settings, **options)


@pytest.mark.parametrize(
    ("arch", "positions", "way_out"),
    [("qwen3-vl", None, "--anchorprune-budget"), ("gemma3", "native", "the setting positions")],
)
def test_native_positions_need_the_tokens_of_images(
    demo_models: Any,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    positions: str | None,
    way_out: str,
) -> None:
    monkeypatch.setattr(
        "anchorprune_vllm.models.general.adapter.media_token_ids", lambda hf_config: {}
    )
    words = f"does not name the tokens .* native positions cannot be kept; leave out {way_out}"
    with pytest.raises(ValueError, match=words):
        start(demo_models(arch), settings={"positions": positions})
