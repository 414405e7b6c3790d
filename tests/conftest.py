# SPDX-License-Identifier: Apache-2.0
"""The demo models, each made once for all tests."""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from anchorprune_vllm.testing.demo_models.make import DEMO_MODELS, make_demo_model
from tests.support.lost_workers import pytest_configure
from tests.support.runners import EITHER, RUNNERS, runner_of

__all__ = ["pytest_configure"]

# As in the Makefile, which says why; servers and other processes of the tests inherit it. oneDNN
# reads it when it is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# By itself Hypothesis fails a test that is slow, as all are on a busy machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


class ByEngine(LoadScopeScheduling):
    """Tests of one model and runner share a process, and so its engines; others go by file."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, parameters = nodeid.partition("[")
        named = [arch for arch in DEMO_MODELS if arch in parameters]
        if not named:
            return file.partition("::")[0]
        asked = [name for name in (*RUNNERS, EITHER) if name in parameters]
        return f"{named[0]} {runner_of((asked or RUNNERS)[0], named[0])}"


def pytest_collection_finish() -> None:
    """Take what is imported by now out of the reach of the garbage collector.

    vLLM collects garbage whenever it loads a model, and would look through all modules each time.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries whose modules are never freed would complain of leaks at the end


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByEngine:
    return ByEngine(config, log)


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory):
    """arch -> directory of the model, in a folder of that name."""

    @cache
    def make(arch: str) -> Path:
        model = tmp_path_factory.mktemp(arch, numbered=False) / "model"
        make_demo_model(model, arch=arch)
        return model

    return make


@pytest.fixture(scope="session")
def demo_model(demo_models) -> Path:
    """A tiny LLaVA-1.5 with 144 visual tokens."""
    return demo_models("llava-1.5")


@pytest.fixture(scope="session", params=DEMO_MODELS)
def any_model(request: pytest.FixtureRequest, demo_models) -> Path:
    """Each of the demo models in turn: tests that use it, run for all architectures."""
    return demo_models(request.param)


@pytest.fixture(scope="session")
def reference(any_model: Path):
    """The independent pipeline of the same model."""
    from tests.support.reference import reference_of

    return reference_of(any_model)
