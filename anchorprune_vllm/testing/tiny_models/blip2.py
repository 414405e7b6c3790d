# SPDX-License-Identifier: Apache-2.0
"""BLIP-2: a Q-Former that asks with a fixed number of queries."""

from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessor,
    OPTConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_SIZE, _TOKENS = 112, 32


def blip2() -> Checkpoint:
    tokenizer = make_tokenizer(["<image>"])
    text = text_config(
        OPTConfig,
        tokenizer,
        ffn_dim=256,
        word_embed_proj_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    config = Blip2Config(
        vision_config={**TOWER, "image_size": _SIZE, "patch_size": 14},
        qformer_config={**TOWER, "encoder_hidden_size": TOWER["hidden_size"], "vocab_size": 100},
        text_config=text.to_dict(),
        num_query_tokens=_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    image_processor = BlipImageProcessor(size={"height": _SIZE, "width": _SIZE})
    return Checkpoint(
        Blip2ForConditionalGeneration,
        config,
        Blip2Processor(image_processor, tokenizer, num_query_tokens=_TOKENS),
        image="",  # its processor puts the image before all text
        visual_tokens=(32, 32),
        max_images=1,
    )
