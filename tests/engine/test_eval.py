# SPDX-License-Identifier: Apache-2.0
"""`anchorprune eval` on a real engine, against answers obtained without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from anchorprune_vllm.commands.eval.scores import is_right
from anchorprune_vllm.commands.main import main
from tests.support.engine import make_engine
from tests.support.pictures import QUESTIONS, picture

PICTURES = 3
ASKED = [(number, text) for number in range(PICTURES) for text in QUESTIONS[:4]]
BUDGETS = ("5.6%", "40")
MAX_TOKENS = 3


def answers_of(llm: LLM, budget: str | None, query: str = "turn") -> list[str]:
    """One request at a time, by a prompt written by hand, without `<s>`: so chats are."""
    found = []
    tokenizer = llm.get_tokenizer()
    for number, text in ASKED:
        written = f"USER: <image>\n{text} ASSISTANT:"
        prompt: dict[str, Any] = {
            "prompt_token_ids": tokenizer.encode(written, add_special_tokens=False),
            "multi_modal_data": {"image": picture(number)},
        }
        if budget is not None:
            prompt["mm_processor_kwargs"] = {"anchorprune": {"budget": budget, "query": query}}
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        found.append(output.outputs[0].text)
    return found


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> Mapping[tuple[Any, ...], list[str]]:
    """(positions, query, budget) -> answers."""
    with make_engine(demo_model, None) as llm:
        found: dict[tuple[Any, ...], list[str]] = {(None, None, None): answers_of(llm, None)}
    for positions in ("compact", "native"):
        # The engine's own budget is another one than any that is asked for.
        with make_engine(demo_model, 21, settings={"positions": positions}) as llm:
            for query in ("turn", "none"):
                for budget in BUDGETS:
                    found[positions, query, budget] = answers_of(llm, budget, query)
    return found


@pytest.fixture
def questions(expected: Mapping[tuple[Any, ...], list[str]], tmp_path: Path) -> Path:
    """A file that calls some answers of each configuration right, and others wrong."""
    rows = []
    for place, (number, text) in enumerate(ASKED):
        name = f"{number}.png"
        picture(number).save(tmp_path / name)
        # In turn the answers of another configuration, with the case changed and a full stop.
        answers = list(expected.values())
        right = answers[place % len(answers)][place].upper() + "."
        row = {"image": name, "question": text, "answers": ["nothing", right]}
        rows.append({**row, "kind": "even" if place % 2 == 0 else "odd"})
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_eval_scores_what_the_model_answers(
    demo_model: Path,
    expected: Mapping[tuple[Any, ...], list[str]],
    questions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As the other engines of this process; the command sets them as defaults only.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    out = tmp_path / "out"
    status = main(
        [
            *("eval", str(demo_model), "--data", str(questions), "--out", str(out)),
            *("--budgets", ",".join(BUDGETS), "--positions", "compact,native"),
            *("--query", "turn,none", "--max-tokens", str(MAX_TOKENS)),
            *("--dtype", "float32", "--max-model-len", "1024"),
            *("--engine-args", '{"kv_cache_memory_bytes": 134217728, "block_size": 32}'),
        ]
    )
    assert status == 0
    stored = json.loads((out / "results.json").read_text())
    runs = {(run["positions"], run["query"], run["budget"]): run for run in stored["runs"]}
    assert runs.keys() == expected.keys()
    assert len(stored["runs"]) == len(runs)

    lines = [json.loads(line) for line in questions.read_text().splitlines()]
    for key, answers in expected.items():
        assert runs[key]["answers"] == answers, key
        right = [is_right(text, row["answers"]) for text, row in zip(answers, lines, strict=True)]
        assert runs[key]["right"] == "".join(str(int(ok)) for ok in right)
        assert runs[key]["accuracy"] == pytest.approx(sum(right) / len(right))
        assert runs[key]["kinds"]["odd"] == pytest.approx(sum(right[1::2]) / len(right[1::2]))
    # Otherwise any mix-up of configurations would pass.
    assert len({tuple(answers) for answers in expected.values()}) == len(expected)
    assert all(0 < run["accuracy"] < 1 for run in runs.values())

    # 144 visual tokens: all of them, 8.064 and 40.
    text = runs[None, None, None]["prompt_tokens"] - 144
    for (_, _, budget), run in runs.items():
        kept = {None: 144, "5.6%": 8, "40": 40}[budget]
        assert run["prompt_tokens"] == pytest.approx(text + kept)
    assert (out / "table.md").is_file()
    assert (out / "accuracy.png").is_file()
