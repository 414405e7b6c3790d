# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests that load models: the process group, and quicker loading."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.models import registry

from anchorprune_vllm.testing.local_model import one_rank


def inspect_here(model: Any) -> Any:
    return registry._ModelInfo.from_model_cls(model.load_model_cls())


@pytest.fixture(scope="session", autouse=True)
def models_load_quickly() -> Iterator[None]:
    """Inspect the classes of models in this process, and do not collect garbage for each model.

    vLLM starts a process for a class that it has not seen before, so that this one initializes no
    CUDA: 8 seconds each. It collects garbage twice per model, to free the memory of large ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry._LazyRegisteredModel, "inspect_model_cls", inspect_here)
        patch.setattr(base_loader, "gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the process group that models need."""
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield
