# SPDX-License-Identifier: Apache-2.0
"""Tiny CLIP and SigLIP checkpoints, which have the vision towers of the LLaVAs.

Files, names and shapes are those of openai/clip-vit-large-patch14-336 and
google/siglip-so400m-patch14-384.
"""

from pathlib import Path

import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from anchorprune_vllm.testing.demo_models.files import write_checkpoint_files
from anchorprune_vllm.testing.demo_models.random_weights import (
    TINY,
    Config,
    RandomWeights,
    Sizes,
    Weights,
)
from anchorprune_vllm.testing.demo_models.tokenizers import (
    make_clip_tokenizer,
    make_siglip_tokenizer,
)
from anchorprune_vllm.testing.tiny_models.description import PATCH, square

# All entries are written, as on the hub: where one is missing, vLLM may take another default than
# transformers (for the mean and deviation of pixels it does).
# fmt: off
_PIXELS: Config = {"do_convert_rgb": True, "do_resize": True, "resample": 3,
                   "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
CLIP_MEAN_AND_STD: Config = {"image_mean": [0.48145466, 0.4578275, 0.40821073],
                             "image_std": [0.26862954, 0.26130258, 0.27577711]}
_CLIP_TOKENIZER_CONFIG = {
    "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>",
    "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
_SIGLIP_TOKENIZER_CONFIG = {
    "tokenizer_class": "SiglipTokenizer", "model_max_length": 64, "do_lower_case": True,
    "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}


def clip_pixels(image_size: int) -> Config:
    """Return preprocessor_config.json for CLIP's towers."""
    return {"image_processor_type": "CLIPImageProcessor", **_PIXELS, **CLIP_MEAN_AND_STD,
            "size": {"shortest_edge": image_size},
            "do_center_crop": True, "crop_size": square(image_size)}


def siglip_pixels(image_size: int) -> Config:
    """Return what all preprocessor configurations for SigLIP's towers have."""
    return {**_PIXELS, "size": square(image_size),
            "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def clip_config(vocab_size: int, image_size: int, sizes: Sizes = TINY) -> Config:
    """Return the configuration of a CLIP."""
    joint = {"projection_dim": sizes.text_encoder.get("projection_dim", 32)}
    common = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, **joint}
    text = {"max_position_embeddings": 77, "vocab_size": vocab_size,
            # Wrong ids, as on the hub: an end of 2 tells transformers to pool at the highest id.
            "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    return _config("CLIPModel", image_size, sizes, common, text) | joint


def siglip_config(vocab_size: int, image_size: int, sizes: Sizes) -> Config:
    """Return the configuration of a SigLIP."""
    common = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
    text = {"max_position_embeddings": 64, "vocab_size": vocab_size,
            "projection_size": sizes.vision.get("hidden_size", 64),
            "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    return _config("SiglipModel", image_size, sizes, common, text)


def _config(
    architecture: str, image_size: int, sizes: Sizes, common: Config, text: Config
) -> Config:
    kind = architecture.removesuffix("Model").lower()
    common = {"hidden_size": 64, "num_attention_heads": 4, **common}
    text = {"model_type": f"{kind}_text_model", "intermediate_size": 128,
            "num_hidden_layers": 2, **text}
    vision = {"model_type": f"{kind}_vision_model", "intermediate_size": 256,
              "num_hidden_layers": 4, "num_channels": 3, "image_size": image_size,
              "patch_size": PATCH}
    return {"architectures": [architecture], "model_type": kind, "dtype": "float32",
            "logit_scale_init_value": 2.6592,
            "text_config": common | text | sizes.text_encoder,
            "vision_config": common | vision | sizes.vision}
# fmt: on


def _vision_tower(draw: RandomWeights, config: Config) -> Weights:
    """Return the weights of a vision tower, without SigLIP's pooling head."""
    is_clip = config["model_type"] == "clip_vision_model"
    hidden, patch = config["hidden_size"], config["patch_size"]
    positions = (config["image_size"] // patch) ** 2 + is_clip
    embeddings = "vision_model.embeddings"
    weights: Weights = {}
    if is_clip:
        weights[f"{embeddings}.class_embedding"] = draw.table(hidden)
    pixels = draw.table(hidden, 3, patch, patch, scale=0.04)
    weights[f"{embeddings}.patch_embedding.weight"] = pixels
    if not is_clip:
        weights[f"{embeddings}.patch_embedding.bias"] = draw.table(hidden, scale=0.1)
    weights[f"{embeddings}.position_embedding.weight"] = draw.table(positions, hidden, scale=0.4)
    if is_clip:
        weights |= draw.norm("vision_model.pre_layrnorm", hidden, bias=0.1)  # the hub spells it so
        weights |= _layers(draw, "vision_model", config, qk=1.5, vo=1.0)
    else:
        weights |= _layers(draw, "vision_model", config, qk=2.0, vo=1.0, qk_bias=1.0)
    # A large bias, the same for all patches, brings cosine distances down to around tau.
    return weights | draw.norm("vision_model.post_layernorm", hidden, bias=0.8)


def _layers(
    draw: RandomWeights, prefix: str, config: Config, qk: float, vo: float, qk_bias: float = 0.1
) -> Weights:
    """Return the layers of a tower.

    A high `qk` makes attention selective, a high `vo` makes it count. With a high `qk_bias`, which
    all queries share, they agree on what they look at.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    weights: Weights = {}
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}.encoder.layers.{i}"
        for name in ("q_proj", "k_proj"):
            weights |= draw.linear(f"{layer}.self_attn.{name}", hidden, hidden, qk, qk_bias)
        for name in ("v_proj", "out_proj"):
            weights |= draw.linear(f"{layer}.self_attn.{name}", hidden, hidden, vo, bias=0.1)
        weights |= draw.linear(f"{layer}.mlp.fc1", inner, hidden, bias=0.1)
        weights |= draw.linear(f"{layer}.mlp.fc2", hidden, inner, bias=0.1)
        weights |= draw.norm(f"{layer}.layer_norm1", hidden, bias=0.1)
        weights |= draw.norm(f"{layer}.layer_norm2", hidden, bias=0.1)
    return weights


def _text_tower(draw: RandomWeights, config: Config) -> Weights:
    """Return the weights of a text tower, and those that join it with the vision tower."""
    text, vision = config["text_config"], config["vision_config"]
    hidden, positions = text["hidden_size"], text["max_position_embeddings"]
    visual, inner = vision["hidden_size"], vision["intermediate_size"]
    is_clip = config["model_type"] == "clip"
    weights = _layers(draw, "text_model", text, qk=2.0, vo=1.5)
    weights |= draw.norm("text_model.final_layer_norm", hidden, bias=0.1)
    if is_clip:
        weights |= draw.linear("text_projection", config["projection_dim"], hidden)
        weights |= draw.linear("visual_projection", config["projection_dim"], visual)
    else:
        weights |= draw.linear("text_model.head", visual, hidden, bias=0.1)
    embeddings, head = "text_model.embeddings", "vision_model.head"
    weights |= {
        # Small, so that at the end token what attention brings outweighs the token itself.
        f"{embeddings}.token_embedding.weight": draw.table(text["vocab_size"], hidden, scale=0.3),
        f"{embeddings}.position_embedding.weight": draw.table(positions, hidden, scale=0.1),
    }
    scale = config["logit_scale_init_value"]
    if is_clip:
        return weights | {"logit_scale": torch.tensor(scale)}
    return weights | {
        f"{head}.probe": draw.table(1, 1, visual),
        f"{head}.attention.in_proj_weight": draw.table(3 * visual, visual, scale=visual**-0.5),
        f"{head}.attention.in_proj_bias": draw.table(3 * visual, scale=0.5),
        **draw.linear(f"{head}.attention.out_proj", visual, visual, bias=0.1),
        **draw.norm(f"{head}.layernorm", visual, bias=0.1),
        **draw.linear(f"{head}.mlp.fc1", inner, visual, bias=0.1),
        **draw.linear(f"{head}.mlp.fc2", visual, inner, bias=0.1),
        "logit_scale": torch.tensor([scale]),
        "logit_bias": torch.tensor([-10.0]),
    }


def write_clip(
    directory: Path, draw: RandomWeights, image_size: int, sizes: Sizes
) -> tuple[Config, Weights]:
    """Write a CLIP, and return the configuration and the weights of its vision tower."""
    tokenizer = make_clip_tokenizer()
    config = clip_config(tokenizer.get_vocab_size(), image_size, sizes)
    tower = _vision_tower(draw, config["vision_config"])
    weights = tower | _text_tower(draw, config)
    write_clip_files(directory, config, weights, tokenizer)
    return config["vision_config"], tower


def write_clip_files(
    directory: Path, config: Config, weights: Weights, tokenizer: Tokenizer
) -> None:
    """Write the files of a CLIP."""
    files = {
        "config.json": config,
        "preprocessor_config.json": clip_pixels(config["vision_config"]["image_size"]),
        "tokenizer_config.json": _CLIP_TOKENIZER_CONFIG,
        "tokenizer.json": tokenizer.to_str(pretty=True),
    }
    write_checkpoint_files(directory, weights, files)


def write_siglip(
    directory: Path, draw: RandomWeights, image_size: int, sizes: Sizes
) -> tuple[Config, Weights]:
    """Write a SigLIP, and return the configuration and the weights of its vision tower.

    The weights lack the last layer, which the models leave out.
    """
    tokenizer = make_siglip_tokenizer()
    vocab_size = SentencePieceProcessor(model_proto=tokenizer).get_piece_size()
    config = siglip_config(vocab_size, image_size, sizes)
    tower = _vision_tower(draw, config["vision_config"])
    pixels = siglip_pixels(image_size)
    files = {
        "config.json": config,
        "preprocessor_config.json": {"image_processor_type": "SiglipImageProcessor", **pixels},
        "tokenizer_config.json": _SIGLIP_TOKENIZER_CONFIG,
    }
    write_checkpoint_files(directory, tower | _text_tower(draw, config), files)
    (directory / "spiece.model").write_bytes(tokenizer)
    last = f"vision_model.encoder.layers.{config['vision_config']['num_hidden_layers'] - 1}."
    used = {name: weight for name, weight in tower.items() if not name.startswith(last)}
    return config["vision_config"], used
