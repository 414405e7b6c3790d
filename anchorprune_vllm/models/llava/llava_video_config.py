# SPDX-License-Identifier: Apache-2.0
"""Config and tokenizer of the original LLaVA-Video checkpoints (`model_type` `llava_qwen`).

Their config.json is a Qwen2 config with vision settings beside it, and their tokenizer is that of
Qwen2, which has no placeholders. The settings are read as in the original code, LLaVA-NeXT of
LLaVA-VL: `llava/model/llava_arch.py` and `multimodal_encoder/siglip_encoder.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoTokenizer, LlavaOnevisionConfig, Qwen2Config, SiglipVisionConfig
from vllm.tokenizers.hf import HfTokenizer, get_cached_tokenizer

MODEL_TYPE = "llava_qwen"
PLACEHOLDERS = ("<image>", "<video>")
CHAT_TEMPLATE = Path(__file__).with_name("llava_video.jinja")
"""The chat template of the original code, for a tokenizer that has none."""

# The sizes of whole towers; the model leaves out the last layer.
_TOWERS: dict[str, dict[str, int]] = {
    "google/siglip-so400m-patch14-384": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    }
}

_CHOICES: dict[str, tuple[Any, ...]] = {
    "mm_spatial_pool_mode": ("average", "max", "bilinear"),
    "mm_newline_position": ("grid", "frame", "one_token", "no_token"),
    # The original code has further choices for these settings, which are not supported here.
    "mm_patch_merge_type": ("spatial_unpad",),
    "image_aspect_ratio": ("anyres_max_9",),
    "mm_projector_type": ("mlp2x_gelu",),
    "mm_resampler_type": (None, "spatial_pool"),  # the latter is made, but not called
    "add_faster_video": (False, None),
}

_TEXT_SETTINGS = {
    *(field.name for field in fields(Qwen2Config)),
    *("rope_theta", "rope_scaling"),  # the spelling of older configs
} - {field.name for field in fields(LlavaOnevisionConfig)}


@strict
class LlavaVideoConfig(LlavaOnevisionConfig):
    """The config of LLaVA-OneVision, with how frames are pooled and where newline tokens stand."""

    model_type = MODEL_TYPE

    text_config: Any = None
    vision_config: Any = None
    image_grid_pinpoints: Any = None
    mm_vision_tower: str = "google/siglip-so400m-patch14-384"
    mm_spatial_pool_mode: str = "bilinear"
    mm_spatial_pool_stride: Any = 2
    mm_newline_position: str = "one_token"
    mm_patch_merge_type: str = "spatial_unpad"
    image_aspect_ratio: str = "anyres_max_9"
    mm_projector_type: str = "mlp2x_gelu"
    mm_resampler_type: str | None = None
    add_faster_video: bool | None = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.text_config is None:
            own = {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "tie_word_embeddings": self.tie_word_embeddings,
            }
            self.text_config = Qwen2Config(**{**kwargs, **own})
        if self.vision_config is None:
            self.vision_config = self._known_tower()
        elif isinstance(self.vision_config, dict):
            self.vision_config = SiglipVisionConfig(**self.vision_config)
        self.vision_feature_layer = -2
        self._read_pinpoints()
        kwargs = {name: value for name, value in kwargs.items() if name not in _TEXT_SETTINGS}
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise ValueError if a setting has a value that cannot be served.

        Call this after vLLM has applied --hf-overrides, which it writes into the finished config.
        """
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"llava_qwen: {name} is {value!r}; this model can be served with "
                    f"{', '.join(map(repr, allowed))} (config.json, or --hf-overrides)"
                )
        for name in sorted(_TEXT_SETTINGS & vars(self).keys()):
            override = json.dumps({"text_config": {name: getattr(self, name)}})
            raise ValueError(
                f"llava_qwen: {name} is a setting of the text model; give --hf-overrides "
                f"'{override}'"
            )
        self._read_pinpoints()
        patches = self.vision_config.image_size // self.vision_config.patch_size
        stride = 2 if self.mm_spatial_pool_stride is None else self.mm_spatial_pool_stride
        if not isinstance(stride, int) or not 1 <= stride <= patches:
            raise ValueError(
                f"llava_qwen: mm_spatial_pool_stride is {stride!r}; give a whole number from 1 to "
                f"{patches}, the patches in a row of a frame"
            )
        self.mm_spatial_pool_stride = stride

    def _read_pinpoints(self) -> None:
        if isinstance(self.image_grid_pinpoints, str):
            tile = self.vision_config.image_size
            self.image_grid_pinpoints = read_pinpoints(self.image_grid_pinpoints, tile)

    def _known_tower(self) -> SiglipVisionConfig:
        if self.mm_vision_tower not in _TOWERS:
            raise ValueError(
                f"llava_qwen: the sizes of the vision tower {self.mm_vision_tower!r} "
                f"(mm_vision_tower) are not known; known: {', '.join(_TOWERS)}. Put them into "
                "config.json as vision_config"
            )
        return SiglipVisionConfig(**_TOWERS[self.mm_vision_tower])


def read_pinpoints(written: str, tile: int) -> list[list[int]]:
    """Return the grids of a range such as "(1x1),...,(6x6)" (rows x columns), in pixels."""
    pairs = re.findall(r"\((\d+)x(\d+)\)", written)
    if len(pairs) != 2:
        raise ValueError(
            f"llava_qwen: image_grid_pinpoints is {written!r}; give a list of [height, width] in "
            "pixels, or a range of grids such as '(1x1),...,(6x6)'"
        )
    first, last = ([int(number) for number in pair] for pair in pairs)
    return [
        [rows * tile, columns * tile]
        for rows in range(first[0], last[0] + 1)
        for columns in range(first[1], last[1] + 1)
    ]


class LlavaVideoTokenizer:
    """The checkpoint's tokenizer with the placeholders added, in which vLLM writes prompts."""

    @classmethod
    def from_pretrained(
        cls, path_or_id: str, *args: Any, download_dir: str | None = None, **kwargs: Any
    ) -> HfTokenizer:
        tokenizer = AutoTokenizer.from_pretrained(
            path_or_id, *args, cache_dir=download_dir, **kwargs
        )
        tokenizer.add_tokens(list(PLACEHOLDERS), special_tokens=True)
        return get_cached_tokenizer(tokenizer)
