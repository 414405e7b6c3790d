# SPDX-License-Identifier: Apache-2.0
"""Tiny LLaVA-OneVision and LLaVA-Video checkpoints with their paired SigLIP.

Files and names follow llava-hf/llava-onevision-qwen2-7b-ov-hf (transformers' format),
lmms-lab/LLaVA-Video-7B-Qwen2 (the original one: no processor, flat config, other names) and
google/siglip-so400m-patch14-384.
"""

import math
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from anchorprune_vllm.models.llava.llava_video_config import CHAT_TEMPLATE
from anchorprune_vllm.testing.demo_models import random_weights
from anchorprune_vllm.testing.demo_models.files import write_checkpoint
from anchorprune_vllm.testing.demo_models.random_weights import (
    Config,
    RandomWeights,
    Sizes,
    Weights,
)
from anchorprune_vllm.testing.demo_models.tokenizers import (
    make_qwen_tokenizer,
    make_siglip_tokenizer,
)

PATCH = 14
TEXT_ENCODER = "siglip"  # its directory, under the model's

# Media first, then the text, whatever their order in the message: so does the hub's template.
_ONEVISION_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}
{%- for part in message['content'] if part['type'] in ('image', 'video') -%}
{{ '<' + part['type'] + '>\\n' }}
{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
# fmt: off


def _siglip_config(vocab_size: int, image_size: int, sizes: Sizes) -> Config:
    common = {"hidden_size": 64, "num_attention_heads": 4, "hidden_act": "gelu_pytorch_tanh",
              "layer_norm_eps": 1e-6}
    text = {"model_type": "siglip_text_model", "intermediate_size": 128, "num_hidden_layers": 2,
            "max_position_embeddings": 64, "vocab_size": vocab_size,
            "projection_size": sizes.vision.get("hidden_size", 64),
            "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    vision = {"model_type": "siglip_vision_model", "intermediate_size": 256,
              "num_hidden_layers": 4, "num_channels": 3, "image_size": image_size,
              "patch_size": PATCH}
    return {"architectures": ["SiglipModel"], "model_type": "siglip", "dtype": "float32",
            "logit_scale_init_value": 2.6592,
            "text_config": common | text | sizes.text_encoder,
            "vision_config": common | vision | sizes.vision}


def _qwen2_config(tokenizer: Tokenizer, more_tokens: int, sizes: Sizes) -> Config:
    token_id = tokenizer.token_to_id
    vocab_size = math.ceil((tokenizer.get_vocab_size() + more_tokens) / 64) * 64  # padded, too
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32",
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
            "use_sliding_window": False, "max_position_embeddings": 8192,
            "vocab_size": vocab_size,
            "bos_token_id": token_id("<|endoftext|>"), "eos_token_id": token_id("<|im_end|>"),
            **sizes.text}


def _pinpoints(tile: int) -> list[list[int]]:
    """The hub's: all grids of up to 6 x 6 crops."""
    return [[rows * tile, columns * tile] for rows in range(1, 7) for columns in range(1, 7)]


def _onevision_config(tokenizer: Tokenizer, vision_config: Config, sizes: Sizes) -> Config:
    layers = vision_config["num_hidden_layers"] - 1  # without the last: the model does not use it
    vision_config = vision_config | {"num_hidden_layers": layers, "vision_use_head": False}
    return {"architectures": ["LlavaOnevisionForConditionalGeneration"],
            "model_type": "llava_onevision", "dtype": "float32", "ignore_index": -100,
            "image_token_index": tokenizer.token_to_id("<image>"),
            "video_token_index": tokenizer.token_to_id("<video>"),
            "image_grid_pinpoints": _pinpoints(vision_config["image_size"]),
            "projector_hidden_act": "gelu", "tie_word_embeddings": False,
            "use_image_newline_parameter": True, "vision_aspect_ratio": "anyres_max_9",
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
            "text_config": _qwen2_config(tokenizer, 0, sizes), "vision_config": vision_config}


def _video_config(tokenizer: Tokenizer, vision_config: Config, sizes: Sizes) -> Config:
    return _qwen2_config(tokenizer, 2, sizes) | {
        "architectures": ["LlavaQwenForCausalLM"], "model_type": "llava_qwen",
        # Not on the hub: there the tower's name tells its sizes, and the vocabulary is Qwen2's.
        "vision_config": vision_config,
        "image_token_index": tokenizer.get_vocab_size(),
        "video_token_index": tokenizer.get_vocab_size() + 1,
        "mm_vision_tower": "google/siglip-so400m-patch14-384",
        "mm_hidden_size": vision_config["hidden_size"],
        "mm_projector_type": "mlp2x_gelu", "mm_resampler_type": None,
        "mm_vision_select_layer": -2, "mm_vision_select_feature": "patch",
        "image_aspect_ratio": "anyres_max_9", "mm_patch_merge_type": "spatial_unpad",
        "image_grid_pinpoints": _pinpoints(vision_config["image_size"]),
        "mm_spatial_pool_mode": "average", "mm_spatial_pool_stride": 2,
        "mm_newline_position": "grid", "add_faster_video": False,
        "tokenizer_model_max_length": 8192}


