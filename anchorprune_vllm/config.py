# SPDX-License-Identifier: Apache-2.0
"""`PruneConfig`: every setting of the plugin, validated once, at start-up.

The settings travel as the dictionary `anchorprune` on the model's HF config: the one place that the
multimodal processor (API process) and the model (worker) both see.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from anchorprune_vllm.api.query import SCOPES, Scope
from anchorprune_vllm.budget import Budget
from anchorprune_vllm.methods import registry

CONFIG_KEY = "anchorprune"
"""Name of the dictionary on the HF config, and of the per-request override."""

Positions = Literal["compact", "native"]
POSITIONS: tuple[Positions, ...] = get_args(Positions)

Stage2 = Literal["importance", "diversity", "additive", "multiplicative"]
"""What a token is worth in Stage 2: importance * novelty, or one of the paper's ablations, which
are novelty alone, relevance + novelty, and relevance * novelty."""
STAGES_2: tuple[Stage2, ...] = get_args(Stage2)

Order = Literal["native", "selection"]
"""In which order kept tokens are given: as in the picture, or as they were chosen."""
ORDERS: tuple[Order, ...] = get_args(Order)

Similarity = Literal["negated", "raw"]
"""How CLIP or SigLIP similarity becomes relevance."""
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)

Matching = Literal["max", "mean"]
"""Of a visual token's similarities to the words of the question, which is its relevance."""
MATCHINGS: tuple[Matching, ...] = get_args(Matching)

Level = Literal["any", "full"]
"""Which models are served: all that can be, or only those whose vision tower gives importance."""
LEVELS: tuple[Level, ...] = get_args(Level)

# Budget and query are in an item's identity by themselves; the others decide nothing.
_NOT_IN_FINGERPRINT = (
    *("budget", "video_budget", "query"),
    *("feature_cache_mb", "pixel_cache_mb", "level"),
)

_WITH_A_QUESTION_ALONE = ("similarity", "matching")
_ANCHORPRUNE_ALONE = ("tau", "patience", "min_anchor", "max_anchor_ratio", "stage2", "order")


@dataclass(frozen=True)
class PruneConfig:
    """What to keep, and how to choose it. `budget` is the only setting without a default."""

    budget: Budget
    video_budget: Budget | None = None
    method: str = "anchorprune"
    query: Scope = "turn"
    text_encoder: str | None = None
    tau: float = 0.2
    patience: int = 3
    min_anchor: int | None = None
    max_anchor_ratio: float = 0.5
    positions: Positions | None = None
    """Default: the model's own way, `compact` for 1-D positions and `native` for M-RoPE."""
    feature_cache_mb: int = 256
    pixel_cache_mb: int = 256
    stage2: Stage2 = "importance"
    order: Order = "native"
    similarity: Similarity = "negated"
    matching: Matching = "max"
    level: Level = "any"
    method_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of a method other than AnchorPrune, whose own are the fields above."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        if self.video_budget is not None:
            object.__setattr__(self, "video_budget", Budget.parse(self.video_budget))
        check_choice("method", self.method, registry.names())
        check_choice("query", self.query, SCOPES)
        check_choice("stage2", self.stage2, STAGES_2)
        check_choice("order", self.order, ORDERS)
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
        _check_number("tau", self.tau, "from 0 to 2", lambda tau: 0 <= tau <= 2)
        _check_whole("patience", self.patience, low=1)
        if self.min_anchor is not None:
            _check_whole("min_anchor", self.min_anchor, low=1)
        ratio = self.max_anchor_ratio
        _check_number("max_anchor_ratio", ratio, "above 0 and up to 1", lambda r: 0 < r <= 1)
        _check_whole("feature_cache_mb", self.feature_cache_mb, low=0)
        _check_whole("pixel_cache_mb", self.pixel_cache_mb, low=0)

    def _check_options(self) -> None:
        """Refuse options that the method does not have, rather than ignore them."""
        if not isinstance(self.method_options, Mapping):
            raise ValueError(
                f"anchorprune: method_options must be a dictionary such as "
                f'{{"alpha": 0.5}}, got {self.method_options!r}'
            )
        if self.method != registry.ANCHORPRUNE:
            for name in _ANCHORPRUNE_ALONE:
                if getattr(self, name) != getattr(PruneConfig, name):
                    raise ValueError(
                        f"anchorprune: {name} is a setting of the method anchorprune and has no "
                        f"effect on {self.method}; leave it out"
                    )
        registry.check_options(self.method, self.method_options)
        object.__setattr__(self, "method_options", dict(self.method_options))
        for name in _WITH_A_QUESTION_ALONE:
            if getattr(self, name) != getattr(PruneConfig, name) and not registry.asks(self.method):
                raise ValueError(
                    f"anchorprune: {name} is about the question, which {self.method} does not look "
                    "at; leave it out"
                )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> PruneConfig:
        """Validate a dictionary; unknown keys are refused by name."""
        check_names(settings)
        if "budget" not in settings:
            raise ValueError('anchorprune: settings need a budget, such as {"budget": 64}')
        return cls(**settings)

    @classmethod
    def of_model(cls, hf_config: object) -> PruneConfig | None:
        """The settings on a model's HF config; None when pruning is off."""
        settings = getattr(hf_config, CONFIG_KEY, None)
        return None if settings is None else cls.from_dict(settings)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` gives the same settings back."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: str(value) if isinstance(value, Budget) else value
            for name, value in values.items()
        }

    def has_native_positions(self, default: Positions) -> bool:
        """Whether kept tokens have the unpruned prompt's positions; `default` is the model's."""
        return (self.positions or default) == "native"

    def budget_for(self, modality: str) -> Budget:
        """The budget of one image or of one video."""
        if modality == "video" and self.video_budget is not None:
            return self.video_budget
        return self.budget

    def fingerprint(self) -> str:
        """Identifies the settings that, with media, query and budget, decide which tokens stay."""
        deciding = {k: v for k, v in self.to_dict().items() if k not in _NOT_IN_FINGERPRINT}
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]


def resembles_config_key(name: str) -> bool:
    """Whether a name is `anchorprune`, or is likely to be meant for it."""
    letters = re.sub("[^a-z]", "", name.lower())
    return CONFIG_KEY in letters or bool(get_close_matches(letters, [CONFIG_KEY], cutoff=0.75))


def check_names(settings: object) -> None:
    """Refuse what is no dictionary, and names of settings that do not exist."""
    if not isinstance(settings, Mapping):
        raise ValueError(
            f'anchorprune: settings must be a dictionary such as {{"budget": 64}}, got {settings!r}'
        )
    check_keys(settings, [each.name for each in fields(PruneConfig)])


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"anchorprune: {name} must be one of {', '.join(allowed)}, got {value!r}")


def check_keys(settings: Mapping[str, Any], allowed: list[str]) -> None:
    """Refuse keys outside `allowed`, naming the nearest one that exists."""
    for key in settings:
        if key not in allowed:
            near = get_close_matches(str(key), allowed, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"anchorprune: unknown setting {key!r}{hint}; allowed: {', '.join(allowed)}"
            )


def _check_number(
    name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]
) -> None:
    # Comparisons with NaN are false, so it is refused too.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_allowed(value):
        raise ValueError(f"anchorprune: {name} must be a number {allowed}, got {value!r}")


def _check_whole(name: str, value: object, *, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(
            f"anchorprune: {name} must be a whole number of at least {low}, got {value!r}"
        )
