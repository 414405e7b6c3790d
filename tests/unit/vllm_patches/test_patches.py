# SPDX-License-Identifier: Apache-2.0
"""A run-time patch replaces its target once, and leaves a vLLM that does not need it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anchorprune_vllm.vllm_patches import Patch
from anchorprune_vllm.vllm_patches.hooks import HookGone


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of a module that stands for one of vLLM's."""

    class Runner:
        def run(self) -> str:
            return "vLLM's"

    module = ModuleType("fake_vllm")
    module.Runner = Runner  # type: ignore[attr-defined]
    module.hooks = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_vllm", module)
    return Runner


def make_patch(
    owner: str = "fake_vllm:Runner",
    name: str = "run",
    added: str = "fake_vllm:register",
    registered: Callable[..., None] | None = None,
) -> Patch:
    def wrap(original: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda self: f"{original(self)} and ours"

    return Patch(owner, name, wrap, "", "", diff="", added=added, registered=registered)


def test_a_target_is_replaced_once(runner: Any) -> None:
    make_patch().apply()
    make_patch().apply()
    assert runner().run() == "vLLM's and ours"


def test_a_function_that_vllm_has_is_used_instead(runner: Any) -> None:
    module = sys.modules["fake_vllm"]
    module.register = module.hooks.append
    make_patch(registered=print).apply()
    assert module.hooks == [print]
    assert runner().run() == "vLLM's"


def test_a_method_that_vllm_has_leaves_nothing_to_do(runner: Any) -> None:
    runner.look = lambda self: None
    make_patch(added="fake_vllm:Runner.look").apply()
    assert runner().run() == "vLLM's"


def test_a_target_that_is_gone_is_an_error(runner: Any, subtests: pytest.Subtests) -> None:
    for owner in ("fake_vllm.gone:Gone", "gone_vllm:Gone", "fake_vllm:Gone", "fake_vllm:Runner"):
        words = r"vLLM [\d.]+\S* has no .*\.gone, which the plugin extends"
        with subtests.test(owner=owner), pytest.raises(HookGone, match=words):
            make_patch(owner, "gone").apply()


def test_what_a_target_cannot_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_vllm.py").write_text("import missing_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="missing_dependency"):
        make_patch("needy_vllm:Runner", added="needy_vllm:register").apply()
