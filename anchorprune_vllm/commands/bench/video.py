# SPDX-License-Identifier: Apache-2.0
"""Videos of several lengths through vLLM's classes, LLaVA-Video: time and memory, pruned or not.

The tower has as many patches as the real one (27 x 27), and a quarter of its width and layers; the
language model, of which only the projector's width counts here, a quarter of its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import SiglipConfig, SiglipModel

from anchorprune_vllm.commands.bench.support import edit_json, peak_bytes, side_by_side
from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, one_rank

_SIDE = 378
_PROMPT = "<|im_start|>user\n<video>\nWhat is to be seen?<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class VideoCost:
    """One call that embeds one video."""

    frames: int
    tokens: int
    kept: int
    unpruned_ms: float
    pruned_ms: float
    unpruned_mebibytes: float
    pruned_mebibytes: float


def measure_videos(lengths: Sequence[int], kept: int, repeats: int) -> list[VideoCost]:
    """For videos of so many frames, of which so many tokens are kept."""
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        _write_model(scratch / "model")
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        with one_rank(scratch), torch.inference_mode():
            options: dict[str, Any] = {"max_model_len": 32768, "max_num_batched_tokens": 8192}
            model = LocalModel(scratch / "model", load_format="dummy", dtype=dtype, **options)
            return [_measure(model, frames, kept, repeats) for frames in lengths]


def _measure(model: LocalModel, frames: int, kept: int, repeats: int) -> VideoCost:
    video = np.random.default_rng(0).integers(0, 256, (frames, 90, 160, 3), dtype=np.uint8)
    unpruned, pruned = (model.process(_PROMPT, video, budget=budget) for budget in ("100%", kept))

    def embed(processed: Any) -> list[torch.Tensor]:
        model.model._pruner.forget_media()  # each call runs the tower
        return model.embed(processed)

    calls = [partial(embed, unpruned), partial(embed, pruned)]
    tokens, rows = (len(call()[0]) for call in calls)
    times = side_by_side(calls, repeats)
    peaks = [peak_bytes(call) / 2**20 for call in calls]
    return VideoCost(frames, tokens, rows, *times, *peaks)


def _write_model(path: Path) -> None:
    """Configs and tokenizers of a LLaVA-Video of these sizes; of weights, only SigLIP's."""
    make_demo_model(path, arch="llava-video", image_size=_SIDE)
    vision = {"hidden_size": 288, "intermediate_size": 1076, "num_attention_heads": 4}
    vision["num_hidden_layers"] = 7
    text = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
    text["max_position_embeddings"] = 32768
    edit_json(path / "config.json", vision_config=vision, mm_hidden_size=288, **text)
    siglip = path / "siglip"
    edit_json(siglip / "config.json", vision_config=vision, text_config={"projection_size": 288})
    (siglip / "model.safetensors").unlink()
    SiglipModel(SiglipConfig.from_pretrained(siglip)).save_pretrained(siglip)
