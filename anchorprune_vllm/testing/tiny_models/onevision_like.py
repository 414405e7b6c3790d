# SPDX-License-Identifier: Apache-2.0
"""R-4B and Bee: LLaVA-OneVision with another projector and LLaVA-NeXT's processor, images alone."""

from torch import Tensor, nn
from transformers import (
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedModel,
    Qwen3Config,
    SiglipVisionConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    SIGLIP_ON_THE_HUB,
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_TILE, _PATCH = 112, 14
_PINPOINTS = [[_TILE, 2 * _TILE], [2 * _TILE, _TILE], [2 * _TILE, 2 * _TILE]]


class _Projector(nn.Module):
    """Two layers behind a norm."""

    def __init__(self, config: LlavaOnevisionConfig, factor: int) -> None:
        super().__init__()
        inputs, outputs = config.vision_config.hidden_size, config.text_config.hidden_size
        self.pre_norm = nn.LayerNorm(inputs, eps=1e-6)
        self.linear_1 = nn.Linear(inputs, factor * outputs)
        self.linear_2 = nn.Linear(factor * outputs, outputs)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.linear_1(self.pre_norm(rows)))
        return self.linear_2(hidden)


class RForConditionalGeneration(LlavaOnevisionForConditionalGeneration):
    """R-4B: transformers has no class of it."""

    factor = 1
    """How much wider the projector is inside than the language model."""

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        super().__init__(config)
        self.model.multi_modal_projector = _Projector(config, self.factor)


class BeeForConditionalGeneration(RForConditionalGeneration):
    """Bee-8B: the same with a wider projector."""

    factor = 4


def r_vl() -> Checkpoint:
    return _checkpoint(RForConditionalGeneration)


def bee() -> Checkpoint:
    return _checkpoint(BeeForConditionalGeneration)


def _checkpoint(model_class: type[PreTrainedModel]) -> Checkpoint:
    tokenizer = make_tokenizer(image_token="<image>")
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(
            **TOWER, image_size=_TILE, patch_size=_PATCH, vision_use_head=False
        ).to_dict(),
        text_config=text_config(Qwen3Config, tokenizer, head_dim=64).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    processor = LlavaNextProcessor(
        LlavaNextImageProcessor(
            size={"shortest_edge": _TILE},
            crop_size={"height": _TILE, "width": _TILE},
            image_grid_pinpoints=_PINPOINTS,
        ),
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="full",
    )
    return Checkpoint(
        model_class,
        config,
        processor,
        image="<image>\n",
        visual_tokens=(234, 268),
        hub_names={**SIGLIP_ON_THE_HUB, "language_model.model.": "language_model."},
    )
