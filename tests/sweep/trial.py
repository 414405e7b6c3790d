# SPDX-License-Identifier: Apache-2.0
"""The trial of one tiny checkpoint.

Two engines one after the other, first vLLM's without a budget, then a pruned one; what both answer
is compared.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm import LLM

from anchorprune_vllm.commands.models.record import Outcome, Trial, TrialLevel
from tests.support.asking import ANSWER, ASKED, Answer, ask, override
from tests.support.checkpoints import Checkpoint, write_checkpoint
from tests.support.dialects import in_dialect
from tests.support.engine import forget_everything
from tests.support.pictures import clip
from tests.support.seen_positions import seen_positions, watch_positions

BUDGETS: tuple[int | str, ...] = (12, "25%", "100%")
VIDEO = clip(4, frames=8, size=(224, 160))


class Item(NamedTuple):
    """An image or video in a prompt."""

    length: int
    """All of its tokens, text between its rows or tiles included."""
    embeddings: int


class Asked(NamedTuple):
    """One answer, and what the engine made of its prompt."""

    answer: Answer
    items: list[Item]
    positions: list[tuple[int, ...]]
    """Of each token that the language model computed."""


def asks_of(checkpoint: Checkpoint) -> list[str]:
    """Return those of `ASKED` that it takes, and "video"."""
    images = [asked for asked in ASKED if count_images(asked) <= checkpoint.images]
    return [*images, *(["video"] if checkpoint.video else [])]


def count_images(asked: str) -> int:
    """Return the number of images in one of `ASKED`."""
    return sum(part["type"] != "text" for part in ASKED[asked][0]["content"])


class Engine:
    """An engine whose requests and positions are watched."""

    def __init__(self, llm: LLM, checkpoint: Checkpoint) -> None:
        self.llm, self._checkpoint = llm, checkpoint
        self._items: list[Item] = []
        self._watch_items(llm.llm_engine.engine_core)
        watch_positions(llm)

    @classmethod
    @contextmanager
    def start(cls, checkpoint: Checkpoint, budget: int | None) -> Iterator[Engine]:
        """Start one, and end it."""
        own = {} if budget is None else {"settings": {"feature_cache_mb": 8}}
        with checkpoint.served(
            budget,
            max_model_len=None,  # the checkpoint's own
            max_num_batched_tokens=4096,
            **own,
        ) as llm:
            yield cls(llm, checkpoint)

    def ask(self, asked: str, budget: int | str | None = None) -> Answer:
        """Answer one of `ASKED`, or the question about a video."""
        if asked != "video":
            return ask(self.llm, asked, budget)
        request = {
            "prompt": in_dialect(self._checkpoint.video, self.llm.get_tokenizer()),
            "multi_modal_data": {"video": [VIDEO]},
            **override(budget),
        }
        (output,) = self.llm.generate([request], ANSWER, use_tqdm=False)
        return Answer.of(output)

    def ask_and_look(self, asked: str, budget: int | str | None = None) -> Asked:
        """Answer without vLLM's prefix cache, so that all tokens are computed."""
        self.llm.reset_prefix_cache()
        self._items.clear()
        seen_positions(self.llm)
        answer = self.ask(asked, budget)
        (starts,) = seen_positions(self.llm).values()
        positions = [position for _, position in sorted(starts[-1].items())]
        return Asked(answer, [*self._items], positions)

    def _watch_items(self, core: Any) -> None:
        add_request = core.add_request

        def add_and_note(request: Any) -> Any:
            places = [item.mm_position for item in request.mm_features or ()]
            self._items += [Item(place.length, place.get_num_embeds()) for place in places]
            return add_request(request)

        core.add_request = add_and_note


