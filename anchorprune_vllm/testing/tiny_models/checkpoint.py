# SPDX-License-Identifier: Apache-2.0
"""The description of a tiny checkpoint, and the writing of its files."""

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

from anchorprune_vllm.testing.demo_models.tokenizers import WORDS, make_qwen_tokenizer

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
"""Names of weights: transformers 5 left out a level that the hub's files have."""
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
    """The numbers for an image of 300x200 pixels, and for one of 1200x900."""
    max_images: int | None = None
    """The most images that vLLM accepts in a prompt; None: any number."""
    engine_arguments: Mapping[str, str] = field(default_factory=dict)
    """What vLLM must be told to serve it on a CPU."""
    video: str = ""
    """What the chat template writes for a video; empty: the family takes none."""
    architecture: str = ""
    """Its name in vLLM's registry, where that is not the name of `model_class`."""
    whole_config: PreTrainedConfig | None = None
    """The configuration on the hub, where that of `model_class` is a part of it."""
    hub_names: Mapping[str, str] = field(default_factory=dict)
    """Part of a weight's name in transformers → the same on the hub, which vLLM expects."""
    transposed_on_hub: Sequence[str] = ()
    """Parts of the names of weights whose last two dimensions are the other way round there."""
    config_json: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json that are other on the hub than transformers writes them."""

    def write(self, directory: Path, seed: int) -> None:
        """Write the files that the hub would have."""
        directory.mkdir(parents=True, exist_ok=True)
        template = chat_template(self.image, self.video)
        # BLIP-2's processor keeps none itself.
        self.processor.chat_template = self.processor.tokenizer.chat_template = template
        self.processor.save_pretrained(directory)
        words = ["Ġ" + word for word in WORDS.split()]
        word_ids = self.processor.tokenizer.convert_tokens_to_ids(words)
        model = random_model(self.model_class, self.config, word_ids, seed)
        model.generation_config = GenerationConfig(do_sample=False)
        with _no_progress_bar():
            model.save_pretrained(directory)
        if self.hub_names or self.transposed_on_hub:
            self._change_to_hub_format(directory / "model.safetensors")
        if self.whole_config is not None:
            self.whole_config.save_pretrained(directory)
        path = directory / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {"architectures": [self.architecture_name], "dtype": "float32"}
        config |= self.config_json
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _change_to_hub_format(self, path: Path) -> None:
        weights = {}
        for name, weight in load_file(path).items():
            if any(part in name for part in self.transposed_on_hub):
                weight = weight.mT.contiguous()
            weights[rename(name, self.hub_names)] = weight
        save_file(weights, path, metadata={"format": "pt"})

    @property
    def architecture_name(self) -> str:
        return self.architecture or self.model_class.__name__


def random_model(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    word_ids: Sequence[int],
    seed: int,
) -> PreTrainedModel:
    """Return a model whose answers depend on image and question, and are these tokens only."""
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
        _let_it_answer_in_words(model, word_ids, draw)
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
    """Draw a matrix anew, and change a vector: a bias or norm that is left out will show."""
    if parameter.ndim < 2:
        parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
        return
    is_convolution = parameter.ndim > 3
    inputs = parameter[0].numel() if is_convolution else parameter.shape[-1]
    parameter.normal_(0, _GAIN * inputs**-0.5, generator=draw)


def _let_it_answer_in_words(
    model: PreTrainedModel, word_ids: Sequence[int], draw: torch.Generator
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
    head[word_ids] = 3 * scale * torch.randn(len(word_ids), head.shape[1], generator=draw)


def rename(name: str, parts: Mapping[str, str]) -> str:
    """Replace each of `parts` in the name of a weight, in their order."""
    for here, there in parts.items():
        name = name.replace(here, there)
    return name


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
    tokens = [_PAD, _START, _END, *([bos] if bos else []), *named.values(), *specials]
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
    texts = {"{{ IMAGE }}": image, "{{ VIDEO }}": video}
    template = _CHAT_TEMPLATE
    for place, text in texts.items():
        template = template.replace(place, f"{{{{ {json.dumps(text)} }}}}")
    return template
