# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint, as on the hub."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from anchorprune_vllm.testing.demo_models.random_weights import Config, Weights


def write_checkpoint_files(
    directory: Path,
    weights: Weights,
    files: Mapping[str, Any],
    weights_file: str = "model.safetensors",
) -> None:
    """Write weights, and small files by name: configurations as JSON, text as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / weights_file, metadata={"format": "pt"})
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (directory / name).write_text(text, encoding="utf-8")


# fmt: off
def qwen_files(
    config: Config, tokenizer: Tokenizer, specials: Sequence[str], max_length: int
) -> dict[str, Any]:
    """Return the files of Qwen's tokenizer and language model, by name."""
    end, pad = config["eos_token_id"], config["bos_token_id"]
    return {
        "generation_config.json": {"pad_token_id": pad, "eos_token_id": [end, pad],
                                   "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer", "model_max_length": max_length,
            "padding_side": "left", "clean_up_tokenization_spaces": False,
            "add_prefix_space": False, "bos_token": None, "unk_token": None,
            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
            "additional_special_tokens": [*specials[1:]]},
        "tokenizer.json": tokenizer.to_str(pretty=True),
    }
