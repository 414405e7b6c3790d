# SPDX-License-Identifier: Apache-2.0
"""A tiny LLaVA-1.5 and its paired CLIP, made in a second, without a GPU or a network.

Files, names and shapes are those of llava-hf/llava-1.5-7b-hf and openai/clip-vit-large-patch14-336,
so that vLLM and transformers load them like the real ones. The weights are random, but scaled so
that answers depend on picture and question, and the signals of pruning are far from uniform.
"""

import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as splitters
from tokenizers import processors as wrappers

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]

_RECIPE = 1  # raise it when the same parameters begin to give other bytes
_RECORD = "demo_model.json"
_PATCH = 14

# The answers' vocabulary. Each is one token, and so are the words that often begin a prompt.
_WORDS = """
a an the is are was it this that there here what which who where when why how many much not no yes
and or of in on at by to from with under over near behind between left right top bottom middle
one two three four five six seven eight nine ten zero some all none more less both other same
red green blue yellow black white orange purple brown gray pink color colour bright dark light
circle square triangle rectangle shape line dot corner edge picture image photo scene background
big small large tiny tall short long wide thin round old young new hot cold wet dry fast slow
dog cat bird horse cow sheep fish bear lion tree flower grass leaf river lake sea sky cloud sun moon
star mountain road street car bus train truck bike boat plane bridge house door window roof wall
table chair bed lamp book cup plate bottle phone clock hat shirt shoe coat bag ball box key sign
man woman boy girl child person people hand head face eye hair standing sitting walking running
holding looking eating playing wearing riding sleeping see show tell describe count read name say
"""
_PROMPT_WORDS = "USER ASSISTANT What Which Who Where When Why How Is Are Does Describe Read"

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


# --- tokenizers ---------------------------------------------------------------------------------


def _learn_merges(words: list[str], suffix: str = "") -> list[tuple[str, str]]:
    """Byte-pair merges, learned until every word is one token."""
    learner = Tokenizer(models.BPE(end_of_word_suffix=suffix))
    learner.pre_tokenizer = splitters.WhitespaceSplit()
    # Ties go by id, and the ids of suffixed letters by the order of a hash map, unless given.
    endings = sorted({word[-1] + suffix for word in words})
    trainer = trainers.BpeTrainer(
        vocab_size=10**5, end_of_word_suffix=suffix, special_tokens=endings, show_progress=False
    )
    learner.train_from_iterator(words, trainer)
    return [(a, b) for a, b in json.loads(learner.to_str())["model"]["merges"]]


def _number(*groups: Iterable[str]) -> dict[str, int]:
    """Token → id, in order of first appearance."""
    tokens = dict.fromkeys(token for group in groups for token in group)
    return {token: i for i, token in enumerate(tokens)}


def _llama_tokenizer(extra_specials: list[str]) -> Tokenizer:
    """Llama's pipeline: `▁` for a space, bytes for unknown characters, `<s>` put before."""
    words = ["▁" + word for word in (_WORDS + _PROMPT_WORDS).split()]
    merges = _learn_merges(words + _PROMPT_WORDS.split())
    specials = ["<unk>", "<s>", "</s>"]
    characters = ["▁", *map(chr, range(33, 127))]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = _number(specials, bytes_, (a + b for a, b in merges), characters)
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    to_pieces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(to_pieces)
    to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = wrappers.TemplateProcessing("<s> $A", None, [("<s>", ids["<s>"])])
    specials += extra_specials
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return tokenizer


def _clip_tokenizer() -> Tokenizer:
    """CLIP's pipeline: lower case, bytes, `</w>` at the end of a word, start and end token."""
    merges = _learn_merges(_WORDS.split(), suffix="</w>")
    letters = sorted(splitters.ByteLevel.alphabet())
    last_letters = [letter + "</w>" for letter in letters]
    start, end = "<|startoftext|>", "<|endoftext|>"
    # The end token has the highest id: there CLIP pools (see _clip_config).
    ids = _number(letters, last_letters, (a + b for a, b in merges), [start, end])
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=end, end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    word = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    split = splitters.Split(word, behavior="removed", invert=True)
    to_bytes = splitters.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = splitters.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = wrappers.RobertaProcessing(
        (end, ids[end]), (start, ids[start]), trim_offsets=False, add_prefix_space=False
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (start, end)])
    return tokenizer


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
    draw = _Random(seed)
    clip_tokenizer, tokenizer = _clip_tokenizer(), _llama_tokenizer(["<image>", "<pad>"])
    clip_config = _clip_config(clip_tokenizer.get_vocab_size(), image_size)
    config = _llava_config(tokenizer, clip_config["vision_config"])
    tower = _vision_tower(draw, clip_config["vision_config"])
    clip = tower | _clip_without_vision_tower(draw, clip_config)
    llava = {f"vision_tower.{name}": weight for name, weight in tower.items()}
    llava |= _projector(draw, config) | _language_model(draw, config["text_config"], tokenizer)

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


# --- weights ------------------------------------------------------------------------------------


