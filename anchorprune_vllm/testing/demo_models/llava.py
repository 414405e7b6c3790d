# SPDX-License-Identifier: Apache-2.0
"""Tiny LLaVA-1.5, LLaVA-NeXT, LLaVA-OneVision and LLaVA-Video, with their CLIP or SigLIP.

Files, names and shapes are those of llava-hf/llava-1.5-7b-hf, llava-hf/llava-v1.6-vicuna-7b-hf,
llava-hf/llava-onevision-qwen2-7b-ov-hf, and lmms-lab/LLaVA-Video-7B-Qwen2. The last has the
original format: no processor, a flat configuration, and other names of weights.
"""

from pathlib import Path

from tokenizers import Tokenizer

from anchorprune_vllm.models.llava.llava_video_config import CHAT_TEMPLATE as VIDEO_CHAT_TEMPLATE
from anchorprune_vllm.testing.demo_models import text_encoders
from anchorprune_vllm.testing.demo_models.files import qwen_files, write_checkpoint_files
from anchorprune_vllm.testing.demo_models.random_weights import (
    TINY,
    Config,
    RandomWeights,
    Sizes,
    Weights,
    language_model,
)
from anchorprune_vllm.testing.demo_models.tokenizers import (
    QWEN_SPECIALS,
    make_llama_tokenizer,
    make_qwen_tokenizer,
    padded_vocabulary,
)
from anchorprune_vllm.testing.tiny_models.description import LANGUAGE_MODEL, MAX_LENGTH, PATCH

# Images first, then the text, whatever their order in the message, as in the hub's templates.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] != 'system' -%}{{ message['role'].upper() + ': ' }}{%- endif -%}
{%- for part in message['content'] if part['type'] == 'image' -%}{{ '<image>\\n' }}{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] + ' ' }}
{%- endfor -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""
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


def _config(
    architecture: str, model_type: str, tokenizer: Tokenizer, text: Config, vision: Config
) -> Config:
    return {"architectures": [architecture], "model_type": model_type, "dtype": "float32",
            "ignore_index": -100, "image_token_index": tokenizer.token_to_id("<image>"),
            "projector_hidden_act": "gelu", "tie_word_embeddings": False,
            "text_config": text, "vision_config": vision}


def llava_config(tokenizer: Tokenizer, vision_config: Config, sizes: Sizes = TINY) -> Config:
    """Return the configuration of a LLaVA-1.5."""
    text = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
            **LANGUAGE_MODEL, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
            "vocab_size": padded_vocabulary(tokenizer.get_vocab_size()), **sizes.text}
    architecture = "LlavaForConditionalGeneration"
    return _config(architecture, "llava", tokenizer, text, vision_config) | {
        "pad_token_id": tokenizer.token_to_id("<pad>"),
        "image_seq_length": (vision_config["image_size"] // PATCH) ** 2,
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default"}


def _llava_next_config(llava: Config) -> Config:
    tile = llava["vision_config"]["image_size"]
    # The hub's grids, in tiles of this size: 2, 4 or 3 crops beside the base view.
    grids = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]
    return llava | {
        "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next",
        "image_grid_pinpoints": [[rows * tile, columns * tile] for rows, columns in grids],
        "use_image_newline_parameter": True}


def _pinpoints(tile: int) -> list[list[int]]:
    """Return the sizes of all grids of up to 6 x 6 crops, as on the hub."""
    return [[rows * tile, columns * tile] for rows in range(1, 7) for columns in range(1, 7)]


def _qwen2_config(tokenizer: Tokenizer, sizes: Sizes, more_tokens: int = 0) -> Config:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32",
            **LANGUAGE_MODEL, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "tie_word_embeddings": False, "use_sliding_window": False,
            "max_position_embeddings": MAX_LENGTH,
            "vocab_size": padded_vocabulary(tokenizer.get_vocab_size() + more_tokens),
            "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"), **sizes.text}


