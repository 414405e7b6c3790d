# SPDX-License-Identifier: Apache-2.0
"""README, CONTRIBUTING and CHANGELOG speak of what is there."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from anchorprune_vllm.commands.main import _parser
from anchorprune_vllm.config import SETTINGS
from anchorprune_vllm.methods import registry
from anchorprune_vllm.models.families.base import Family

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "anchorprune_vllm"
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

PROSE = re.sub(r"^```.*?^```", "", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)
QUOTED = sorted(set(re.findall(r"`([^`]+)`", PROSE)))
IS_PATH = re.compile(r"[\w./-]+/|[\w./-]+\.(py|md|sh|toml|yaml)|docker/[\w-]+")
PATHS = [quoted for quoted in QUOTED if IS_PATH.fullmatch(quoted)]
IS_NAME = re.compile(r"@?(\w+\.)*(\w+)(\(.*\))?")
NAMES = [quoted for quoted in QUOTED if quoted not in PATHS and IS_NAME.fullmatch(quoted)]
OF_PYTHON = {"if"}


@pytest.mark.parametrize("path", PATHS)
def test_files_and_folders_exist(path: str) -> None:
    """From the repository's root, or from the package's."""
    found = [at / path for at in (ROOT, PACKAGE) if (at / path).exists()]
    assert found
    assert not path.endswith("/") or found[0].is_dir()


@pytest.mark.parametrize("name", sorted({*NAMES} - OF_PYTHON))
def test_names_occur_in_the_code(name: str) -> None:
    last = IS_NAME.fullmatch(name)[2]
    assert re.search(rf"\b{last}\b", sources()), f"nothing is called {last}"


@cache
def sources() -> str:
    files = [*PACKAGE.rglob("*.py"), *ROOT.glob("tests/**/conftest.py"), ROOT / "Makefile"]
    files += [*ROOT.glob("tests/engine/*.py"), *ROOT.glob("tests/support/**/*.py")]
    files += [*ROOT.glob("tests/rehearsal/*.py"), *ROOT.glob("tests/simcuda/*.py")]
    files.append(ROOT / "pyproject.toml")
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_the_map_has_every_file_and_folder_of_the_package() -> None:
    table = CONTRIBUTING.split("## The map")[1].split("\n## ")[0]
    there = {
        path.name + "/" * path.is_dir()
        for path in PACKAGE.iterdir()
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert sorted(name for name in there if f"`{name}`" not in table) == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)(?=\s)", "\n".join(code_of(CONTRIBUTING))))
    assert named
    assert named <= targets


def code_of(text: str) -> list[str]:
    """What is set as code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [*blocks, *(f"{words} " for words in QUOTED)]


def test_the_changelog_begins_with_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (first, *_) = re.findall(r"^## \[([^\]]+)\]", CHANGELOG, re.MULTILINE)
    assert first == project["version"]


def test_the_changelog_has_every_method() -> None:
    written = CHANGELOG.lower()
    assert [name for name in registry.names() if name not in written] == []


TROUBLES = re.findall(r"^\| `([^`]+)` \|", README.split("## Troubleshooting")[1], re.MULTILINE)
OF_VLLM = {
    "unrecognized arguments: --anchorprune-budget",
    "Per-request mm_processor_kwargs are disabled by default",
}


@pytest.mark.parametrize("text", sorted({*TROUBLES} - OF_VLLM))
def test_error_texts_are_those_of_the_package(text: str) -> None:
    joined = re.sub(r'"\s+f?"', "", sources())  # strings that go on in the next line
    # What was given differs from case to case: it is quoted, or in parentheses.
    for part in re.split(r"'[^']*'(?: \([^)]*\))?|…", text):
        assert part.strip() in joined


BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
LINES = "".join(BLOCKS).replace("\\\n", " ").splitlines()
COMMANDS = [line for line in LINES if line.startswith("anchorprune ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    assert _parser().parse_args(shlex.split(command, comments=True)[1:])


OWN_MODEL = (ROOT / "docs/your-own-model.md").read_text(encoding="utf-8")


def test_the_family_in_the_docs_is_the_one_that_tests_install() -> None:
    package = ROOT / "tests/support/family_package"
    (code,) = re.findall(r"^```python\n(.*?)^```", OWN_MODEL, re.MULTILINE | re.DOTALL)
    assert (package / "tiled_vision.py").read_text(encoding="utf-8").endswith(f'"""\n\n{code}')
    (project,) = re.findall(r"^```toml\n(.*?)^```", OWN_MODEL, re.MULTILINE | re.DOTALL)
    points = configparser.ConfigParser()
    points.optionxform = str
    points.read(package / "tiled_vision-1.0.dist-info" / "entry_points.txt")
    written = tomllib.loads(project)["project"]["entry-points"]
    assert written == {name: dict(points[name]) for name in points.sections()}


def test_the_docs_have_every_hook_of_a_family() -> None:
    hooks = [name for name, value in vars(Family).items() if not name.startswith("_")]
    table = OWN_MODEL.split("## The hooks")[1]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == hooks


def test_tables_of_settings_and_methods_are_complete() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", README, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    by_flag = {"budget", "video_budget", "method", "query", "text_encoder"}
    settings = set(SETTINGS) - by_flag
    assert {*settings, *registry.names()} - told == set()
    assert {f"--anchorprune-{name.replace('_', '-')}" for name in by_flag} <= {
        name.split()[0] for name in told
    }
