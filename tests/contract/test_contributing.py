# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING, the changelog and the workflows name files, code and targets that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from anchorprune_vllm import __version__
from anchorprune_vllm.methods import registry

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "anchorprune_vllm"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

PROSE = re.sub(r"^```.*?^```", "", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)
QUOTED = sorted(set(re.findall(r"`([^`]+)`", PROSE)))
IS_PATH = re.compile(r"[\w./-]+/|[\w./-]+\.(py|md|sh|toml|yaml)|docker/[\w-]+")
PATHS = [quoted for quoted in QUOTED if IS_PATH.fullmatch(quoted)]
IS_NAME = re.compile(r"@?(\w+\.)*(\w+)(\(.*\))?")
NAMES = [quoted for quoted in QUOTED if quoted not in PATHS and IS_NAME.fullmatch(quoted)]
OF_PYTHON = {"if"}


@pytest.mark.parametrize("path", PATHS)
def test_files_and_folders_exist(path: str) -> None:
    """Paths start at the repository's root or at the package's."""
    found = [at / path for at in (ROOT, PACKAGE) if (at / path).exists()]
    assert found
    assert not path.endswith("/") or found[0].is_dir()


@pytest.mark.parametrize("name", sorted({*NAMES} - OF_PYTHON))
def test_names_occur_in_the_code(name: str) -> None:
    last = IS_NAME.fullmatch(name)[2]
    assert re.search(rf"\b{last}\b", sources()), f"nothing is called {last}"


@cache
def sources() -> str:
    files = [*PACKAGE.rglob("*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "pyproject.toml"]
    return "\n".join([MAKEFILE, *(file.read_text(encoding="utf-8") for file in files)])


def test_the_map_has_every_file_and_folder_of_the_package() -> None:
    table = CONTRIBUTING.split("## The map")[1].split("\n## ")[0]
    there = {
        path.name + "/" * path.is_dir()
        for path in PACKAGE.iterdir()
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert sorted(name for name in there if f"`{name}`" not in table) == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)(?=\s)", code_of(CONTRIBUTING)))
    assert named
    assert named <= targets
    workflows = [yaml.safe_load(f.read_text()) for f in ROOT.glob(".github/workflows/*.yml")]
    called = {target.split()[0] for workflow in workflows for target in called_by(workflow)}
    assert {"lint", "test-fast", "test-engine", "docs", "wheel"} <= called <= targets


def called_by(workflow: dict) -> list[str]:
    """The targets in the matrix of a workflow's only job."""
    (job,) = workflow["jobs"].values()
    assert {"run": "make ${{ matrix.target }}"} in job["steps"]
    matrix = job["strategy"]["matrix"]
    return [*matrix.get("target", []), *(each["target"] for each in matrix.get("include", []))]


def code_of(text: str) -> str:
    """All that is set as code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *(f"{words} " for words in QUOTED)])


def test_the_changelog_begins_with_this_version() -> None:
    (first, *_) = re.findall(r"^## \[([^\]]+)\]", CHANGELOG, re.MULTILINE)
    assert first == __version__


def test_the_changelog_has_every_method() -> None:
    written = CHANGELOG.lower()
    assert [name for name in registry.names() if name not in written] == []
