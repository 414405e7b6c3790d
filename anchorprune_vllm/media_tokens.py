# SPDX-License-Identifier: Apache-2.0
"""The tokens that stand for images and videos in a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MODALITIES = ("image", "video")
"""The modalities that are pruned."""
EMBEDDED = (*MODALITIES, "audio")
"""The modalities whose tokens stand for embeddings of an encoder."""


def media_token_ids(hf_config: Any, modalities: Sequence[str] = MODALITIES) -> dict[str, int]:
    """Return, by modality, the id of the token that stands for an embedding.

    Modalities for which the config names no token are left out. The config of a model that speaks
    contains that of the model that sees.
    """
    hf_config = getattr(hf_config, "thinker_config", hf_config)
    names = {m: (f"{m}_token_id", f"{m}_token_index") for m in modalities}
    found = {
        modality: [getattr(hf_config, name) for name in either if hasattr(hf_config, name)]
        for modality, either in names.items()
    }
    return {modality: ids[0] for modality, ids in found.items() if ids and ids[0] is not None}


def find_targets(
    prompt: Sequence[int], targets: Mapping[str, Sequence[int]]
) -> list[tuple[str, int, int]]:
    """Return the modality, start and end of each item's target in a prompt, in order.

    `targets` has, by modality, the tokens that a model's processor replaces with those of an item.
    """
    by_length = sorted(targets.items(), key=lambda target: -len(target[1]))
    found, end = [], 0
    first = {tokens[0] for tokens in targets.values() if tokens}
    for start in (place for place, token in enumerate(prompt) if token in first):
        for modality, tokens in by_length if start >= end else ():
            if tokens and list(prompt[start : start + len(tokens)]) == list(tokens):
                end = start + len(tokens)
                found.append((modality, start, end))
                break
    return found
