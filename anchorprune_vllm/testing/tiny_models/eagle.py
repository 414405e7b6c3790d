# SPDX-License-Identifier: Apache-2.0
"""Eagle 2.5: InternVL's tiles and projector, with a SigLIP tower."""

from torch import nn
from transformers import (
    GotOcr2ImageProcessor,
    LlavaConfig,
    PreTrainedModel,
    QianfanOCRProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_TILE, _PATCH, _MAX_TILES = 112, 14, 6
_TOKENS = (_TILE // _PATCH // 2) ** 2


class Eagle2_5_VLForConditionalGeneration(PreTrainedModel):
    """Its weights alone: transformers has no class of it."""

    config_class = LlavaConfig  # the hub's comes with code of its own

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        inputs, outputs = 4 * config.vision_config.hidden_size, config.text_config.hidden_size
        self.vision_model = SiglipVisionModel(config.vision_config)
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(inputs),
            nn.Linear(inputs, outputs),
            nn.GELU(),
            nn.Linear(outputs, outputs),
        )
        self.language_model = Qwen2ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()


def eagle2_5() -> Checkpoint:
    tokenizer = make_tokenizer(
        ["<image>"],
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
    )
    size = {"height": _TILE, "width": _TILE}
    processor = QianfanOCRProcessor(
        image_processor=GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, min_patches=1, max_patches=_MAX_TILES
        ),
        tokenizer=tokenizer,
        image_seq_length=_TOKENS,
    )
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(
            **TOWER, image_size=_TILE, patch_size=_PATCH, vision_use_head=False
        ),
        text_config=text_config(Qwen2Config, tokenizer, architectures=["Qwen2ForCausalLM"]),
        image_token_index=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        tie_word_embeddings=False,
    )
    return Checkpoint(
        Eagle2_5_VLForConditionalGeneration,
        config,
        processor,
        image="<image>\n",
        visual_tokens=(112, 112),
        hub_names={
            "vision_model.embeddings.": "vision_model.vision_model.embeddings.",
            "vision_model.encoder.": "vision_model.vision_model.encoder.",
            "vision_model.post_layernorm.": "vision_model.vision_model.post_layernorm.",
        },
        config_json={
            "force_image_size": _TILE,
            "downsample_ratio": 0.5,
            "dynamic_image_size": True,
            "min_dynamic_patch": 1,
            "max_dynamic_patch": _MAX_TILES,
            "use_thumbnail": True,
            "select_layer": -1,
        },
    )
