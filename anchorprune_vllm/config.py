# SPDX-License-Identifier: Apache-2.0
"""`PruneConfig`: every setting of the plugin, validated once, at start-up.

The settings travel as the dictionary `anchorprune` on the model's HF config, which is the only
place that both the multimodal processor (API process) and the model (worker) see.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from anchorprune_vllm.anchor_params import AnchorParams
from anchorprune_vllm.budget import Budget
from anchorprune_vllm.checks import check_choice, check_keys, check_whole
from anchorprune_vllm.methods import registry

CONFIG_KEY = "anchorprune"
"""The name of the dictionary on the HF config, and of the override of a request."""

Scope = Literal["turn", "last", "all", "none"]
"""The words of a prompt that are its question; `api/query.py` explains each scope."""
SCOPES: tuple[Scope, ...] = get_args(Scope)

Positions = Literal["compact", "native"]
"""The positions of kept tokens: consecutive, or those of the unpruned prompt."""
POSITIONS: tuple[Positions, ...] = get_args(Positions)

Similarity = Literal["negated", "raw"]
"""How the similarity of CLIP or SigLIP becomes relevance."""
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)

Matching = Literal["max", "mean"]
"""How a visual token's similarities to the words of the question become its relevance."""
MATCHINGS: tuple[Matching, ...] = get_args(Matching)

Level = Literal["any", "full"]
"""The models that are served: all that can be pruned, or only those with a tower's importance."""
LEVELS: tuple[Level, ...] = get_args(Level)

# Budget and query are parts of an item's identity themselves; the others do not affect tokens.
_NOT_IN_FINGERPRINT = (
    *("budget", "video_budget", "query"),
    *("feature_cache_mb", "pixel_cache_mb", "level"),
)

_WITH_A_QUESTION_ALONE = ("similarity", "matching")


@dataclass(frozen=True)
class PruneConfig:
    """The settings of pruning; `budget` is the only one without a default."""

    budget: Budget
    video_budget: Budget | None = None
    method: str = "anchorprune"
    query: Scope = "turn"
    text_encoder: str | None = None
    anchor: AnchorParams = field(default_factory=AnchorParams)
    """The parameters of AnchorPrune, which a dictionary of settings has beside the other ones."""
    positions: Positions | None = None
    """The positions of kept tokens; by default, `native` for models with M-RoPE, else `compact`."""
    feature_cache_mb: int = 256
    pixel_cache_mb: int = 256
    similarity: Similarity = "negated"
    matching: Matching = "max"
    level: Level = "any"
    method_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The options of a method other than AnchorPrune."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        if self.video_budget is not None:
            object.__setattr__(self, "video_budget", Budget.parse(self.video_budget))
        check_choice("method", self.method, registry.names())
        check_choice("query", self.query, SCOPES)
        check_choice("similarity", self.similarity, SIMILARITIES)
        check_choice("matching", self.matching, MATCHINGS)
        check_choice("level", self.level, LEVELS)
        self._check_options()
        if self.positions is not None:
            check_choice("positions", self.positions, POSITIONS)
        if self.text_encoder is not None and not (
            isinstance(self.text_encoder, str) and self.text_encoder
        ):
            raise ValueError(
                f"anchorprune: text_encoder must be a hub id or a local path, "
                f"got {self.text_encoder!r}"
            )
        check_whole("feature_cache_mb", self.feature_cache_mb, low=0)
        check_whole("pixel_cache_mb", self.pixel_cache_mb, low=0)

    def _check_options(self) -> None:
        """Raise ValueError for settings that have no effect on the method."""
        if not isinstance(self.method_options, Mapping):
            raise ValueError(
                f"anchorprune: method_options must be a dictionary such as "
                f'{{"alpha": 0.5}}, got {self.method_options!r}'
            )
        if self.method != registry.ANCHORPRUNE:
            for name, value in asdict(AnchorParams()).items():
                if getattr(self.anchor, name) != value:
                    raise ValueError(
                        f"anchorprune: {name} is a setting of the method anchorprune and has no "
                        f"effect on {self.method}; leave it out"
                    )
        registry.check_options(self.method, self.method_options)
        object.__setattr__(self, "method_options", dict(self.method_options))
        for name in _WITH_A_QUESTION_ALONE:
            is_set = getattr(self, name) != getattr(PruneConfig, name)
            if is_set and not registry.uses_query(self.method):
                raise ValueError(
                    f"anchorprune: {name} is about the question, which {self.method} does not use; "
                    "leave it out"
                )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> PruneConfig:
        """Return the validated settings of a dictionary; raise ValueError for unknown keys."""
        check_names(settings)
        if "budget" not in settings:
            raise ValueError('anchorprune: settings need a budget, such as {"budget": 64}')
        anchor = {name: settings[name] for name in _ANCHOR if name in settings}
        others = {name: value for name, value in settings.items() if name not in _ANCHOR}
        return cls(**others, anchor=AnchorParams(**anchor))

    @classmethod
    def of_model(cls, hf_config: object) -> PruneConfig | None:
        """Return the settings on a model's HF config, or None if pruning is off."""
        settings = getattr(hf_config, CONFIG_KEY, None)
        return None if settings is None else cls.from_dict(settings)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON and read back with `from_dict`."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= asdict(values.pop("anchor"))
        return {
            name: str(value) if isinstance(value, Budget) else value
            for name, value in values.items()
        }

    def has_native_positions(self, default: Positions) -> bool:
        """Return whether kept tokens have native positions; `default` is the model's default."""
        return (self.positions or default) == "native"

    def budget_for(self, modality: str) -> Budget:
        """Return the budget of one image or of one video."""
        if modality == "video" and self.video_budget is not None:
            return self.video_budget
        return self.budget

    def fingerprint(self) -> str:
        """Return a hash of the settings that affect which tokens stay, besides budget and query."""
        deciding = {k: v for k, v in self.to_dict().items() if k not in _NOT_IN_FINGERPRINT}
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]


_ANCHOR = tuple(each.name for each in fields(AnchorParams))

SETTINGS = (*(each.name for each in fields(PruneConfig) if each.name != "anchor"), *_ANCHOR)
"""The names of all settings in a dictionary."""


def resembles_config_key(name: str) -> bool:
    """Return whether a name is `anchorprune`, or is probably meant to be."""
    letters = re.sub("[^a-z]", "", name.lower())
    return CONFIG_KEY in letters or bool(get_close_matches(letters, [CONFIG_KEY], cutoff=0.75))


def check_names(settings: object) -> None:
    """Raise ValueError for anything but a dictionary, and for names that are no settings."""
    if not isinstance(settings, Mapping):
        raise ValueError(
            f'anchorprune: settings must be a dictionary such as {{"budget": 64}}, got {settings!r}'
        )
    check_keys(settings, SETTINGS)
