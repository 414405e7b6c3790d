# SPDX-License-Identifier: Apache-2.0
"""Mistral Small 3.1 and LightOnOCR: Pixtral's tower, with a token at the end of each row."""

from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralImageProcessor,
    PixtralProcessor,
    PixtralVisionConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_LONGEST, _PATCH = 336, 14


def mistral3() -> Checkpoint:
    tokenizer = make_tokenizer(
        image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]"
    )
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**TOWER, image_size=_LONGEST, patch_size=_PATCH),
        text_config=text_config(MistralConfig, tokenizer, head_dim=64),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    image_processor = PixtralImageProcessor(size={"longest_edge": _LONGEST}, patch_size=_PATCH)
    return Checkpoint(
        Mistral3ForConditionalGeneration,
        config,
        PixtralProcessor(image_processor, tokenizer, patch_size=_PATCH, spatial_merge_size=2),
        image="[IMG]",
        visual_tokens=(88, 108),
    )
