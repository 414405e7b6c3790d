# SPDX-License-Identifier: Apache-2.0
"""A draft model (EAGLE-3) beside native positions: answers are those without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import LoadConfig

from tests.support.engine import generate, make_engine, request
from tests.support.pictures import QUESTIONS, picture

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)


def draft_of(model: Path, folder: Path) -> dict[str, Any]:
    """Options for a draft of random weights: nearly all of its tokens are rejected."""
    text = json.loads((model / "config.json").read_text())["text_config"]
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    draft = {
        **text,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": text["vocab_size"],
        "eagle_config": layers,
    }
    (folder / "config.json").write_text(json.dumps(draft))
    return {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": 3,
        "draft_load_config": LoadConfig(load_format="dummy"),
    }


def test_answers_are_those_without_a_draft(demo_model: Path, tmp_path: Path) -> None:
    asked = [request(QUESTIONS[i], picture(785 + i)) for i in range(4)]
    asked.append({**request("", picture(789)), "prompt": f"USER: {QUESTIONS[0]} <image>"})

    def answers(**options: Any) -> tuple[list[list[int]], list[float]]:
        with make_engine(
            demo_model,
            16,
            settings={"positions": "native"},
            max_num_batched_tokens=48,
            max_num_seqs=8,
            max_model_len=512,
            **options,
        ) as llm:
            outputs = [one.outputs[0] for one in generate(llm, *asked, params=PARAMS)]
        tokens = [list(output.token_ids) for output in outputs]
        given = [
            step[token].logprob
            for output in outputs
            for token, step in zip(output.token_ids, output.logprobs, strict=True)
        ]
        return tokens, given

    tokens, expected = answers()
    drafted, given = answers(
        speculative_config=draft_of(demo_model, tmp_path), async_scheduling=False
    )
    assert drafted == tokens
    assert given == pytest.approx(expected, abs=1e-3)
