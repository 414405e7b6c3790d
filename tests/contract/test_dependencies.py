# SPDX-License-Identifier: Apache-2.0
"""The package declares the distributions that it imports, and no others."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "anchorprune_vllm"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

COME_WITH_ANOTHER = {
    "llvmlite": "numba",  # which chooses its version
    "triton": "torch",  # its builds for GPUs; imported only where there is one
}


def imported() -> set[str]:
    """Names of the modules of others that some file imports, at its top or later."""
    names = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {each.name.split(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module).split(".")[0])
    return names - sys.stdlib_module_names - {PACKAGE.name}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def required(requirements: list[str]) -> set[str]:
    return {normal(Requirement(each).name) for each in requirements}


def test_dependencies_are_what_is_imported() -> None:
    distributions = packages_distributions() | {"vllm": ["vllm"]}  # a CPU build has another name
    used = {
        normal(distributions.get(name, [name])[0])
        for name in imported()
        if name not in COME_WITH_ANOTHER
    }
    for_plots = required(PROJECT["optional-dependencies"]["bench"])
    assert required(PROJECT["dependencies"]) == used - for_plots
    assert for_plots <= used & required(PROJECT["optional-dependencies"]["eval"])
