# SPDX-License-Identifier: Apache-2.0
"""A look at a server's own work on one item: processor, vision tower, signals, selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils.logging import disable_progress_bar
from vllm.platforms import current_platform
from vllm.renderers import ChatParams, renderer_from_config

from anchorprune_vllm.budget import unit_budgets
from anchorprune_vllm.config import CONFIG_KEY, PruneConfig
from anchorprune_vllm.methods import ANCHORPRUNE, method_of
from anchorprune_vllm.selection import AnchorParams, Candidates, KeptTokens
from anchorprune_vllm.selection.anchor import walk_ranks
from anchorprune_vllm.selection.select import anchored_units as bounds_of_anchors
from anchorprune_vllm.tools.engine_options import refusal
from anchorprune_vllm.tools.explain.explanation import MethodView, Panel, UnitAnchor
from anchorprune_vllm.tools.explain.media import Asked
from anchorprune_vllm.tools.explain.views import View, view_of
from anchorprune_vllm.tools.local_model import LocalModel, plans_of
from anchorprune_vllm.tools.selections import recorded_selections

_MODALITIES = {"picture": "image", "clip": "video"}


@dataclass(frozen=True)
class Look:
    """An item as one method sees it."""

    view: View
    method: MethodView


def load(model: str, settings: dict[str, Any], engine_args: dict[str, Any]) -> LocalModel:
    """A model with a method's settings. Inside `one_rank`."""
    disable_progress_bar()
    defaults: dict[str, Any] = {
        "max_model_len": None,
        "mm_processor_cache_gb": 0,
        "use_tqdm_on_load": False,
        "dtype": "float32" if current_platform.is_cpu() else "auto",
    }
    try:
        return LocalModel(Path(model), settings=settings, **{**defaults, **engine_args})
    except (OSError, TypeError, ValueError) as error:
        raise RuntimeError(f"vLLM cannot load {model}: {refusal(error)}") from error


def look(loaded: LocalModel, asked: Asked, method: str, budgets: Sequence[str]) -> Look:
    """Ask at each budget; `method` is the name of what the model was loaded with."""
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
        processed = render(loaded, asked, budget)
        (plan,) = plans_of(processed, modality)
        if plan.keeps_all:
            raise ValueError(
                f"a budget of {budget} keeps all {plan.tokens.candidates} tokens of {asked.name}: "
                "nothing is chosen; give a smaller one"
            )
        with recorded_selections(loaded.model._pruner) as selections:
            loaded.embed(processed)
        ((given, kept),) = selections
        panels.append(panel_of(budget, given, kept, config))
    ((_, kwargs),) = loaded.batches(processed)
    return Look(
        view_of(loaded, modality, kwargs, plan.tokens),
        MethodView(
            method=method,
            looks_at_question=method_of(config).asks,
            relevance=_numbers(given.relevance),
            importance=_numbers(given.importance),
            panels=tuple(panels),
        ),
    )


def render(loaded: LocalModel, asked: Asked, budget: str) -> Any:
    """What the API process makes of a chat request."""
    text = {"type": "text", "text": asked.question}
    message = {"role": "user", "content": [asked.media.as_message_part(), text]}
    _, (processed,) = renderer_from_config(loaded.config).render_chat(
        [[message]],
        ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False}),
        prompt_extras={"mm_processor_kwargs": {CONFIG_KEY: {"budget": budget}}},
    )
    return processed


def panel_of(budget: str, given: Candidates, kept: KeptTokens, config: PruneConfig) -> Panel:
    """What was selected of an item, as numbers."""
    summed = None
    if kept.weights is not None:
        summed = tuple(kept.weights.ne(0).any(dim=0).nonzero().flatten().tolist())
    return Panel(
        budget=budget,
        indices=tuple(kept.indices.tolist()),
        is_anchor=tuple(kept.is_anchor.tolist()),
        anchors=_anchors(given, config) if config.method == ANCHORPRUNE else (),
        summed=summed,
    )


def _anchors(given: Candidates, config: PruneConfig) -> tuple[UnitAnchor, ...]:
    """How the anchors of an item came to their end, from the functions that made them."""
    params = AnchorParams(config.min_anchor, config.tau, config.patience, config.max_anchor_ratio)
    bounds = bounds_of_anchors(given, params)
    if given.relevance is None or not bounds:
        return ()
    walk = walk_ranks([given.relevance], [given.features], [bounds], config.tau, config.patience)
    shares = unit_budgets(given.budget, [rows * columns for rows, columns in given.grids])
    numbers = [0] * len(given.features) if given.units is None else given.units.tolist()
    found = []
    for unit, token, novel, kept in zip(
        bounds, walk.token.tolist(), walk.novel.tolist(), walk.kept.tolist(), strict=True
    ):
        anchor = [rank for rank, is_in in enumerate(kept) if is_in]
        new = tuple(token[rank] for rank in anchor if novel[rank])
        found.append(
            UnitAnchor(
                unit=numbers[unit.start],
                budget=shares[numbers[unit.start]],
                minimum=unit.minimum,
                size=len(anchor),
                maximum=unit.maximum,
                novel=new,
                ended_by="novel tokens" if len(new) == config.patience else "K_max",
            )
        )
    return tuple(found)


def _numbers(scores: Tensor | None) -> tuple[float, ...] | None:
    """A signal; None if it was not made."""
    return tuple(scores.float().tolist()) if scores is not None and len(scores) else None
