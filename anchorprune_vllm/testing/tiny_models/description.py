# SPDX-License-Identifier: Apache-2.0
"""What describes a tiny model: plain data, which `hub_format.py` makes files of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Config = dict[str, Any]
"""Entries of a configuration, or arguments of a class of transformers."""

MAX_LENGTH = 8192
TILE, PATCH = 112, 14
LANGUAGE_MODEL: Config = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""The sizes of a language model."""
TOWER: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
"""The sizes of a vision tower, where its configuration has the usual names for them."""
MERGING_TOWER: Config = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "out_hidden_size": 128,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""The same of a tower that merges 2x2 patches, as Qwen's and GLM's do."""
SIGLIP: Config = {
    "model_type": "siglip_vision_model",
    **TOWER,
    "image_size": TILE,
    "patch_size": PATCH,
    "vision_use_head": False,
}
SIGLIP_ON_THE_HUB = {"vision_tower.": "vision_tower.vision_model."}
"""Names of weights: transformers 5 leaves out a level that the hub's files have."""


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The tiny model of a family: what distinguishes its checkpoint from those of others.

    Models of one kind are described by `dataclasses.replace` of one of them.
    """

    architecture: str
    """Its name in vLLM's registry."""
    model_class: str = ""
    """Class in transformers, or in `model_classes`, if it has another name than in vLLM."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens that the processor asks its tokenizer for: `{"image_token": "<image>"}`."""
    more_tokens: Sequence[str] = ()
    """Special tokens without a name."""
    words: Sequence[str] = ()
    """Ordinary tokens that the family needs."""
    bos: str | None = None
    """The token that begins a text."""
    text: Config
    """Entries of the language model's configuration, beside `LANGUAGE_MODEL`."""
    vision: Config
    """Configuration of the vision tower."""
    config: Config = field(default_factory=dict)
    """The other entries of the configuration; a token stands for its id.

    The ids of `tokens` are entries by themselves, under the names that the configuration has.
    """
    processors: Mapping[str, Config]
    """Classes in transformers, with their arguments: the processor first, then its parts."""
    image: str | None = None
    """What the chat template writes for an image; None if that is the `image_token`."""
    video: str = ""
    """What the chat template writes for a video; empty if the model takes none."""
    visual_tokens: tuple[int, int]
    """The numbers of visual tokens for images of 300x200 and of 1200x900 pixels."""
    max_images: int | None = None
    """The most images that vLLM accepts in a prompt; None if there is no limit."""
    engine_arguments: Mapping[str, str] = field(default_factory=dict)
    """The engine arguments that vLLM needs to serve it on a CPU."""
    hub_config: str = ""
    """Class of the configuration on the hub, if it is not that of the model's class."""
    hub_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of the weights' names in transformers → on the hub, which vLLM expects."""
    transposed_on_hub: Sequence[str] = ()
    """Parts of the names of weights whose last two dimensions the hub has the other way round."""
    config_json: Config = field(default_factory=dict)
    """Entries of config.json that the hub has, and transformers does not write."""
    file_format: Literal["hub", "mistral"] = "hub"

    def write(self, directory: Path, seed: int) -> None:
        """Write the files that the hub would have; the same seed gives the same bytes.

        Raises ValueError if a package that its processor needs is not installed.
        """
        try:
            # Only now: importing transformers takes seconds.
            if self.file_format == "mistral":
                from anchorprune_vllm.testing.tiny_models.mistral_format import write_mistral_format

                write_mistral_format(self, directory, seed)
            else:
                from anchorprune_vllm.testing.tiny_models.hub_format import write_hub_format

                write_hub_format(self, directory, seed)
        except ImportError as error:
            raise ValueError(f"{self.architecture}: {error}") from error


def pixel_limits(patch: int) -> Config:
    """Let an image, and each frame of a video, have between 16 and 256 visual tokens."""
    token = (2 * patch) ** 2
    return {
        "size": {"shortest_edge": 16 * token, "longest_edge": 256 * token},
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }


def square(side: int) -> Config:
    """Return the size of an image that is as wide as it is high."""
    return {"height": side, "width": side}
