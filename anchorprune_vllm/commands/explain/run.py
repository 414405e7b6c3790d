# SPDX-License-Identifier: Apache-2.0
"""Runs `anchorprune explain`: looks at the item with each method, and writes what was found."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.checks import check_engine_options, check_model, is_writable
from anchorprune_vllm.commands.chosen_methods import ChosenMethod
from anchorprune_vllm.commands.explain.drawing import draw, page
from anchorprune_vllm.commands.explain.explanation import Explanation
from anchorprune_vllm.commands.explain.media import read_asked
from anchorprune_vllm.testing.demo_models.make import TRAINED, make_trained_model

DEMO = "demo"
"""Stands in place of a model for the trained LLaVA, which lies where `anchorprune demo` has it."""
_DEMO_MODEL = Path(".demo") / "trained-llava-1.5"
_SUFFIXES = (".png", ".html")


@dataclass(frozen=True)
class ExplainSettings:
    """What is to be explained, with names as on the command line."""

    model: str
    media: str
    question: str | None
    budgets: Sequence[str]
    methods: Sequence[ChosenMethod] = (ChosenMethod("anchorprune"),)
    query: str = "turn"
    text_encoder: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    out: Path = Path("explain.png")
    json: Path | None = None


def run_explain(wanted: ExplainSettings) -> Explanation:
    """Write the files, and print their names and the captions."""
    _check_outputs(wanted)
    explanation = explain(wanted)
    if wanted.out.suffix == ".html":
        wanted.out.write_text(page(explanation), encoding="utf-8")
    else:
        draw(explanation).save(wanted.out)
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(explanation.to_json()) + "\n", encoding="utf-8")
    print(f"{explanation.question} ({explanation.media})")
    tokens = len(explanation.view.tokens)
    for method in explanation.methods:
        for panel in method.panels:
            print(f"  {method.method}: {'; '.join(panel.caption(tokens))}")
    print(f"Written: {', '.join(str(path) for path in (wanted.out, wanted.json) if path)}")
    return explanation


def explain(wanted: ExplainSettings) -> Explanation:
    """Look at the item with each method in turn, as a loaded model has only one, like a server."""
    asked = read_asked(wanted.media, wanted.question)
    model, methods = wanted.model, wanted.methods
    if model == DEMO:
        make_trained_model(_DEMO_MODEL)
        model = str(_DEMO_MODEL)
        methods = [method.with_defaults(TRAINED["llava-1.5"]) for method in methods]
    check_model(model)
    shared: dict[str, Any] = {"query": wanted.query}
    if wanted.text_encoder is not None:
        check_model(wanted.text_encoder, "text encoder")
        shared["text_encoder"] = wanted.text_encoder
    check_engine_options(wanted.engine_args)

    from anchorprune_vllm.commands.explain.look import load, look
    from anchorprune_vllm.testing.local_model import one_rank

    looks = []
    with tempfile.TemporaryDirectory() as scratch, one_rank(Path(scratch)):
        for method in methods:
            settings = {**method.settings(), **shared}
            loaded = load(model, settings, dict(wanted.engine_args))
            looks.append(look(loaded, asked, str(method), wanted.budgets))
            # Free the memory before the next is loaded; some methods leave reference cycles.
            del loaded
            gc.collect()
    found = tuple(each.method for each in looks)
    return Explanation(wanted.model, asked.name, asked.question, looks[0].view, found)


def _check_outputs(wanted: ExplainSettings) -> None:
    """Raise ValueError for files that cannot be written, before a model is loaded."""
    if wanted.out.suffix not in _SUFFIXES:
        raise ValueError(
            f"--out is {wanted.out}: give a name that ends in {' or '.join(_SUFFIXES)}"
        )
    for path in filter(None, (wanted.out, wanted.json)):
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no directory {path.parent}")
        can_write = os.access(path, os.W_OK) if path.exists() else is_writable(path.parent)
        if path.is_dir() or not can_write:
            raise ValueError(f"{path} cannot be written: choose another name or directory")
