# SPDX-License-Identifier: Apache-2.0
"""Answers under native positions: run this with a vLLM on PYTHONPATH.

Argument: a Qwen2.5-VL. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from anchorprune_vllm.vllm_patches import PATCHES
from tests.support.engine import answer, make_engine, request
from tests.support.patch_report import is_replaced
from tests.support.pictures import QUESTIONS, clip, picture


def reads_positions(worker: Any) -> bool:
    return worker.model_runner.is_multimodal_pruning_enabled


if __name__ == "__main__":
    requests = [
        request(QUESTIONS[0], picture(1)),
        request(QUESTIONS[1], picture(2, (40, 300)), picture(3)),
        request(QUESTIONS[2], clip(4)),
    ]
    with make_engine(Path(sys.argv[1]), 16, max_num_batched_tokens=64) as engine:
        report = {
            "reads_positions": engine.collective_rpc(reads_positions),
            "answers": answer(engine, *requests),
            "replaced": [patch.diff for patch in PATCHES if is_replaced(patch)],
        }
    print(json.dumps(report))
