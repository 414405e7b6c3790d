# SPDX-License-Identifier: Apache-2.0
"""What describes a tiny checkpoint, and what writes it."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.utils import logging

from anchorprune_vllm.tools.demo_tokenizers import WORDS, make_qwen_tokenizer

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_MAX_LENGTH = 8192
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
"""The sizes of an image tower, where its configuration has the usual names for them."""
SIGLIP_ON_THE_HUB = {"vision_tower.": "vision_tower.vision_model."}
"""Names of weights: transformers 5 has done away with a level that the hub's files have."""
_GAIN = 1.5  # Attention chooses then; with less, answers hardly depend on what was asked.

# Images, videos and text in the order of the message, in ChatML.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ IMAGE }}
{%- elif part['type'] == 'video' -%}{{ VIDEO }}
{%- elif part['type'] == 'text' -%}{{ part['text'] }}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


@dataclass(frozen=True)
class Checkpoint:
    """The description of a family's tiny model: its parts, made by transformers' own classes."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    processor: ProcessorMixin
    image: str
    """What the chat template writes for an image."""
    visual_tokens: tuple[int, int]
    """Of an image of 300x200 pixels, and of one of 1200x900."""
    video: str = ""
    """What the chat template writes for a video; empty: the family takes none."""
    architecture: str = ""
    """Its name in vLLM's registry, where that is not the name of `model_class`."""
    hub_names: Mapping[str, str] = field(default_factory=dict)
    """Part of a weight's name in transformers → the same on the hub, which vLLM expects."""

    def write(self, directory: Path, seed: int) -> None:
        """Write the files that the hub would have."""
        directory.mkdir(parents=True, exist_ok=True)
        self.processor.chat_template = chat_template(self.image, self.video)
        self.processor.save_pretrained(directory)
        model = self._random_model(seed)
        model.generation_config = GenerationConfig(do_sample=False)
        with _no_progress_bar():
            model.save_pretrained(directory)
        if self.hub_names:
            _rename_weights(directory / "model.safetensors", self.hub_names)
        path = directory / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {"architectures": [self.architecture_name], "dtype": "float32"}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @property
    def architecture_name(self) -> str:
        return self.architecture or self.model_class.__name__

    def _random_model(self, seed: int) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # for what the class draws itself: vectors, and buffers
            model = self.model_class(self.config).float().eval()
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                _draw_parameter(parameter, draw)
            for module in model.modules():
                if isinstance(module, torch.nn.Embedding):
                    factor = float(getattr(module, "embed_scale", 1))  # Gemma's multiply by it
                    module.weight.normal_(0, 0.5 / factor, generator=draw)
            _let_it_answer_in_words(model, self.processor.tokenizer, draw)
        return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _draw_parameter(parameter: torch.Tensor, draw: torch.Generator) -> None:
    """Draw a matrix anew. Change a vector: a bias or norm that is left out shows then."""
    if parameter.ndim < 2:
        parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
        return
    is_convolution = parameter.ndim > 3
    inputs = parameter[0].numel() if is_convolution else parameter.shape[-1]
    parameter.normal_(0, _GAIN * inputs**-0.5, generator=draw)


def _let_it_answer_in_words(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, draw: torch.Generator
) -> None:
    """Give the rows of words large logits of both signs, and all others none.

    Where embeddings and head are one matrix, the others have small rows instead.
    """
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    scale = head.shape[1] ** -0.5
    if head is embeddings:
        head.normal_(0, scale, generator=draw)
    else:
        head.zero_()
    words = tokenizer.convert_tokens_to_ids(["Ġ" + word for word in WORDS.split()])
    head[words] = 3 * scale * torch.randn(len(words), head.shape[1], generator=draw)


def _rename_weights(path: Path, hub_names: Mapping[str, str]) -> None:
    weights = {}
    for name, weight in load_file(path).items():
        for here, on_the_hub in hub_names.items():
            name = name.replace(here, on_the_hub)
        weights[name] = weight
    save_file(weights, path, metadata={"format": "pt"})


def make_tokenizer(
    specials: Sequence[str] = (),
    *,
    words: Sequence[str] = (),
    bos: str | None = None,
    **named: str,
) -> PreTrainedTokenizerFast:
    """Return Qwen's tokenizer with special tokens, and with words, of the family's own.

    `named` ones are those that its processor asks the tokenizer for: `image_token="<image>"`.
    """
    tokens = dict.fromkeys(
        (_PAD, _START, _END, *([bos] if bos else []), *named.values(), *specials)
    )
    pipeline = make_qwen_tokenizer(list(dict.fromkeys(tokens)))
    pipeline.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=pipeline,
        bos_token=bos,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=_MAX_LENGTH,
        extra_special_tokens=named,
    )


def text_config(
    config_class: type[PreTrainedConfig], tokenizer: PreTrainedTokenizerFast, **others: Any
) -> PreTrainedConfig:
    """Return the configuration of a tiny language model: two layers, two heads of 64."""
    tiny = {
        "vocab_size": padded_vocabulary(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": _MAX_LENGTH,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    return config_class(**tiny | others)


def padded_vocabulary(tokenizer: PreTrainedTokenizerFast) -> int:
    return math.ceil(len(tokenizer) / 64) * 64


def chat_template(image: str, video: str = "") -> str:
    return _CHAT_TEMPLATE.replace("IMAGE", json.dumps(image)).replace("VIDEO", json.dumps(video))
