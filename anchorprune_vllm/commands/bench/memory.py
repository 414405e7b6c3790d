# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one call that embeds an image, pruned and unpruned, in vLLM's own LLaVA-NeXT.

Widths are those of the 7B model (vision tower 1024, language model 4096), layers are few: each
layer's activations are gone before the next, so their number does not change the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from transformers import CLIPConfig, CLIPModel

from anchorprune_vllm.commands.bench.support import edit_json, peak_bytes
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, one_rank

_TILE = 336
_LAYERS = 2
_HEAD, _TEXT_HEAD = 64, 128
_PROMPT = "USER: <image>\nWhat is in the picture? ASSISTANT:"


@dataclass(frozen=True)
class PeakMemory:
    """What one call needs on top of weights and caches."""

    budget: int | str
    tokens: int
    mebibytes: float


def measure_peak_memory(
    budgets: Sequence[int | str], *, tower_width: int = 1024, text_width: int = 4096
) -> list[PeakMemory]:
    """Measure one 672 x 672 picture (a base view and four crops), embedded at each budget.

    The widths must be multiples of 128; by default they are those of the 7B model.
    """
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        _write_model(scratch / "model", tower_width, text_width)
        dtype = "float16" if torch.cuda.is_available() else "float32"
        with one_rank(scratch):
            model = LocalModel(scratch / "model", load_format="dummy", dtype=dtype)
            return [_measure(model, budget) for budget in budgets]


def _measure(model: LocalModel, budget: int | str) -> PeakMemory:
    picture = Image.effect_noise((2 * _TILE, 2 * _TILE), 64).convert("RGB")
    processed = model.process(_PROMPT, picture, budget=budget)
    (rows,) = model.embed(processed)  # lazy initialisation is not part of the call

    def call() -> None:
        model.model._pruner.forget_media()  # the vision tower is
        model.embed(processed)

    return PeakMemory(budget, len(rows), peak_bytes(call) / 2**20)


def _write_model(path: Path, tower_width: int, text_width: int) -> None:
    """Write configs and tokenizers of a LLaVA-NeXT with few layers; of weights, only CLIP's."""
    make_demo_model(path, arch="llava-next", image_size=_TILE)
    vision = {"hidden_size": tower_width, "intermediate_size": 4 * tower_width}
    vision["num_attention_heads"] = tower_width // _HEAD
    heads = text_width // _TEXT_HEAD
    text = {"hidden_size": text_width, "num_attention_heads": heads, "num_key_value_heads": heads}
    vision["num_hidden_layers"] = text["num_hidden_layers"] = _LAYERS
    edit_json(path / "config.json", vision_config=vision, text_config=text)
    edit_json(path / "clip" / "config.json", vision_config=vision, projection_dim=768)
    (path / "clip" / "model.safetensors").unlink()
    CLIPModel(CLIPConfig.from_pretrained(path / "clip")).save_pretrained(path / "clip")