def _image_processor_config(image_size: int) -> Config:
    return {"do_convert_rgb": True, "do_resize": True, "resample": 3,
            "size": {"height": image_size, "width": image_size},
            "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MEDIA_SPECIALS = ["<image>", "<video>"]
_TOKENIZER_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer", "model_max_length": 8192, "padding_side": "left",
    "clean_up_tokenization_spaces": False, "add_prefix_space": False, "bos_token": None,
    "unk_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_SIGLIP_TOKENIZER_CONFIG = {
    "tokenizer_class": "SiglipTokenizer", "model_max_length": 64, "do_lower_case": True,
    "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}


# fmt: on
def write_onevision(directory: Path, seed: int, image_size: int, sizes: Sizes) -> None:
    """A LLaVA-OneVision, and under it the SigLIP that has the same vision tower."""
    draw = RandomWeights(seed)
    tokenizer = make_qwen_tokenizer(_SPECIALS + _MEDIA_SPECIALS)
    siglip, tower = _write_siglip(directory, draw, image_size, sizes)
    config = _onevision_config(tokenizer, siglip["vision_config"], sizes)
    text_config = config["text_config"]
    weights = {f"vision_tower.{name}": weight for name, weight in tower.items()}
    weights |= random_weights.projector(draw, config)
    weights |= _qwen2_weights(draw, text_config, tokenizer, prefix="language_model.")
    weights["image_newline"] = draw.table(text_config["hidden_size"])
    processor = {"processor_class": "LlavaOnevisionProcessor"}
    media = {"image_token": "<image>", "video_token": "<video>"}
    pixels = _image_processor_config(image_size) | processor
    tokens = (image_size // PATCH) ** 2
    write_checkpoint(
        directory,
        weights,
        {
            "config.json": config,
            "generation_config.json": _generation_config(text_config),
            "preprocessor_config.json": pixels
            | {"image_processor_type": "LlavaOnevisionImageProcessor", "do_pad": True}
            | {"image_grid_pinpoints": config["image_grid_pinpoints"]},
            "video_preprocessor_config.json": pixels
            | {"video_processor_type": "LlavaOnevisionVideoProcessor"},
            "processor_config.json": processor
            | media
            | {"num_image_tokens": tokens, "vision_feature_select_strategy": "full"},
            "tokenizer_config.json": _TOKENIZER_CONFIG
            | processor
            | {"additional_special_tokens": _SPECIALS[1:] + _MEDIA_SPECIALS},
            "tokenizer.json": tokenizer.to_str(pretty=True),
            "chat_template.jinja": _ONEVISION_CHAT_TEMPLATE,
        },
    )


def write_llava_video(directory: Path, seed: int, image_size: int, sizes: Sizes) -> None:
    """A LLaVA-Video in the original format, and under it its SigLIP."""
    draw = RandomWeights(seed)
    tokenizer = make_qwen_tokenizer(_SPECIALS)
    siglip, tower = _write_siglip(directory, draw, image_size, sizes)
    config = _video_config(tokenizer, siglip["vision_config"], sizes)
    hidden, visual = config["hidden_size"], config["mm_hidden_size"]
    weights = {f"model.vision_tower.vision_tower.{name}": weight for name, weight in tower.items()}
    weights |= draw.linear("model.mm_projector.0", hidden, visual, bias=0.1)
    weights |= draw.linear("model.mm_projector.2", hidden, hidden, bias=0.1)
    weights |= _qwen2_weights(draw, config, tokenizer, prefix="")
    weights["model.image_newline"] = draw.table(hidden)
    write_checkpoint(
        directory,
        weights,
        {
            "config.json": config,
            "generation_config.json": _generation_config(config),
            "tokenizer_config.json": _TOKENIZER_CONFIG
            | {"additional_special_tokens": _SPECIALS[1:]}
            # It knows nothing of media, as on the hub.
            | {"chat_template": CHAT_TEMPLATE.read_text(encoding="utf-8")},
            "tokenizer.json": tokenizer.to_str(pretty=True),
        },
    )


def _write_siglip(
    model: Path, draw: RandomWeights, image_size: int, sizes: Sizes
) -> tuple[Config, Weights]:
    """The pair under a model's directory: its config, and of its tower all but the last layer."""
    tokenizer = make_siglip_tokenizer()
    directory = model / TEXT_ENCODER
    directory.mkdir(parents=True)
    (directory / "spiece.model").write_bytes(tokenizer)
    vocab_size = SentencePieceProcessor(model_proto=tokenizer).get_piece_size()
    config = _siglip_config(vocab_size, image_size, sizes)
    tower = random_weights.siglip_vision_tower(draw, config["vision_config"])
    write_checkpoint(
        directory,
        tower | random_weights.siglip_without_vision_tower(draw, config),
        {
            "config.json": config,
            "preprocessor_config.json": _image_processor_config(image_size)
            | {"image_processor_type": "SiglipImageProcessor"},
            "tokenizer_config.json": _SIGLIP_TOKENIZER_CONFIG,
        },
    )
    last = f"vision_model.encoder.layers.{config['vision_config']['num_hidden_layers'] - 1}."
    return config, {name: tensor for name, tensor in tower.items() if not name.startswith(last)}


def _qwen2_weights(
    draw: RandomWeights, config: Config, tokenizer: Tokenizer, prefix: str
) -> Weights:
    return random_weights.language_model(
        draw, config, tokenizer, prefix=prefix, space="Ġ", qkv_bias=0.5
    )


def _generation_config(config: Config) -> Config:
    ends = [config["eos_token_id"], config["bos_token_id"]]
    return {"pad_token_id": config["bos_token_id"], "eos_token_id": ends, "do_sample": False}
