# SPDX-License-Identifier: Apache-2.0
"""Watches the server's own code work on an item: processor, vision tower, signals, selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.logging import disable_progress_bar
from vllm.platforms import current_platform
from vllm.renderers import ChatParams, renderer_from_config

from anchorprune_vllm.budget import unit_budgets
from anchorprune_vllm.commands.checks import refusal
from anchorprune_vllm.commands.explain.explanation import MethodView, Panel, UnitAnchor, View
from anchorprune_vllm.commands.explain.media import Asked
from anchorprune_vllm.commands.explain.views import view_of
from anchorprune_vllm.config import CONFIG_KEY, PruneConfig
from anchorprune_vllm.methods.registry import ANCHORPRUNE, method_of
from anchorprune_vllm.plan import ItemPlan
from anchorprune_vllm.selection import Candidates, KeptTokens
from anchorprune_vllm.selection.anchorprune import relevance_anchor
from anchorprune_vllm.selection.units import anchored_units
from anchorprune_vllm.testing.local_model import LocalModel, plans_of
from anchorprune_vllm.testing.selections import recorded_selections

_MODALITIES = {"picture": "image", "clip": "video"}


@dataclass(frozen=True)
class Look:
    """An item as one method sees it."""

    view: View
    method: MethodView


def load(model: str, settings: dict[str, Any], engine_args: dict[str, Any]) -> LocalModel:
    """Load a model with the settings of a method; has to be in `one_rank`."""
    disable_progress_bar()
    options: dict[str, Any] = {
        "max_model_len": None,
        "mm_processor_cache_gb": 0,
        "use_tqdm_on_load": False,
        "dtype": "float32" if current_platform.is_cpu() else "auto",
        **engine_args,
    }
    try:
        return LocalModel(Path(model), settings=settings, **options)
    except (OSError, TypeError, ValueError) as error:
        raise RuntimeError(f"vLLM cannot load {model}: {refusal(error)}") from error


def look(loaded: LocalModel, asked: Asked, method: str, budgets: Sequence[str]) -> Look:
    """Ask at each budget; `method` is the name of the method that the model was loaded with."""
    modality = _MODALITIES[asked.media.kind]
    if modality not in loaded.model.modalities:
        raise ValueError(
            f"{asked.name} is a {modality}; {loaded.config.model_config.architecture} takes "
            f"{' and '.join(loaded.model.modalities)} input"
        )
    config = PruneConfig.of_model(loaded.config.model_config.hf_config)
    assert config is not None
    panels = []
    for budget in budgets:
        processed = _render(loaded, asked, budget)
        (plan,) = plans_of(processed, modality)
        if plan.keeps_all:
            raise ValueError(
                f"a budget of {budget} keeps all {plan.tokens.candidates} tokens of {asked.name}: "
                "nothing is chosen; give a smaller one"
            )
        with recorded_selections(loaded.model._pruner) as selections:
            loaded.embed(processed)
        parts = _parts(plan, selections)
        panels.append(_panel(budget, parts, config))
    ((_, kwargs),) = loaded.batches(processed)
    relevance, importance = (_signal(plan, parts, name) for name in ("relevance", "importance"))
    return Look(
        view_of(loaded, modality, kwargs, plan.tokens, asked.media.picture()),
        MethodView(method, method_of(config).uses_query, relevance, importance, tuple(panels)),
    )


def _render(loaded: LocalModel, asked: Asked, budget: str) -> Any:
    """Return what the API process makes of a chat request."""
    text = {"type": "text", "text": asked.question}
    message = {"role": "user", "content": [asked.media.as_message_part(), text]}
    _, (processed,) = renderer_from_config(loaded.config).render_chat(
        [[message]],
        ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False}),
        prompt_extras={"mm_processor_kwargs": {CONFIG_KEY: {"budget": budget}}},
    )
    return processed


class _Part(NamedTuple):
    """A selection: from all of an item, or from a unit that has a share of its own."""

    first_token: int
    first_unit: int
    given: Candidates
    kept: KeptTokens


def _parts(plan: ItemPlan, selections: Sequence[tuple[Candidates, KeptTokens]]) -> list[_Part]:
    """Return the selections from an item in the order of its tokens."""
    if len(plan.shares) == 1:
        ((given, kept),) = selections
        return [_Part(0, 0, given, kept)]
    starts = [0, *accumulate(plan.tokens.unit_sizes)]
    taken = [unit for unit, share in enumerate(plan.shares) if share]
    return [
        _Part(starts[unit], unit, given, kept)
        for unit, (given, kept) in zip(taken, selections, strict=True)
    ]


def _panel(budget: str, parts: Sequence[_Part], config: PruneConfig) -> Panel:
    merges = any(part.kept.weights is not None for part in parts)
    return Panel(
        budget=budget,
        indices=tuple(i + part.first_token for part in parts for i in part.kept.indices.tolist()),
        is_anchor=tuple(flag for part in parts for flag in part.kept.is_anchor.tolist()),
        anchors=tuple(anchor for part in parts for anchor in _anchors(part, config)),
        summed=tuple(token for part in parts for token in _summed(part)) if merges else None,
    )


def _summed(part: _Part) -> list[int]:
    """Return the tokens that are part of a kept row."""
    weights = part.kept.weights
    found = part.kept.indices if weights is None else weights.ne(0).any(dim=0).nonzero().flatten()
    return [token + part.first_token for token in found.tolist()]


def _anchors(part: _Part, config: PruneConfig) -> list[UnitAnchor]:
    """Return how anchors came to their end, by calling the functions that made them again."""
    given = part.given
    if config.method != ANCHORPRUNE or given.relevance is None:
        return []
    budgets = unit_budgets(given.budget, [rows * columns for rows, columns in given.grids])
    numbers = [0] * len(given.features) if given.units is None else given.units.tolist()
    found = []
    for unit in anchored_units(given, config.anchor):
        relevance, features = given.relevance[unit.tokens], given.features[unit.tokens]
        anchor = relevance_anchor(relevance, features, unit, config.anchor)
        novel = anchor.ranking[anchor.is_kept & anchor.is_novel] + unit.start + part.first_token
        number = numbers[unit.start]
        found.append(
            UnitAnchor(
                unit=number + part.first_unit,
                budget=budgets[number],
                minimum=unit.minimum,
                size=int(anchor.is_kept.sum()),
                maximum=unit.maximum,
                novel=tuple(novel.tolist()),
                ended_by="novel tokens" if len(novel) == config.anchor.patience else "K_max",
            )
        )
    return found


def _signal(plan: ItemPlan, parts: Sequence[_Part], name: str) -> tuple[float, ...] | None:
    """Return a signal of all candidates, or None if it was not computed.

    Units that keep nothing have no scores: they get the lowest of the others.
    """
    found: dict[int, float] = {}
    for part in parts:
        scores = getattr(part.given, name)
        if scores is None or not len(scores):
            return None
        found.update(enumerate(scores.float().tolist(), part.first_token))
    lowest = min(found.values())
    return tuple(found.get(token, lowest) for token in range(plan.tokens.candidates))
