# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.model_executor.models import registry


def inspect_here(model: Any) -> Any:
    return registry._ModelInfo.from_model_cls(model.load_model_cls())


@pytest.fixture(scope="session", autouse=True)
def inspect_models_in_this_process() -> Iterator[None]:
    """Let vLLM find out in this process what a model's class can do.

    vLLM asks a process of its own, to keep this one from initializing CUDA, which takes 8 seconds
    for each class that it has not seen before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry._LazyRegisteredModel, "inspect_model_cls", inspect_here)
        yield
