# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen2.5-VL, with the files, names and shapes of Qwen/Qwen2.5-VL-7B-Instruct."""

from pathlib import Path

from tokenizers import Tokenizer

from anchorprune_vllm.testing.demo_models.files import qwen_files, write_checkpoint_files
from anchorprune_vllm.testing.demo_models.random_weights import (
    Config,
    RandomWeights,
    Sizes,
    Weights,
    language_model,
)
from anchorprune_vllm.testing.demo_models.text_encoders import CLIP_MEAN_AND_STD
from anchorprune_vllm.testing.demo_models.tokenizers import (
    QWEN_SPECIALS,
    chat_template,
    make_qwen_tokenizer,
    padded_vocabulary,
)
from anchorprune_vllm.testing.tiny_models.description import LANGUAGE_MODEL, MERGING_TOWER, PATCH

_MAX_LENGTH = 4096
_MEDIA_SPECIALS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "vision_token_id": "<|vision_pad|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
SPECIALS = [*QWEN_SPECIALS, *_MEDIA_SPECIALS.values()]
_CHAT_TEMPLATE = chat_template(
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
    system="You are a helpful assistant.",
)
# fmt: off


def qwen_config(tokenizer: Tokenizer, sizes: Sizes) -> Config:
    """Return the configuration of a Qwen2.5-VL."""
    token_id = tokenizer.token_to_id
    vision = {**MERGING_TOWER, "depth": 4, "num_heads": 4, "hidden_act": "silu", "in_chans": 3,
              "spatial_patch_size": PATCH, "window_size": 112, "fullatt_block_indexes": [1, 3],
              "tokens_per_second": 2, **sizes.vision}
    return {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
            "dtype": "float32", **LANGUAGE_MODEL, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "max_position_embeddings": _MAX_LENGTH,
            "use_sliding_window": False, "rope_theta": 1e6,
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
            "vocab_size": padded_vocabulary(tokenizer.get_vocab_size()),
            "bos_token_id": token_id("<|endoftext|>"), "eos_token_id": token_id("<|im_end|>"),
            **{name: token_id(token) for name, token in _MEDIA_SPECIALS.items()},
            "vision_config": vision, **sizes.text}
# fmt: on


def write_qwen2_5_vl(directory: Path, seed: int, image_size: int, sizes: Sizes) -> None:
    """Write a Qwen2.5-VL that scales images to (2 · image_size)² to (6 · image_size)² pixels.

    So a small square one has (image_size / 14)² visual tokens, as with the LLaVAs.
    """
    draw = RandomWeights(seed)
    tokenizer = make_qwen_tokenizer(SPECIALS)
    config = qwen_config(tokenizer, sizes)
    weights = _vision_tower(draw, config["vision_config"])
    weights |= language_model(draw, config, tokenizer, "")
    pixels = (2 * image_size) ** 2, (6 * image_size) ** 2
    write_qwen_files(directory, config, weights, tokenizer, pixels)


def _vision_tower(draw: RandomWeights, config: Config) -> Weights:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    patch, frames = config["patch_size"], config["temporal_patch_size"]
    merged, out = hidden * config["spatial_merge_size"] ** 2, config["out_hidden_size"]
    weights = {
        "visual.patch_embed.proj.weight": draw.table(hidden, 3, frames, patch, patch, scale=0.03),
        **draw.norm("visual.merger.ln_q", hidden),
        **draw.linear("visual.merger.mlp.0", merged, merged, bias=0.1),
        # A bias, the same for all tokens, brings cosine distances down to around tau.
        **draw.linear("visual.merger.mlp.2", out, merged, bias=0.5),
    }
    for i in range(config["depth"]):
        block = f"visual.blocks.{i}"
        # All queries share the bias, so they agree on the patches they look at.
        weights |= draw.linear(f"{block}.attn.qkv", 3 * hidden, hidden, 2.5, bias=1.5)
        weights |= draw.linear(f"{block}.attn.proj", hidden, hidden, bias=0.1)
        weights |= draw.linear(f"{block}.mlp.gate_proj", inner, hidden, bias=0.1)
        weights |= draw.linear(f"{block}.mlp.up_proj", inner, hidden, bias=0.1)
        weights |= draw.linear(f"{block}.mlp.down_proj", hidden, inner, bias=0.1)
        weights |= draw.norm(f"{block}.norm1", hidden)
        weights |= draw.norm(f"{block}.norm2", hidden)
    return weights


# fmt: off
def write_qwen_files(
    directory: Path, config: Config, weights: Weights, tokenizer: Tokenizer,
    pixels: tuple[int, int],
) -> None:
    """Write the files of a Qwen2.5-VL that scales images to between this many pixels."""
    files = qwen_files(config, tokenizer, SPECIALS, _MAX_LENGTH)
    files["generation_config.json"]["bos_token_id"] = config["bos_token_id"]
    processor = {"processor_class": "Qwen2_5_VLProcessor"}
    files["tokenizer_config.json"] |= processor
    write_checkpoint_files(directory, weights, files | {
        "config.json": config,
        # For videos too: the hub has no other file for them.
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor", **processor, **CLIP_MEAN_AND_STD,
            "min_pixels": pixels[0], "max_pixels": pixels[1], "patch_size": PATCH,
            "temporal_patch_size": 2, "merge_size": config["vision_config"]["spatial_merge_size"]},
        "chat_template.jinja": _CHAT_TEMPLATE,
    })
