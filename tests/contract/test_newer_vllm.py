# SPDX-License-Identifier: Apache-2.0
"""A vLLM in which something that we build on has another name: pruning says so, all else runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.patched_vllm import PatchedVllm

CHECK = {
    ("create_model_config", "build_model_config"): [
        "vllm/engine/arg_utils.py",
        "vllm/entrypoints/launchers/render/entry.py",
    ]
}
IDENTITY = {
    ("_get_mm_hashes", "_hash_items"): [
        "vllm/multimodal/processing/processor.py",
        "vllm/model_executor/models/qwen3_vl.py",
    ]
}
# Without the check at start-up, the model itself refuses.
LACKS = {
    "the check at start-up": (CHECK, "EngineArgs.create_model_config, which the plugin extends"),
    "an item's identity": (IDENTITY, "BaseMultiModalProcessor._get_mm_hashes, which pruning needs"),
    "both": ({**CHECK, **IDENTITY}, "BaseMultiModalProcessor._get_mm_hashes, which pruning needs"),
}


@pytest.fixture(scope="module")
def plain(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers of vLLM as it is, without the plugin."""
    installed = PatchedVllm(tmp_path_factory.mktemp("installed"), [])
    return report(installed, demo_model, VLLM_PLUGINS="")["answers"]


def report(vllm: PatchedVllm, model: Path, **environment: str) -> Any:
    done = vllm.run("-m", "tests.support.newer_vllm", str(model), **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.engine
@pytest.mark.parametrize("lacks", LACKS)
def test_without_a_budget_nothing_breaks(
    lacks: str, plain: Any, demo_model: Path, tmp_path: Path
) -> None:
    renamed, words = LACKS[lacks]
    seen = report(PatchedVllm(tmp_path / "newer", [], renamed), demo_model)
    assert seen["answers"] == plain
    assert words in seen["refused"]
