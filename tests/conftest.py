# SPDX-License-Identifier: Apache-2.0
"""The demo models, each made once for all tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from anchorprune_vllm.tools.demo_model import ARCHITECTURES, make_demo_model


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one model run in one process, where they share its engines; others by file."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        item.add_marker(pytest.mark.xdist_group(parameters.get("any_model", item.path.name)))


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory):
    """arch -> directory of the model."""

    @cache
    def make(arch: str) -> Path:
        model = tmp_path_factory.mktemp("demo") / "model"
        make_demo_model(model, arch=arch)
        return model

    return make


@pytest.fixture(scope="session")
def demo_model(demo_models) -> Path:
    """A tiny LLaVA-1.5 with 144 visual tokens."""
    return demo_models("llava-1.5")


@pytest.fixture(scope="session", params=ARCHITECTURES)
def any_model(request: pytest.FixtureRequest, demo_models) -> Path:
    """Each of the demo models in turn: tests that use it, run for all architectures."""
    return demo_models(request.param)


@pytest.fixture(scope="session")
def reference(any_model: Path):
    """The independent pipeline of the same model."""
    from tests.support.reference import reference_of

    return reference_of(any_model)
