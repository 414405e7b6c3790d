# SPDX-License-Identifier: Apache-2.0
"""The demo model, made once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA-1.5 with 144 visual tokens; its CLIP is in `clip`."""
    from anchorprune_vllm.tools.demo_model import make_demo_model

    model = tmp_path_factory.mktemp("demo") / "model"
    make_demo_model(model)
    return model
