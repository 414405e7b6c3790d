# SPDX-License-Identifier: Apache-2.0
"""The files of a demo checkpoint, as on the hub."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from anchorprune_vllm.testing.demo_models.random_weights import Config, Weights


def write_checkpoint(directory: Path, weights: Weights, files: Mapping[str, Config | str]) -> None:
    """Weights, and small files by name: configurations as JSON, text as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
