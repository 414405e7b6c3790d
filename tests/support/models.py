# SPDX-License-Identifier: Apache-2.0
"""Which of the demo models a test is for."""

from __future__ import annotations

import pytest

with_videos = pytest.mark.parametrize(
    "any_model", ["qwen2.5-vl", "llava-onevision", "llava-video"], indirect=True
)
"""Those that take videos."""
