# SPDX-License-Identifier: Apache-2.0
"""LLaVA-Video from the original format, assembled from transformers' SigLIP and Qwen2.

Pooling and newlines are written after the original code, cell by cell:
github.com/LLaVA-VL/LLaVA-NeXT, llava/model/llava_arch.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionModel,
    LlavaOnevisionVideoProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from tests.support.reference.onevision import ReferenceOnevision


class ReferenceLlavaVideo(ReferenceOnevision):
    """`settings` may be changed, as by --hf-overrides."""

    def _load(self, model: Path) -> None:
        self.settings = json.loads((model / "config.json").read_text())
        weights = load_file(model / "model.safetensors")

        def under(prefix: str) -> dict[str, Tensor]:
            return {
                name.removeprefix(prefix): weight
                for name, weight in weights.items()
                if name.startswith(prefix)
            }

        vision_config = SiglipVisionConfig(
            **self.settings["vision_config"], vision_use_head=False, attn_implementation="eager"
        )
        vision_config.num_hidden_layers -= 1  # the original code deletes the last
        self.vision_tower = SiglipVisionModel(vision_config).eval()
        tower = under("model.vision_tower.vision_tower.")
        missing, unexpected = self.vision_tower.load_state_dict(
            {name.removeprefix(self._inner(tower)): weight for name, weight in tower.items()},
            strict=False,
        )
        assert (missing, unexpected) == ([], [])
        self.feature_layer = -1
        projector = under("model.mm_projector.")
        hidden, visual = projector["0.weight"].shape
        self.projector = nn.Sequential(
            nn.Linear(visual, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )
        self.projector.load_state_dict(projector)
        self.newline = weights["model.image_newline"]

        language_model = Qwen2ForCausalLM._from_config(
            Qwen2Config(**self.settings), attn_implementation="eager"
        ).eval()
        language_model.load_state_dict(
            {
                name: weight
                for name, weight in weights.items()
                if name.startswith(
                    ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
                )
            }
        )
        self.language_model = language_model.model
        self.embed_words = language_model.get_input_embeddings()
        self.lm_head = language_model.lm_head

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.tokenizer.add_tokens(list(self.placeholders), special_tokens=True)
        tile = vision_config.image_size
        pixels: dict[str, Any] = {
            "size": {"height": tile, "width": tile},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
        pinpoints = self.settings["image_grid_pinpoints"]
        self.image_processor = LlavaOnevisionImageProcessor(
            **pixels, image_grid_pinpoints=pinpoints
        )
        self.video_processor = LlavaOnevisionVideoProcessor(**pixels)
        self.config = SimpleNamespace(vision_config=vision_config, image_grid_pinpoints=pinpoints)

    def _inner(self, tower: dict[str, Tensor]) -> str:
        """What the checkpoint's names begin with and this version of transformers' do not."""
        own = next(iter(self.vision_tower.state_dict()))
        (found,) = (name for name in tower if name.endswith(own))
        return found.removesuffix(own)

    def chat_prompt(self, question: str, images: int = 1) -> str:
        content = "<image>\n" * images + question
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    def _packer(self) -> Any:
        packer = SimpleNamespace(config=self.config)
        packer.pack_image_features = LlavaOnevisionModel.pack_image_features.__get__(packer)
        return packer

    def _pool(self, frames: Tensor) -> Tensor:
        mode, stride = (self.settings[f"mm_spatial_pool_{name}"] for name in ("mode", "stride"))
        count, patches, channels = frames.shape
        side = math.isqrt(patches)
        grid = frames.detach().numpy().reshape(count, side, side, channels)
        if mode == "bilinear":
            # Points between the centres of patches, as torch's interpolate with its defaults.
            out = math.ceil(side / stride)
            at = np.maximum((np.arange(out) + 0.5) * side / out - 0.5, 0)
            low = np.floor(at).astype(int)
            high = np.minimum(low + 1, side - 1)
            share = at - low
            rows = grid[:, low] * (1 - share)[:, None, None] + grid[:, high] * share[:, None, None]
            pooled = rows[:, :, low] * (1 - share)[:, None] + rows[:, :, high] * share[:, None]
        else:
            out = side // stride
            reduce = {"average": np.mean, "max": np.max}[mode]
            pooled = np.empty((count, out, out, channels), grid.dtype)
            for i in range(out):
                for j in range(out):
                    cell = grid[:, stride * i : stride * (i + 1), stride * j : stride * (j + 1)]
                    pooled[:, i, j] = reduce(cell, axis=(1, 2))
        return torch.from_numpy(pooled.reshape(count, out * out, channels)).to(frames.dtype)

    def _with_newlines(self, frames: Tensor) -> Tensor:
        position = self.settings["mm_newline_position"]
        side = math.isqrt(frames.shape[1])
        line = []
        for frame in frames:
            for number, token in enumerate(frame, start=1):
                line.append(token)
                if position == "grid" and number % side == 0:
                    line.append(self.newline)
            if position == "frame":
                line.append(self.newline)
        if position == "one_token":
            line.append(self.newline)
        return torch.stack(line)
