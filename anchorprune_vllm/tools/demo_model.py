# SPDX-License-Identifier: Apache-2.0
"""A tiny LLaVA-1.5 and its paired CLIP, made in a second, without a GPU or a network.

Files, names and shapes are those of llava-hf/llava-1.5-7b-hf and openai/clip-vit-large-patch14-336,
so that vLLM and transformers load them like the real ones. The weights are random.
"""

import json
import math
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from anchorprune_vllm.tools import demo_weights
from anchorprune_vllm.tools.demo_tokenizers import make_clip_tokenizer, make_llama_tokenizer
from anchorprune_vllm.tools.demo_weights import Config, Weights

_RECIPE = 1  # raise it when the same parameters begin to give other bytes
_RECORD = "demo_model.json"
_PATCH = 14

# Images first, then the text, whatever their order in the message: so does the hub's template.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] != 'system' -%}{{ message['role'].upper() + ': ' }}{%- endif -%}
{%- for part in message['content'] if part['type'] == 'image' -%}{{ '<image>\\n' }}{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] + ' ' }}
{%- endfor -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""


def make_demo_model(directory: Path, *, seed: int = 0, image_size: int = 168) -> None:
    """Write the LLaVA to `directory` and its CLIP to `directory/clip`, unless they are there.

    Same arguments, same bytes. An image is (image_size / 14)² visual tokens. Answers are words and
    end only at `max_tokens`. The model appears under its name when it is complete, not before.
    Raises ValueError rather than overwrite anything.
    """
    if image_size < _PATCH or image_size % _PATCH:
        raise ValueError(f"image_size is {image_size}: give a positive multiple of {_PATCH}")
    directory = Path(directory).resolve()
    wanted = {"recipe": _RECIPE, "seed": seed, "image_size": image_size}
    if _is_complete(directory, wanted):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        model = Path(scratch) / "model"
        _write_llava(model, seed, image_size)
        _write_json(model / _RECORD, wanted | {"files": _file_sizes(model)})
        try:
            model.rename(directory)
        except OSError:  # another process may have been faster: its model is as good as ours
            if not _is_complete(directory, wanted):
                raise


def describe(directory: Path) -> str:
    """One line: architecture, visual tokens per image, parameters, size on disk."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model, clip = (
        sum(weight.numel() for weight in load_file(path / "model.safetensors").values()) / 1e6
        for path in (directory, directory / "clip")
    )
    return (
        f"{config['architectures'][0]}: {config['image_seq_length']} visual tokens per image, "
        f"{model:.2f} M parameters (and CLIP's {clip:.2f} M), "
        f"{sum(_file_sizes(directory).values()) / 1e6:.1f} MB on disk"
    )


def _is_complete(directory: Path, wanted: Config) -> bool:
    """Whether the wanted model is there; False if nothing is; ValueError if something else is."""
    if not directory.exists():
        return False
    remedy = "remove it, or choose another directory"
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file: {remedy}")
    found = sorted(path.name for path in directory.iterdir())
    if not found:
        return False
    if _RECORD not in found:
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise ValueError(f"{directory} is not a demo model, it holds {shown}: {remedy}")
    record = json.loads((directory / _RECORD).read_text(encoding="utf-8"))
    expected, present = record.pop("files"), _file_sizes(directory)
    if record != wanted:
        raise ValueError(f"{directory} is a demo model of {record}, not of {wanted}: {remedy}")
    damaged = sorted(name for name in expected if present.get(name) != expected[name])
    if damaged:
        raise ValueError(f"{directory}: {', '.join(damaged)} missing or changed: {remedy}")
    return True


def _file_sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


# --- files --------------------------------------------------------------------------------------
# fmt: off


def _clip_config(vocab_size: int, image_size: int) -> Config:
    common = {"hidden_size": 64, "num_attention_heads": 4, "hidden_act": "quick_gelu",
              "layer_norm_eps": 1e-5, "projection_dim": 32}
    text = {"model_type": "clip_text_model", "intermediate_size": 128, "num_hidden_layers": 2,
            "max_position_embeddings": 77, "vocab_size": vocab_size,
            # Wrong ids, as on the hub: an end of 2 tells transformers to pool at the highest id.
            "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    vision = {"model_type": "clip_vision_model", "intermediate_size": 256, "num_hidden_layers": 4,
              "num_channels": 3, "image_size": image_size, "patch_size": _PATCH}
    return {"architectures": ["CLIPModel"], "model_type": "clip", "dtype": "float32",
            "projection_dim": 32, "logit_scale_init_value": 2.6592,
            "text_config": common | text, "vision_config": common | vision}


def _llava_config(tokenizer: Tokenizer, vision_config: Config) -> Config:
    text = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "vocab_size": math.ceil(tokenizer.get_vocab_size() / 64) * 64}  # padded, as on the hub
    return {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
            "dtype": "float32", "ignore_index": -100, "tie_word_embeddings": False,
            "image_token_index": tokenizer.token_to_id("<image>"),
            "pad_token_id": tokenizer.token_to_id("<pad>"),
            "image_seq_length": (vision_config["image_size"] // _PATCH) ** 2,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
            "text_config": text, "vision_config": vision_config}


def _image_processor_config(image_size: int) -> Config:
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
    "tokenizer_class": "LlamaTokenizer", "processor_class": "LlavaProcessor",
    "model_max_length": 4096, "padding_side": "left", "clean_up_tokenization_spaces": False,
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
    "extra_special_tokens": {"image_token": "<image>"}}
_LLAVA_PROCESSOR_CONFIG = {
    "processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": _PATCH,
    "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}


# fmt: on
def _write_llava(directory: Path, seed: int, image_size: int) -> None:
    """The LLaVA, and under it the CLIP that has the same vision tower."""
    draw = demo_weights.RandomWeights(seed)
    clip_tokenizer = make_clip_tokenizer()
    tokenizer = make_llama_tokenizer(["<image>", "<pad>"])
    clip_config = _clip_config(clip_tokenizer.get_vocab_size(), image_size)
    config = _llava_config(tokenizer, clip_config["vision_config"])
    tower = demo_weights.vision_tower(draw, clip_config["vision_config"])
    clip = tower | demo_weights.clip_without_vision_tower(draw, clip_config)
    llava = {f"vision_tower.{name}": weight for name, weight in tower.items()}
    llava |= demo_weights.projector(draw, config)
    llava |= demo_weights.language_model(draw, config["text_config"], tokenizer)

    _write_checkpoint(directory, config, llava, tokenizer, _LLAVA_TOKENIZER_CONFIG)
    _write_json(directory / "processor_config.json", _LLAVA_PROCESSOR_CONFIG)
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
    specials = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": config["pad_token_id"]}
    _write_json(directory / "generation_config.json", specials)
    _write_checkpoint(directory / "clip", clip_config, clip, clip_tokenizer, _CLIP_TOKENIZER_CONFIG)


def _write_checkpoint(
    to: Path, config: Config, weights: Weights, tokenizer: Tokenizer, tokenizer_config: Config
) -> None:
    """What a checkpoint of any architecture with a CLIP tower consists of."""
    to.mkdir()
    image_size = config["vision_config"]["image_size"]
    _write_json(to / "config.json", config)
    _write_json(to / "preprocessor_config.json", _image_processor_config(image_size))
    _write_json(to / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(to / "tokenizer.json"))
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
