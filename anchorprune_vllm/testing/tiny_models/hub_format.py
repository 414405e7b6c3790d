# SPDX-License-Identifier: Apache-2.0
"""Write the checkpoint that a `TinyModel` describes, with transformers' own classes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers.utils import logging

from anchorprune_vllm.testing.demo_models.tokenizers import (
    QWEN_SPECIALS,
    WORDS,
    chat_template,
    make_qwen_tokenizer,
    padded_vocabulary,
)
from anchorprune_vllm.testing.tiny_models import model_classes
from anchorprune_vllm.testing.tiny_models.description import (
    LANGUAGE_MODEL,
    MAX_LENGTH,
    Config,
    TinyModel,
)

_GAIN = 1.5  # Attention is selective then; with less, answers hardly depend on the question.
_PROCESSOR_PARTS = {
    "ImageProcessor": "image_processor",
    "VideoProcessor": "video_processor",
    "FeatureExtractor": "feature_extractor",
}
"""End of the name of a class → argument of a processor."""


def write_hub_format(tiny: TinyModel, directory: Path, seed: int) -> None:
    """Write a model's files to a directory, as the hub has them."""
    directory.mkdir(parents=True, exist_ok=True)
    name = tiny.model_class or tiny.architecture
    model_class = getattr(transformers, name, None) or getattr(model_classes, name)
    tokenizer = _make_tokenizer(tiny)
    entries = _config_entries(tiny, tokenizer, model_class.config_class)
    config = model_class.config_class(**deepcopy(entries))

    processor = _make_processor(tiny, tokenizer)
    # BLIP-2's processor does not save a template.
    image = tiny.tokens["image_token"] if tiny.image is None else tiny.image
    processor.chat_template = tokenizer.chat_template = chat_template(image, tiny.video)
    processor.save_pretrained(directory)

    words = tokenizer.convert_tokens_to_ids(["Ġ" + word for word in WORDS.split()])
    model = make_random_model(model_class, config, words, seed)
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    with _no_progress_bar():
        model.save_pretrained(directory)
    if tiny.hub_names or tiny.transposed_on_hub:
        _change_to_hub_format(directory / "model.safetensors", tiny)
    if tiny.hub_config:
        hub_class = getattr(transformers, tiny.hub_config)
        if "thinker_config" in hub_class.sub_configs:  # Qwen's omni models have more parts
            entries = {"thinker_config": entries, "enable_audio_output": False}
        hub_class(**entries).save_pretrained(directory)

    path = directory / "config.json"
    config_json = json.loads(path.read_text(encoding="utf-8"))
    config_json |= {"architectures": [tiny.architecture], "dtype": "float32"}
    config_json |= tiny.config_json
    path.write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")


def _make_tokenizer(tiny: TinyModel) -> transformers.PreTrainedTokenizerFast:
    """Return Qwen's tokenizer with the special tokens and words of a family."""
    pad, _, end = QWEN_SPECIALS
    named, bos = dict(tiny.tokens), [tiny.bos] if tiny.bos else []
    tokens = [*QWEN_SPECIALS, *bos, *named.values(), *tiny.more_tokens]
    pipeline = make_qwen_tokenizer(list(dict.fromkeys(tokens)))
    pipeline.add_tokens([AddedToken(word, normalized=False) for word in tiny.words])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pipeline,
        bos_token=tiny.bos,
        eos_token=end,
        pad_token=pad,
        model_max_length=MAX_LENGTH,
        extra_special_tokens=named,
    )


def _make_processor(
    tiny: TinyModel, tokenizer: transformers.PreTrainedTokenizerFast
) -> transformers.ProcessorMixin:
    (name, options), *parts = tiny.processors.items()
    arguments: dict[str, Any] = {"tokenizer": tokenizer, **options}
    for part, part_options in parts:
        (argument,) = (to for end, to in _PROCESSOR_PARTS.items() if part.endswith(end))
        arguments[argument] = getattr(transformers, part)(**part_options)
    return getattr(transformers, name)(**arguments)


def _config_entries(
    tiny: TinyModel,
    tokenizer: transformers.PreTrainedTokenizerFast,
    config_class: type[transformers.PreTrainedConfig],
) -> Config:
    text = {
        **LANGUAGE_MODEL,
        "vocab_size": padded_vocabulary(len(tokenizer)),
        "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        **tiny.text,
    }
    entries = {"text_config": text, "vision_config": tiny.vision}
    if hasattr(config_class, "tie_word_embeddings"):
        entries["tie_word_embeddings"] = text["tie_word_embeddings"]
    ids = tokenizer.get_added_vocab()
    for name, token in tiny.tokens.items():
        if hasattr(config_class, f"{name}_id") or f"{name}_id" in config_class.attribute_map:
            entries[f"{name}_id"] = ids[token]
    for name, value in tiny.config.items():
        entries[name] = ids.get(value, value) if isinstance(value, str) else value
    return entries


def make_random_model(
    model_class: type[transformers.PreTrainedModel],
    config: transformers.PreTrainedConfig,
    word_ids: Sequence[int],
    seed: int,
) -> transformers.PreTrainedModel:
    """Return a model whose answers depend on image and question, and consist of these tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what the class draws itself: vectors, and buffers
        model = model_class(config).float().eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            _draw_parameter(parameter, draw)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                factor = float(getattr(module, "embed_scale", 1))  # Gemma's multiply by it
                module.weight.normal_(0, 0.5 / factor, generator=draw)
        _limit_answers_to_words(model, word_ids, draw)
    return model


def _draw_parameter(parameter: torch.Tensor, draw: torch.Generator) -> None:
    """Draw a matrix anew, and change a vector: a bias or norm that is left out will show."""
    if parameter.ndim < 2:
        parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
        return
    is_convolution = parameter.ndim > 3
    inputs = parameter[0].numel() if is_convolution else parameter.shape[-1]
    parameter.normal_(0, _GAIN * inputs**-0.5, generator=draw)


def _limit_answers_to_words(
    model: transformers.PreTrainedModel, word_ids: Sequence[int], draw: torch.Generator
) -> None:
    """Give the head's rows of words large logits of both signs, and all others none.

    Where embeddings and head are one matrix, the others have small rows instead.
    """
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    scale = head.shape[1] ** -0.5
    if head is embeddings:
        head.normal_(0, scale, generator=draw)
    else:
        head.zero_()
    head[word_ids] = 3 * scale * torch.randn(len(word_ids), head.shape[1], generator=draw)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _change_to_hub_format(path: Path, tiny: TinyModel) -> None:
    weights = {}
    for name, weight in load_file(path).items():
        if any(part in name for part in tiny.transposed_on_hub):
            weight = weight.mT.contiguous()
        weights[rename(name, tiny.hub_names)] = weight
    save_file(weights, path, metadata={"format": "pt"})


def rename(name: str, parts: Mapping[str, str]) -> str:
    """Replace each of `parts` in the name of a weight, in their order."""
    for here, there in parts.items():
        name = name.replace(here, there)
    return name
