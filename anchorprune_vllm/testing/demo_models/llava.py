# SPDX-License-Identifier: Apache-2.0
"""Tiny LLaVA checkpoints with their paired CLIP, in the hub's file format.

Files, names and shapes are those of llava-hf/llava-1.5-7b-hf, llava-hf/llava-v1.6-vicuna-7b-hf and
openai/clip-vit-large-patch14-336.
"""

import math
from pathlib import Path

from tokenizers import Tokenizer

from anchorprune_vllm.testing.demo_models import random_weights
from anchorprune_vllm.testing.demo_models.files import write_checkpoint
from anchorprune_vllm.testing.demo_models.random_weights import TINY, Config, Sizes, Weights
from anchorprune_vllm.testing.demo_models.tokenizers import (
    make_clip_tokenizer,
    make_llama_tokenizer,
)

PATCH = 14

# Images first, then the text, whatever their order in the message: so does the hub's template.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] != 'system' -%}{{ message['role'].upper() + ': ' }}{%- endif -%}
{%- for part in message['content'] if part['type'] == 'image' -%}{{ '<image>\\n' }}{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] + ' ' }}
{%- endfor -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""


# fmt: off


def clip_config(vocab_size: int, image_size: int, sizes: Sizes = TINY) -> Config:
    joint = sizes.text_encoder.get("projection_dim", 32)
    common = {"hidden_size": 64, "num_attention_heads": 4, "hidden_act": "quick_gelu",
              "layer_norm_eps": 1e-5, "projection_dim": joint}
    text = {"model_type": "clip_text_model", "intermediate_size": 128, "num_hidden_layers": 2,
            "max_position_embeddings": 77, "vocab_size": vocab_size,
            # Wrong ids, as on the hub: an end of 2 tells transformers to pool at the highest id.
            "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    vision = {"model_type": "clip_vision_model", "intermediate_size": 256, "num_hidden_layers": 4,
              "num_channels": 3, "image_size": image_size, "patch_size": PATCH}
    return {"architectures": ["CLIPModel"], "model_type": "clip", "dtype": "float32",
            "projection_dim": joint, "logit_scale_init_value": 2.6592,
            "text_config": common | text | sizes.text_encoder,
            "vision_config": common | vision | sizes.vision}


def llava_config(tokenizer: Tokenizer, vision_config: Config, sizes: Sizes = TINY) -> Config:
    text = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "vocab_size": math.ceil(tokenizer.get_vocab_size() / 64) * 64,  # padded, as on the hub
            **sizes.text}
    return {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
            "dtype": "float32", "ignore_index": -100, "tie_word_embeddings": False,
            "image_token_index": tokenizer.token_to_id("<image>"),
            "pad_token_id": tokenizer.token_to_id("<pad>"),
            "image_seq_length": (vision_config["image_size"] // PATCH) ** 2,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
            "text_config": text, "vision_config": vision_config}


def _llava_next_config(llava: Config) -> Config:
    """The grids are the hub's, in tiles of this size: 2, 4 or 3 crops beside the base view."""
    tile = llava["vision_config"]["image_size"]
    grids = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]
    return llava | {
        "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next",
        "image_grid_pinpoints": [[rows * tile, columns * tile] for rows, columns in grids],
        "use_image_newline_parameter": True}


def _image_processor_config(config: Config) -> Config:
    image_size = config["vision_config"]["image_size"]
    return {"image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True,
            "do_resize": True, "size": {"shortest_edge": image_size}, "resample": 3,
            "do_center_crop": True, "crop_size": {"height": image_size, "width": image_size},
            "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711]}


_CLIP_TOKENIZER_CONFIG = {
    "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>",
    "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
_LLAVA_TOKENIZER_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "model_max_length": 4096, "padding_side": "left", "clean_up_tokenization_spaces": False,
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
    "extra_special_tokens": {"image_token": "<image>"}}
_LLAVA_PROCESSOR_CONFIG = {
    "image_token": "<image>", "patch_size": PATCH,
    "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}


# fmt: on
def write_llava(directory: Path, seed: int, image_size: int, sizes: Sizes) -> None:
    """A LLaVA-1.5, and under it the CLIP that has the same vision tower."""
    _write(directory, seed, image_size, sizes, with_crops=False)


def write_llava_next(directory: Path, seed: int, image_size: int, sizes: Sizes) -> None:
    """A LLaVA-NeXT: the same weights, and the embedding that ends a row of patches."""
    _write(directory, seed, image_size, sizes, with_crops=True)


def _write(directory: Path, seed: int, image_size: int, sizes: Sizes, *, with_crops: bool) -> None:
    draw = random_weights.RandomWeights(seed)
    clip_tokenizer = make_clip_tokenizer()
    tokenizer = make_llama_tokenizer(["<image>", "<pad>"])
    paired = clip_config(clip_tokenizer.get_vocab_size(), image_size, sizes)
    config = llava_config(tokenizer, paired["vision_config"], sizes)
    tower = random_weights.vision_tower(draw, paired["vision_config"])
    clip = tower | random_weights.clip_without_vision_tower(draw, paired)
    llava = {f"vision_tower.{name}": weight for name, weight in tower.items()}
    llava |= random_weights.projector(draw, config)
    llava |= random_weights.language_model(draw, config["text_config"], tokenizer)
    if with_crops:
        config = _llava_next_config(config)
        llava["image_newline"] = draw.table(config["text_config"]["hidden_size"])
    write_clip_files(directory / "clip", paired, clip, clip_tokenizer)
    write_llava_files(directory, config, llava, tokenizer)


def write_clip_files(directory: Path, config: Config, clip: Weights, tokenizer: Tokenizer) -> None:
    """A CLIP, as on the hub."""
    write_checkpoint(
        directory,
        clip,
        {
            "config.json": config,
            "preprocessor_config.json": _image_processor_config(config),
            "tokenizer_config.json": _CLIP_TOKENIZER_CONFIG,
            "tokenizer.json": tokenizer.to_str(pretty=True),
        },
    )


def write_llava_files(
    directory: Path,
    config: Config,
    llava: Weights,
    tokenizer: Tokenizer,
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """A LLaVA-1.5 or LLaVA-NeXT, as on the hub."""
    processor, image_processor = "LlavaProcessor", _image_processor_config(config)
    if config["model_type"] == "llava_next":
        processor = "LlavaNextProcessor"
        image_processor |= {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": config["image_grid_pinpoints"],
        }
    specials = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": config["pad_token_id"]}
    write_checkpoint(
        directory,
        llava,
        {
            "config.json": config,
            "generation_config.json": specials,
            "preprocessor_config.json": image_processor,
            "processor_config.json": _LLAVA_PROCESSOR_CONFIG | {"processor_class": processor},
            "tokenizer_config.json": _LLAVA_TOKENIZER_CONFIG | {"processor_class": processor},
            "tokenizer.json": tokenizer.to_str(pretty=True),
            "chat_template.jinja": chat_template,
        },
    )
