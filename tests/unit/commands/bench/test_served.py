# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from anchorprune_vllm.commands.bench.served import ServedModel
from anchorprune_vllm.commands.bench.shapes import MediaSize
from anchorprune_vllm.commands.main import main


def served(path: Path) -> ServedModel:
    return ServedModel("m", str(path), MediaSize(56, 56, 4), None, ())


def test_vllm_prunes_videos_of_qwen(demo_models) -> None:
    served(demo_models("qwen2.5-vl")).check_vllm_prunes()


def test_vllms_pruning_is_not_compared_where_there_is_none(
    demo_models, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: object) -> None:
        raise AssertionError("a server is started")

    monkeypatch.setattr(ServedModel, "serve", start)
    model = str(demo_models("llava-video"))
    options = ["--media", "56x56x4", "--vllm-video-pruning", "--out", str(tmp_path / "out")]
    assert main(["bench", "serve", "--model", model, *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--vllm-video-pruning: vLLM does not prune the videos of {model}" in line
    assert "leave the flag out" in line


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the config of .* give the hub id or the"):
        served(tmp_path).hf_config()
