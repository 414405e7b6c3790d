# SPDX-License-Identifier: Apache-2.0
"""PaliGemma: images come before the text."""

from transformers import (
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    SIGLIP_ON_THE_HUB,
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_SIZE, _PATCH = 112, 14


def paligemma() -> Checkpoint:
    tokenizer = make_tokenizer(words=["\n"], bos="<bos>", image_token="<image>")
    vision = SiglipVisionConfig(
        **TOWER, image_size=_SIZE, patch_size=_PATCH, vision_use_head=False, projection_dim=128
    )
    text = text_config(GemmaConfig, tokenizer, head_dim=64)
    config = PaliGemmaConfig(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=128,
        tie_word_embeddings=False,
    )
    image_processor = SiglipImageProcessor(size={"height": _SIZE, "width": _SIZE})
    image_processor.image_seq_length = (_SIZE // _PATCH) ** 2
    return Checkpoint(
        PaliGemmaForConditionalGeneration,
        config,
        PaliGemmaProcessor(image_processor, tokenizer),
        image="<image>",
        visual_tokens=(64, 64),
        max_images=1,
        hub_names=SIGLIP_ON_THE_HUB,
    )
