# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen2.5-VL checkpoint, in the hub's file format.

Files, names and shapes are those of Qwen/Qwen2.5-VL-7B-Instruct.
"""

import math
from pathlib import Path

from tokenizers import Tokenizer

from anchorprune_vllm.testing.demo_models import random_weights
from anchorprune_vllm.testing.demo_models.files import write_checkpoint
from anchorprune_vllm.testing.demo_models.random_weights import Config, Sizes, Weights
from anchorprune_vllm.testing.demo_models.tokenizers import make_qwen_tokenizer

_PATCH = 14

# Pictures, videos and text in the order of the message: so does the hub's template.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part['type'] == 'text' -%}{{ part['text'] }}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


# fmt: off


def qwen_config(tokenizer: Tokenizer, sizes: Sizes) -> Config:
    token_id = tokenizer.token_to_id
    vision = {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128,
              "hidden_act": "silu", "in_chans": 3, "out_hidden_size": 128, "patch_size": _PATCH,
              "spatial_patch_size": _PATCH, "temporal_patch_size": 2, "spatial_merge_size": 2,
              "window_size": 112, "fullatt_block_indexes": [1, 3], "tokens_per_second": 2,
              **sizes.vision}
    return {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
            "dtype": "float32", "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "max_position_embeddings": 4096, "use_sliding_window": False,
            "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
            "vocab_size": math.ceil(tokenizer.get_vocab_size() / 64) * 64,  # padded, as on the hub
            "bos_token_id": token_id("<|endoftext|>"), "eos_token_id": token_id("<|im_end|>"),
            "vision_start_token_id": token_id("<|vision_start|>"),
            "vision_end_token_id": token_id("<|vision_end|>"),
            "vision_token_id": token_id("<|vision_pad|>"),
            "image_token_id": token_id("<|image_pad|>"),
            "video_token_id": token_id("<|video_pad|>"),
            "vision_config": vision, **sizes.text}


def _image_processor_config(min_pixels: int, max_pixels: int, merge: int) -> Config:
    """For videos too: the hub has no other file for them."""
    return {"image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": min_pixels, "max_pixels": max_pixels,
            "patch_size": _PATCH, "temporal_patch_size": 2, "merge_size": merge,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711]}


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
             "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
_TOKENIZER_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer", "processor_class": "Qwen2_5_VLProcessor",
    "model_max_length": 4096, "padding_side": "left", "clean_up_tokenization_spaces": False,
    "add_prefix_space": False, "bos_token": None, "unk_token": None,
    "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    "additional_special_tokens": SPECIALS[1:]}


# fmt: on
def write_qwen2_5_vl(directory: Path, seed: int, image_size: int, sizes: Sizes) -> None:
    """A Qwen2.5-VL. Pictures are scaled to between (2 · image_size)² and (6 · image_size)² pixels.

    A small square one has so (image_size / 14)² visual tokens, as those of the LLaVAs.
    """
    draw = random_weights.RandomWeights(seed)
    tokenizer = make_qwen_tokenizer(SPECIALS)
    config = qwen_config(tokenizer, sizes)
    weights = random_weights.qwen_vision_tower(draw, config["vision_config"])
    weights |= random_weights.language_model(
        draw, config, tokenizer, prefix="", space="Ġ", qkv_bias=0.5
    )
    pixels = (2 * image_size) ** 2, (6 * image_size) ** 2
    write_qwen_files(directory, config, weights, tokenizer, pixels)


def write_qwen_files(
    directory: Path,
    config: Config,
    weights: Weights,
    tokenizer: Tokenizer,
    pixels: tuple[int, int],
) -> None:
    """A Qwen2.5-VL, as on the hub; pixels: the least and the most that an image is scaled to."""
    specials = {"bos_token_id": config["bos_token_id"], "pad_token_id": config["bos_token_id"]}
    ends = [config["eos_token_id"], config["bos_token_id"]]
    merge = config["vision_config"]["spatial_merge_size"]
    write_checkpoint(
        directory,
        weights,
        {
            "config.json": config,
            "generation_config.json": specials | {"eos_token_id": ends, "do_sample": False},
            "preprocessor_config.json": _image_processor_config(*pixels, merge),
            "tokenizer_config.json": _TOKENIZER_CONFIG,
            "tokenizer.json": tokenizer.to_str(pretty=True),
            "chat_template.jinja": _CHAT_TEMPLATE,
        },
    )
