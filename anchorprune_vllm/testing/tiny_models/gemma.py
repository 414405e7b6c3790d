# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, Gemma 4 and its form without a tower."""

from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma3TextConfig,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4TextConfig,
    Gemma4UnifiedAudioFeatureExtractor,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedImageProcessor,
    Gemma4UnifiedProcessor,
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedVideoProcessor,
    Gemma4UnifiedVisionConfig,
    Gemma4VideoProcessor,
    Gemma4VisionConfig,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    SIGLIP_ON_THE_HUB,
    TOWER,
    Checkpoint,
    make_tokenizer,
    padded_vocabulary,
    text_config,
)

_GEMMA4_TOKENS = 70  # of those that its processor allows, the fewest
_TEXT_OF_GEMMA4: dict[str, Any] = {
    "head_dim": 64,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}


def gemma3() -> Checkpoint:
    # vLLM looks for lines' ends that became one token, next to an image.
    tokenizer = make_tokenizer(
        bos="<bos>",
        words=["\n" * count for count in range(1, 5)],
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    token_id = tokenizer.convert_tokens_to_ids
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(
            **TOWER, image_size=224, patch_size=14, vision_use_head=False
        ),
        text_config=text_config(
            Gemma3TextConfig,
            tokenizer,
            head_dim=64,
            query_pre_attn_scalar=2,  # sharp: images and questions hardly count else
            sliding_window=512,
        ),
        mm_tokens_per_image=64,
        boi_token_index=token_id("<start_of_image>"),
        eoi_token_index=token_id("<end_of_image>"),
        image_token_index=token_id("<image_soft_token>"),
        tie_word_embeddings=False,
    )
    image_processor = Gemma3ImageProcessor(size={"height": 224, "width": 224})
    return Checkpoint(
        Gemma3ForConditionalGeneration,
        config,
        Gemma3Processor(image_processor, tokenizer, image_seq_length=64),
        image="<start_of_image>",
        visual_tokens=(64, 64),
        hub_names=SIGLIP_ON_THE_HUB,
    )


def gemma4() -> Checkpoint:
    tokenizer = _tokenizer_of_gemma4()
    text = text_config(
        Gemma4TextConfig,
        tokenizer,
        **_TEXT_OF_GEMMA4,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=padded_vocabulary(tokenizer),
    )
    vision = Gemma4VisionConfig(
        **TOWER,
        num_key_value_heads=2,
        head_dim=32,
        patch_size=16,
        position_embedding_size=256,
        pooling_kernel_size=3,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    vision.default_output_length = _GEMMA4_TOKENS
    config = Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        **_ids_of_gemma4(tokenizer),
        tie_word_embeddings=False,
    )
    processor = Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(max_soft_tokens=_GEMMA4_TOKENS),
        tokenizer,
        Gemma4VideoProcessor(),
        image_seq_length=_GEMMA4_TOKENS,
    )
    return Checkpoint(
        Gemma4ForConditionalGeneration,
        config,
        processor,
        image="<|image|>",
        video="<|video|>",
        visual_tokens=(60, 63),
    )


def gemma4_unified() -> Checkpoint:
    """Describe a model without a tower: patches become rows one by one."""
    tokenizer = _tokenizer_of_gemma4()
    config = Gemma4UnifiedConfig(
        text_config=text_config(Gemma4UnifiedTextConfig, tokenizer, **_TEXT_OF_GEMMA4),
        vision_config=Gemma4UnifiedVisionConfig(
            patch_size=16,
            pooling_kernel_size=3,
            model_patch_size=48,
            mm_embed_dim=64,
            mm_posemb_size=64,
            output_proj_dims=64,
            num_soft_tokens=_GEMMA4_TOKENS,
        ),
        audio_config=None,
        **_ids_of_gemma4(tokenizer),
        tie_word_embeddings=False,
    )
    processor = Gemma4UnifiedProcessor(
        Gemma4UnifiedAudioFeatureExtractor(),
        Gemma4UnifiedImageProcessor(max_soft_tokens=_GEMMA4_TOKENS),
        tokenizer,
        Gemma4UnifiedVideoProcessor(),
        image_seq_length=_GEMMA4_TOKENS,
    )
    return Checkpoint(
        Gemma4UnifiedForConditionalGeneration,
        config,
        processor,
        image="<|image|>",
        video="<|video|>",
        visual_tokens=(60, 63),
    )


def _tokenizer_of_gemma4() -> PreTrainedTokenizerFast:
    return make_tokenizer(
        bos="<bos>",
        image_token="<|image|>",
        boi_token="<|image>",
        eoi_token="<image|>",
        video_token="<|video|>",
        audio_token="<|audio|>",
        boa_token="<|audio>",
        eoa_token="<audio|>",
    )


def _ids_of_gemma4(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    tokens = {
        "image_token_id": "<|image|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "video_token_id": "<|video|>",
        "audio_token_id": "<|audio|>",
        "boa_token_id": "<|audio>",
        "eoa_token_index": "<audio|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