class _Random:
    """One seeded stream of weights."""

    def __init__(self, seed: int) -> None:
        self._stream = torch.Generator().manual_seed(seed)

    def table(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self._stream) * scale

    def linear(self, name: str, out: int, in_: int, gain: float = 1, bias: float = 0) -> Weights:
        """Outputs have `gain` times the deviation of the inputs."""
        return self._layer(name, self.table(out, in_, scale=gain * in_**-0.5), bias)

    def norm(self, name: str, size: int, bias: float = 0) -> Weights:
        """Not the identity, so that a norm left out shows."""
        return self._layer(name, 1 + self.table(size, scale=0.2), bias)

    def _layer(self, name: str, weight: torch.Tensor, bias: float) -> Weights:
        biases = {f"{name}.bias": self.table(len(weight), scale=bias)} if bias else {}
        return {f"{name}.weight": weight, **biases}


def _clip_layers(draw: _Random, prefix: str, config: Config, qk: float, vo: float) -> Weights:
    """The encoder layers of either tower. High `qk`: attention chooses; high `vo`: it counts."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    weights: Weights = {}
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}.encoder.layers.{i}"
        for name, gain in {"q_proj": qk, "k_proj": qk, "v_proj": vo, "out_proj": vo}.items():
            weights |= draw.linear(f"{layer}.self_attn.{name}", hidden, hidden, gain, bias=0.1)
        weights |= draw.linear(f"{layer}.mlp.fc1", inner, hidden, bias=0.1)
        weights |= draw.linear(f"{layer}.mlp.fc2", hidden, inner, bias=0.1)
        weights |= draw.norm(f"{layer}.layer_norm1", hidden, bias=0.1)
        weights |= draw.norm(f"{layer}.layer_norm2", hidden, bias=0.1)
    return weights


def _vision_tower(draw: _Random, config: Config) -> Weights:
    hidden, patch = config["hidden_size"], config["patch_size"]
    positions = (config["image_size"] // patch) ** 2 + 1
    embeddings = "vision_model.embeddings"
    return {
        f"{embeddings}.class_embedding": draw.table(hidden),
        f"{embeddings}.patch_embedding.weight": draw.table(hidden, 3, patch, patch, scale=0.04),
        f"{embeddings}.position_embedding.weight": draw.table(positions, hidden, scale=0.4),
        **draw.norm("vision_model.pre_layrnorm", hidden, bias=0.1),  # the hub spells it so
        **_clip_layers(draw, "vision_model", config, qk=1.5, vo=1.0),
        # A large bias, the same for all patches, brings cosine distances down to around tau.
        **draw.norm("vision_model.post_layernorm", hidden, bias=0.8),
    }


def _clip_without_vision_tower(draw: _Random, config: Config) -> Weights:
    text, joint = config["text_config"], config["projection_dim"]
    hidden, positions = text["hidden_size"], text["max_position_embeddings"]
    embeddings = "text_model.embeddings"
    return {
        **_clip_layers(draw, "text_model", text, qk=2.0, vo=1.5),
        **draw.norm("text_model.final_layer_norm", hidden, bias=0.1),
        **draw.linear("text_projection", joint, hidden),
        **draw.linear("visual_projection", joint, config["vision_config"]["hidden_size"]),
        # Small, so that at the end token what attention brings outweighs the token itself.
        f"{embeddings}.token_embedding.weight": draw.table(text["vocab_size"], hidden, scale=0.3),
        f"{embeddings}.position_embedding.weight": draw.table(positions, hidden, scale=0.1),
        "logit_scale": torch.tensor(config["logit_scale_init_value"]),
    }


def _projector(draw: _Random, config: Config) -> Weights:
    hidden, visual = config["text_config"]["hidden_size"], config["vision_config"]["hidden_size"]
    return {
        **draw.linear("multi_modal_projector.linear_1", hidden, visual, bias=0.1),
        **draw.linear("multi_modal_projector.linear_2", hidden, hidden, bias=0.1),
    }


def _language_model(draw: _Random, config: Config, tokenizer: Tokenizer) -> Weights:
    """It answers in words: the head's other rows are zero, and zero is never the highest."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    words = [tokenizer.token_to_id("▁" + word) for word in _WORDS.split()]
    head = torch.zeros(config["vocab_size"], hidden)
    head[words] = draw.table(len(words), hidden, scale=3 * hidden**-0.5)
    weights = {
        "language_model.lm_head.weight": head,
        "language_model.model.embed_tokens.weight": draw.table(config["vocab_size"], hidden),
        **draw.norm("language_model.model.norm", hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"language_model.model.layers.{i}"
        # So sharp an attention that single patches and words decide; below 2, answers repeat.
        for name, gain in {"q_proj": 2.5, "k_proj": 2.5, "v_proj": 1.5, "o_proj": 1.5}.items():
            weights |= draw.linear(f"{layer}.self_attn.{name}", hidden, hidden, gain)
        weights |= draw.linear(f"{layer}.mlp.gate_proj", inner, hidden)
        weights |= draw.linear(f"{layer}.mlp.up_proj", inner, hidden)
        weights |= draw.linear(f"{layer}.mlp.down_proj", hidden, inner)
        weights |= draw.norm(f"{layer}.input_layernorm", hidden)
        weights |= draw.norm(f"{layer}.post_attention_layernorm", hidden)
    return weights
