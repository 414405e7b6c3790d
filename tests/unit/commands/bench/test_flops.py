# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from anchorprune_vllm.commands.bench.flops import (
    VICUNA_7B,
    Tower,
    Transformer,
    language_model_of,
    tiles_of,
    tower_of,
)

CLIP = Tower(Transformer(23, 1024, 4096), projector=4096 * (1024 + 4096))


def test_parameters_are_counted_matrix_by_matrix() -> None:
    assert Transformer(2, 10, 40).parameters == 2 * (4 * 10 * 10 + 2 * 10 * 40)
    # Query and output of 10 x 10, key and value of 10 x 5, and a gate.
    assert Transformer(1, 10, 40, 3, key_value_size=5).parameters == 200 + 100 + 1200
    assert VICUNA_7B.parameters == pytest.approx(6.476e9, rel=1e-3)
    assert CLIP.blocks.parameters == pytest.approx(289.4e6, rel=1e-3)


def test_attention_grows_with_what_is_attended() -> None:
    stack = Transformer(3, 10, 40)
    products = 2 * stack.parameters * 7
    assert stack.flops(7) == products + 3 * 4 * 7 * 7 * 10
    assert stack.flops(7, attended=2) == products + 3 * 4 * 7 * 2 * 10


@pytest.mark.parametrize(("visual", "paper"), [(576, 8.94), (32, 1.67)])
def test_the_papers_table(visual: int, paper: float) -> None:
    """The paper does not say how much text it has: with 96 tokens, both of its figures come out."""
    assert VICUNA_7B.flops(visual + 96) / 1e12 == pytest.approx(paper, abs=0.005)


def test_a_tower_counts_tiles_by_themselves() -> None:
    assert CLIP.flops(5, 577) == 5 * CLIP.flops(1, 577)
    assert CLIP.flops(1, 577) == CLIP.blocks.flops(577) + 2 * CLIP.projector * 577


def test_windows_see_less() -> None:
    blocks = Transformer(4, 10, 40)
    tower = Tower(blocks, projector=7, projected_per_patch=0.25, window=16, full_blocks=1)
    in_windows, whole = (4 * 64 * seen * 10 for seen in (16, 64))
    expected = 2 * blocks.parameters * 64 + 3 * in_windows + whole + 2 * 7 * 16
    assert tower.flops(1, 64) == expected


def config_of(demo_models, arch: str):
    return AutoConfig.from_pretrained(demo_models(arch))


def weights_of(model: Path, *parts: str) -> int:
    """Entries of all matrices whose name has one of these."""
    from safetensors.torch import load_file

    return sum(
        tensor.numel()
        for name, tensor in load_file(model / "model.safetensors").items()
        if tensor.ndim == 2 and any(part in name for part in parts)
    )


def test_they_are_the_checkpoints(demo_models) -> None:
    """Counted in the files themselves."""
    model, config = demo_models("llava-1.5"), config_of(demo_models, "llava-1.5")
    assert language_model_of(config).parameters == weights_of(model, "model.layers")
    tower = tower_of(config)
    # Of 4 layers the last is not used.
    assert tower.blocks.parameters * 4 == 3 * weights_of(model, "encoder.layers")
    assert tower.projector == weights_of(model, "multi_modal_projector")


def test_qwen_is_too(demo_models) -> None:
    model, config = demo_models("qwen2.5-vl"), config_of(demo_models, "qwen2.5-vl")
    assert language_model_of(config).parameters == weights_of(model, "model.layers")
    tower = tower_of(config)
    assert tower.blocks.parameters == weights_of(model, "visual.blocks")
    assert tower.projector == weights_of(model, "visual.merger")
    assert (tower.window, tower.full_blocks, tower.projected_per_patch) == (64, 2, 0.25)


@pytest.mark.parametrize(
    ("arch", "size", "tiles"),
    [
        ("llava-1.5", (999, 100, 1), (1, 145)),
        ("llava-next", (336, 336, 1), (5, 145)),
        ("llava-next", (336, 168, 1), (3, 145)),
        ("qwen2.5-vl", (336, 336, 1), (1, 24 * 24)),
        ("qwen2.5-vl", (336, 336, 16), (8, 24 * 24)),
        ("llava-onevision", (168, 168, 1), (2, 144)),
        ("llava-onevision", (168, 168, 7), (7, 144)),
    ],
)
def test_tiles(demo_models, arch: str, size: tuple[int, int, int], tiles: tuple[int, int]) -> None:
    assert tiles_of(config_of(demo_models, arch), *size) == tiles


def test_other_architectures_have_no_formula_for_the_tower() -> None:
    assert tower_of(SimpleNamespace(model_type="idefics3")) is None
