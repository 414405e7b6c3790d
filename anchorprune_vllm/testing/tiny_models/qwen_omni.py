# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni and Qwen3-Omni: the part that sees, hears and answers in text."""

from typing import Any

from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5OmniConfig,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniTextConfig,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeTextConfig,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    Checkpoint,
    make_tokenizer,
    text_config,
)
from anchorprune_vllm.testing.tiny_models.qwen_vl import (
    DEEPSTACK_TEXT,
    DEEPSTACK_VISION,
    EXPERTS,
    WINDOWED_VISION,
    pixel_limits,
)

_IMAGE = "<|vision_bos|><|IMAGE|><|vision_eos|>"
_VIDEO = "<|vision_bos|><|VIDEO|><|vision_eos|>"
_AUDIO: dict[str, Any] = {
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    "output_dim": 128,
}
_PARTS = ("model.", "visual.", "audio_tower.", "lm_head.")


def qwen2_5_omni() -> Checkpoint:
    return _qwen2_5("Qwen2_5OmniModel")


def qwen2_5_omni_generation() -> Checkpoint:
    """Describe the same model under its other name."""
    return _qwen2_5("Qwen2_5OmniForConditionalGeneration")


def qwen3_omni_moe() -> Checkpoint:
    tokenizer = _tokenizer()
    token_id = tokenizer.convert_tokens_to_ids
    text = text_config(
        Qwen3OmniMoeTextConfig, tokenizer, **DEEPSTACK_TEXT, **EXPERTS, norm_topk_prob=True
    )
    thinker = Qwen3OmniMoeThinkerConfig(
        text_config=text.to_dict(),
        vision_config={"num_heads": 2, **DEEPSTACK_VISION},
        audio_config={**_AUDIO, "downsample_hidden_size": 16},
        image_token_id=token_id("<|IMAGE|>"),
        video_token_id=token_id("<|VIDEO|>"),
        audio_token_id=token_id("<|AUDIO|>"),
        audio_start_token_id=token_id("<|audio_bos|>"),
    )
    thinker.vision_config.image_size = 256  # as on the hub
    # vLLM looks for these in the configuration of the thinker.
    thinker.vision_start_token_id = token_id("<|vision_bos|>")
    thinker.vision_end_token_id = token_id("<|vision_eos|>")
    processor = Qwen3OmniMoeProcessor(
        Qwen2VLImageProcessor(**pixel_limits(16)),
        Qwen2VLVideoProcessor(**pixel_limits(16)),
        WhisperFeatureExtractor(feature_size=128),
        tokenizer,
    )
    return Checkpoint(
        Qwen3OmniMoeThinkerForConditionalGeneration,
        thinker,
        processor,
        image=_IMAGE,
        video=_VIDEO,
        visual_tokens=(54, 234),
        architecture="Qwen3OmniMoeForConditionalGeneration",
        whole_config=Qwen3OmniMoeConfig(
            thinker_config=thinker.to_dict(), enable_audio_output=False
        ),
        hub_names={part: f"thinker.{part}" for part in _PARTS},
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(
        image_token="<|IMAGE|>",
        audio_token="<|AUDIO|>",
        video_token="<|VIDEO|>",
        vision_bos_token="<|vision_bos|>",
        vision_eos_token="<|vision_eos|>",
        audio_bos_token="<|audio_bos|>",
        audio_eos_token="<|audio_eos|>",
    )


def _qwen2_5(architecture: str) -> Checkpoint:
    tokenizer = _tokenizer()
    token_id = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    thinker = Qwen2_5OmniThinkerConfig(
        text_config=text_config(Qwen2_5OmniTextConfig, tokenizer, rope_parameters=rope).to_dict(),
        vision_config=WINDOWED_VISION,
        audio_config=_AUDIO,
        image_token_index=token_id("<|IMAGE|>"),
        video_token_index=token_id("<|VIDEO|>"),
        audio_token_index=token_id("<|AUDIO|>"),
        audio_start_token_id=token_id("<|audio_bos|>"),
        audio_end_token_id=token_id("<|audio_eos|>"),
        vision_start_token_id=token_id("<|vision_bos|>"),
        vision_end_token_id=token_id("<|vision_eos|>"),
        tie_word_embeddings=False,
    )
    processor = Qwen2_5OmniProcessor(
        Qwen2VLImageProcessor(**pixel_limits(14)),
        Qwen2VLVideoProcessor(**pixel_limits(14)),
        WhisperFeatureExtractor(feature_size=128),
        tokenizer,
    )
    return Checkpoint(
        Qwen2_5OmniThinkerForConditionalGeneration,
        thinker,
        processor,
        image=_IMAGE,
        video=_VIDEO,
        visual_tokens=(77, 234),
        architecture=architecture,
        whole_config=Qwen2_5OmniConfig(thinker_config=thinker.to_dict(), enable_audio_output=False),
        hub_names={part: f"thinker.{part}" for part in _PARTS},
    )
