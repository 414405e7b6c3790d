# SPDX-License-Identifier: Apache-2.0
"""Which part of the package may import which, and what an import may load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "anchorprune_vllm"

# A folder, and what its files never import. Whoever wants to cross a border moves code instead.
BORDERS = {
    "api": {"worker", "models", "engine_core", "startup"},
    "worker": {"api", "models", "engine_core", "startup"},
    "engine_core": {"api", "worker", "models", "startup"},
    "selection": {"api", "worker", "models", "signals", "methods", "metrics", "plan", "config"},
    "signals": {"api", "worker", "models", "methods", "metrics", "plan"},
    "methods": {"api", "worker", "models", "signals", "metrics", "plan"},
    "metrics": {"api", "worker", "models", "selection.batch", "startup"},
    "models": {"startup", "plugin"},
}
TOOLS = {"commands", "testing"}
"""What the served product never imports."""


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        assert getattr(node, "level", 0) == 0, f"a relative import in {file}"
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def files_of(folder: str) -> list[Path]:
    files = [*(PACKAGE / folder).rglob("*.py")]
    assert files, f"there is no folder {folder}"
    return files


def is_within(module: str, part: str) -> bool:
    return f"{module}.".startswith(f"anchorprune_vllm.{part}.")


def test_borders(subtests):
    for folder in BORDERS:
        with subtests.test(folder=folder):
            crossed = {
                f"{file.relative_to(PACKAGE)} imports {module}"
                for file in (PACKAGE / folder).rglob("*.py")
                for module in imports(file)
                for part in BORDERS[folder]
                if is_within(module, part)
            }
            assert crossed == set()


def test_the_product_never_imports_its_tools():
    files = [f for f in PACKAGE.rglob("*.py") if f.relative_to(PACKAGE).parts[0] not in TOOLS]
    crossed = {
        f"{file.relative_to(PACKAGE)} imports {module}"
        for file in files
        for module in imports(file)
        for part in TOOLS
        if is_within(module, part)
    }
    assert crossed == set()


def test_these_know_nothing_of_vllm(subtests):
    for folder in ("selection", "signals", "methods"):
        with subtests.test(folder=folder):
            for file in files_of(folder):
                assert not [m for m in imports(file) if m.split(".")[0] == "vllm"], file


def loaded_by(module: str, candidates: list[str]) -> list[str]:
    program = f"import sys, {module}; print(*[m for m in {candidates} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_does_not_load(subtests):
    """Checked in a fresh process, as this one has loaded all."""
    for module, forbidden in (
        ("anchorprune_vllm", ["torch", "vllm", "transformers"]),
        ("anchorprune_vllm.budget", ["torch", "vllm", "transformers"]),
        ("anchorprune_vllm.methods.registry", ["torch", "vllm", "transformers"]),
        ("anchorprune_vllm.selection", ["vllm", "transformers"]),
        ("anchorprune_vllm.selection.kernels", ["vllm", "transformers", "triton", "numba"]),
        ("anchorprune_vllm.signals.attention", ["vllm", "transformers", "triton"]),
        ("anchorprune_vllm.signals.clip", ["vllm"]),
        ("anchorprune_vllm.worker.pruner", ["vllm", "transformers"]),
    ):
        with subtests.test(module=module):
            assert loaded_by(module, forbidden) == []


def test_the_question_can_be_answered_with_yes():
    assert loaded_by("anchorprune_vllm.selection", ["torch"]) == ["torch"]
