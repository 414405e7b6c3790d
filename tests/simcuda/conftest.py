# SPDX-License-Identifier: Apache-2.0
"""Tests of the device itself, in a process that has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.rehearsal)


@pytest.fixture(autouse=True)
def device() -> None:
    assert torch.cuda.is_available(), "run pytest with -p tests.simcuda.pytest_plugin"
