# SPDX-License-Identifier: Apache-2.0
"""Answers of vLLM without the plugin: run this with VLLM_PLUGINS="" in the environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import ModelRegistry

from tests.support.engine import answer, make_engine, request
from tests.support.pictures import QUESTIONS, clip, picture


def mixed_requests(model: Path) -> list[dict[str, Any]]:
    """None to three images, several sizes and questions; videos, if the model takes them."""
    # The second takes more positions in time than in space.
    videos = [clip(520), clip(521, frames=4, fps=0.25)]
    return [
        *(request(QUESTIONS[4], video) for video in videos if takes_videos(model)),
        *(request(QUESTIONS[i % 8], picture(500 + i)) for i in range(8)),
        request(QUESTIONS[0], picture(510, (40, 300))),
        request(QUESTIONS[1], picture(511), picture(512, (17, 5))),
        request(QUESTIONS[3], picture(513, (336, 336)), picture(514, (90, 500)), picture(515)),
        request(QUESTIONS[2]),
        request(""),
    ]


def takes_videos(model: Path) -> bool:
    config = model / "config.json"  # Mistral's own format has none
    return config.exists() and "video_token_i" in config.read_text()  # id, or index


if __name__ == "__main__":
    model, out = map(Path, sys.argv[1:])
    with make_engine(model, None, max_num_batched_tokens=64) as engine:
        registered = {getattr(entry, "module_name", "") for entry in ModelRegistry.models.values()}
        assert "vllm.model_executor.models.llava" in registered
        assert not any(name.startswith("anchorprune_vllm") for name in registered)
        out.write_text(json.dumps([answer(engine, item)[0] for item in mixed_requests(model)]))