def _onevision_config(tokenizer: Tokenizer, vision: Config, sizes: Sizes) -> Config:
    layers = vision["num_hidden_layers"] - 1  # without the last, which the model does not use
    vision = vision | {"num_hidden_layers": layers, "vision_use_head": False}
    text = _qwen2_config(tokenizer, sizes)
    architecture = "LlavaOnevisionForConditionalGeneration"
    return _config(architecture, "llava_onevision", tokenizer, text, vision) | {
        "video_token_index": tokenizer.token_to_id("<video>"),
        "image_grid_pinpoints": _pinpoints(vision["image_size"]),
        "use_image_newline_parameter": True, "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}


def _video_config(tokenizer: Tokenizer, vision: Config, sizes: Sizes) -> Config:
    return _qwen2_config(tokenizer, sizes, more_tokens=2) | {
        "architectures": ["LlavaQwenForCausalLM"], "model_type": "llava_qwen",
        # Not on the hub: there the tower's name tells its sizes, and the vocabulary is Qwen2's.
        "vision_config": vision,
        "image_token_index": tokenizer.get_vocab_size(),
        "video_token_index": tokenizer.get_vocab_size() + 1,
        "mm_vision_tower": "google/siglip-so400m-patch14-384",
        "mm_hidden_size": vision["hidden_size"],
        "mm_projector_type": "mlp2x_gelu", "mm_resampler_type": None,
        "mm_vision_select_layer": -2, "mm_vision_select_feature": "patch",
        "image_aspect_ratio": "anyres_max_9", "mm_patch_merge_type": "spatial_unpad",
        "image_grid_pinpoints": _pinpoints(vision["image_size"]),
        "mm_spatial_pool_mode": "average", "mm_spatial_pool_stride": 2,
        "mm_newline_position": "grid", "add_faster_video": False,
        "tokenizer_model_max_length": MAX_LENGTH}
# fmt: on


def write_llava(
    directory: Path, seed: int, image_size: int, sizes: Sizes, *, with_crops: bool = False
) -> None:
    """Write a LLaVA-1.5, and under it the CLIP that has the same vision tower.

    With crops it is a LLaVA-NeXT: the same weights, and an embedding that ends a row of patches.
    """
    draw = RandomWeights(seed)
    tokenizer = make_llama_tokenizer(["<image>", "<pad>"])
    vision, tower = text_encoders.write_clip(directory / "clip", draw, image_size, sizes)
    config = llava_config(tokenizer, vision, sizes)
    weights = _tower_and_projector(draw, config, tower)
    weights |= language_model(draw, config["text_config"], tokenizer, "language_model.", "▁", 0)
    if with_crops:
        config = _llava_next_config(config)
        weights["image_newline"] = draw.table(config["text_config"]["hidden_size"])
    write_llava_files(directory, config, weights, tokenizer)


def _tower_and_projector(draw: RandomWeights, config: Config, tower: Weights) -> Weights:
    hidden, visual = config["text_config"]["hidden_size"], config["vision_config"]["hidden_size"]
    return {
        **{f"vision_tower.{name}": weight for name, weight in tower.items()},
        **draw.linear("multi_modal_projector.linear_1", hidden, visual, bias=0.1),
        **draw.linear("multi_modal_projector.linear_2", hidden, hidden, bias=0.1),
    }


# fmt: off
def write_llava_files(
    directory: Path, config: Config, weights: Weights, tokenizer: Tokenizer,
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Write the files of a LLaVA-1.5 or LLaVA-NeXT."""
    pixels = text_encoders.clip_pixels(config["vision_config"]["image_size"])
    processor = {"processor_class": "LlavaProcessor"}
    if config["model_type"] == "llava_next":
        pixels |= {"image_processor_type": "LlavaNextImageProcessor",
                   "image_grid_pinpoints": config["image_grid_pinpoints"]}
        processor = {"processor_class": "LlavaNextProcessor"}
    write_checkpoint_files(directory, weights, {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2,
                                   "pad_token_id": config["pad_token_id"]},
        "preprocessor_config.json": pixels,
        "processor_config.json": {
            "image_token": "<image>", "patch_size": PATCH, "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default", **processor},
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer", "model_max_length": 4096, "padding_side": "left",
            "clean_up_tokenization_spaces": False, "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<unk>", "pad_token": "<pad>",
            "extra_special_tokens": {"image_token": "<image>"}, **processor},
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "chat_template.jinja": chat_template,
    })


def write_onevision(directory: Path, seed: int, image_size: int, sizes: Sizes) -> None:
    """Write a LLaVA-OneVision, and under it the SigLIP that has the same vision tower."""
    draw = RandomWeights(seed)
    specials = [*QWEN_SPECIALS, "<image>", "<video>"]
    tokenizer = make_qwen_tokenizer(specials)
    vision, tower = text_encoders.write_siglip(directory / "siglip", draw, image_size, sizes)
    config = _onevision_config(tokenizer, vision, sizes)
    text = config["text_config"]
    weights = _tower_and_projector(draw, config, tower)
    weights |= language_model(draw, text, tokenizer, "language_model.")
    weights["image_newline"] = draw.table(text["hidden_size"])
    processor: Config = {"processor_class": "LlavaOnevisionProcessor"}
    pixels = text_encoders.siglip_pixels(image_size) | processor
    files = qwen_files(text, tokenizer, specials, MAX_LENGTH)
    files["tokenizer_config.json"] |= processor
    write_checkpoint_files(directory, weights, files | {
        "config.json": config,
        "preprocessor_config.json": {
            **pixels, "image_processor_type": "LlavaOnevisionImageProcessor", "do_pad": True,
            "image_grid_pinpoints": config["image_grid_pinpoints"]},
        "video_preprocessor_config.json": {
            **pixels, "video_processor_type": "LlavaOnevisionVideoProcessor"},
        "processor_config.json": {
            **processor, "image_token": "<image>", "video_token": "<video>",
            "num_image_tokens": (image_size // PATCH) ** 2,
            "vision_feature_select_strategy": "full"},
        "chat_template.jinja": _ONEVISION_CHAT_TEMPLATE,
    })


def write_llava_video(directory: Path, seed: int, image_size: int, sizes: Sizes) -> None:
    """Write a LLaVA-Video in the original format, and under it its SigLIP."""
    draw = RandomWeights(seed)
    tokenizer = make_qwen_tokenizer(QWEN_SPECIALS)
    vision, tower = text_encoders.write_siglip(directory / "siglip", draw, image_size, sizes)
    config = _video_config(tokenizer, vision, sizes)
    hidden, visual = config["hidden_size"], config["mm_hidden_size"]
    weights = {f"model.vision_tower.vision_tower.{name}": weight for name, weight in tower.items()}
    weights |= draw.linear("model.mm_projector.0", hidden, visual, bias=0.1)
    weights |= draw.linear("model.mm_projector.2", hidden, hidden, bias=0.1)
    weights |= language_model(draw, config, tokenizer, "")
    weights["model.image_newline"] = draw.table(hidden)
    files = qwen_files(config, tokenizer, QWEN_SPECIALS, MAX_LENGTH)
    # The template knows nothing of media, as on the hub.
    template = VIDEO_CHAT_TEMPLATE.read_text(encoding="utf-8")
    files["tokenizer_config.json"] |= {"chat_template": template}
    write_checkpoint_files(directory, weights, files | {"config.json": config})