def try_checkpoint(name: str, directory: Path) -> Iterator[Trial]:
    """Serve a tiny checkpoint unpruned and pruned, and compare: what has begun, then the result."""
    checkpoint = write_checkpoint(name, directory / "model")
    found = Trial(name, checkpoint.architecture, "begun")
    yield found
    try:
        unpruned, is_steady = ask_unpruned(checkpoint)
        if not is_steady:
            why = "vLLM's own answers change with its prefix cache: tried without"
            found = replace(found, why=why)
            checkpoint.options |= {"enable_prefix_caching": False}
            unpruned, _ = ask_unpruned(checkpoint)
    except Exception as error:
        traceback.print_exc()
        yield replace(found, outcome="unserved", why=in_one_line(error))
        return
    try:
        with Engine.start(checkpoint, 12) as engine:
            yield compare(found, engine, unpruned)
    except Exception as error:
        traceback.print_exc()
        outcome: Outcome = "refused" if "anchorprune: " in str(error) else "failed"
        yield replace(found, outcome=outcome, why=in_one_line(error))


def ask_unpruned(checkpoint: Checkpoint) -> tuple[dict[str, Asked], bool]:
    """Return vLLM's own answers, and whether it gives them again with what is in its caches."""
    with Engine.start(checkpoint, None) as engine:
        cold = {asked: engine.ask_and_look(asked) for asked in asks_of(checkpoint)}
        again = {asked: engine.ask(asked) for asked in reversed(asks_of(checkpoint))}
    return cold, all(again[asked].equals(cold[asked].answer) for asked in cold)


def compare(found: Trial, engine: Engine, unpruned: Mapping[str, Asked]) -> Trial:
    """Ask a pruned engine all that the unpruned one was asked, cold and then warm."""
    wanted = [(asked, budget) for asked in unpruned for budget in BUDGETS]
    cold = {}
    for each in wanted:
        forget_everything(engine.llm)
        cold[each] = engine.ask_and_look(*each)
    warm = [(each, engine.ask(*each)) for each in reversed(wanted)]
    checks = {
        "counted": all(
            is_counted(unpruned[asked], cold[asked, budget], budget)
            for asked, budget in wanted
            if asked != "video"
        ),
        "100%": all(
            unpruned[asked].answer.equals(cold[asked, "100%"].answer) for asked in unpruned
        ),
        "warm": all(answer.equals(cold[each].answer) for each, answer in warm),
    }
    # Only now: without vLLM's profiling, the level is found out with the first image.
    (described,) = engine.llm.collective_rpc(describe_pruning)
    if described["has_native_positions"]:
        checks["positions"] = all(
            are_positions_kept(unpruned[asked].positions, cold[asked, budget].positions)
            for asked, budget in wanted
        )
    outcome: Outcome = "equal" if all(checks.values()) else "unequal"
    return replace(found, outcome=outcome, level=described["level"], checks=checks)


def is_counted(unpruned: Asked, pruned: Asked, budget: int | str) -> bool:
    """Whether images have as many embeddings as wanted, and the prompt is shorter by the rest."""
    before, after = (sum(item.length for item in asked.items) for asked in (unpruned, pruned))
    if unpruned.answer.prompt - pruned.answer.prompt != before - after:
        return False
    whole, kept = ([item.embeddings for item in asked.items] for asked in (unpruned, pruned))
    if isinstance(budget, int):
        return kept == [min(budget, count) for count in whole]
    if budget == "100%":
        return kept == whole
    return all(0 < few < count for few, count in zip(kept, whole, strict=True))


def are_positions_kept(unpruned: list[tuple[int, ...]], pruned: list[tuple[int, ...]]) -> bool:
    """Whether all positions are those of the unpruned prompt, and the answer's are the same."""
    answer = ANSWER.max_tokens - 1  # the last token of an answer is not computed
    left = iter(unpruned)
    return pruned[-answer:] == unpruned[-answer:] and all(each in left for each in pruned)


def describe_pruning(worker: Any) -> dict[str, Any]:
    """Return level and positions of the model in a worker."""
    model = worker.model_runner.model
    tower = getattr(model, "tower_signals", None)  # only the general adapter has to find out
    level: TrialLevel = "reduced" if tower is not None and tower.order is None else "full"
    return {"level": level, "has_native_positions": model._native_positions}


def in_one_line(error: BaseException) -> str:
    """Where an error begins, and where ours does, if vLLM has wrapped it."""
    said = " ".join(str(error).split())
    start = max(said.find("anchorprune: "), 0)
    return f"{type(error).__name__}: {said[start:]}"[:300]
