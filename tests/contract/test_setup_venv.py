# SPDX-License-Identifier: Apache-2.0
"""docker/setup_venv.sh asks pip for what EXTRAS names, and only when something has changed.

Python is a stand-in that writes down what it is asked: nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "docker/setup_venv.sh"

PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) echo 3.11.9 ;;
    "-m venv") mkdir -p "$3/bin" && touch "$3/pyvenv.cfg" && cp "$0" "$3/bin/python" ;;
    "-m pip") echo "$@" >>"$ASKED" ;;
    *overlay_vllm.py*) echo "python $@" >>"$ASKED" ;;
esac
"""


class SetUp:
    """The script in a place of its own, on a machine without a GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, folder / "asked"
        for name, text in {"python": PYTHON, "nvidia-smi": "#!/bin/sh\nexit 1\n"}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def installed(self, **environment: str) -> list[str]:
        """What a run asks pip to install, one line for each call."""
        self.asked.write_text("")
        inherited = {name: value for name, value in os.environ.items() if name != "EXTRAS"}
        paths = {"PYTHON": self.folder / "python", "VENV": self.folder / "venv"}
        subprocess.run(
            [SCRIPT],
            env={
                **inherited,
                **{name: str(path) for name, path in paths.items()},
                "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}",
                "ASKED": str(self.asked),
                "CACHE": str(self.folder / "cache"),
                **environment,
            },
            check=True,
            capture_output=True,
        )
        return self.asked.read_text().splitlines()


@pytest.fixture
def set_up(tmp_path: Path) -> SetUp:
    return SetUp(tmp_path)


@pytest.mark.parametrize(
    ("environment", "project"),
    [({}, ".[dev,eval]"), ({"EXTRAS": "eval"}, ".[eval]"), ({"EXTRAS": ""}, ".")],
    ids=["unset", "one", "none"],
)
def test_extras(set_up: SetUp, environment: dict[str, str], project: str) -> None:
    torch, vllm, ours = set_up.installed(**environment)
    assert "torch==" in torch
    assert vllm.endswith("/cpu-bridge")
    assert ours.endswith(f" --editable {project}")


def test_a_second_run_has_nothing_to_do(set_up: SetUp) -> None:
    assert set_up.installed(EXTRAS="")
    assert set_up.installed(EXTRAS="") == []
    assert set_up.installed()[-1].endswith(".[dev,eval]")


def test_a_vllm_without_a_cpu_build(set_up: SetUp) -> None:
    """The wheel is downloaded once, and its Python files go over the CPU build."""
    _, _, download, overlay, requirements, ours = set_up.installed(VERSION="0.99.0")
    assert download.endswith(f"download --no-deps --dest {set_up.folder}/cache vllm==0.99.0")
    assert overlay.startswith("python docker/overlay_vllm.py")
    assert requirements.endswith("/requirements.txt")
    assert ours.endswith(" --editable .[dev,eval]")
    assert "vllm==0.99.0+cpu" in (set_up.folder / "venv/constraints.txt").read_text()
    assert (
        'version = "0.99.0+cpu"' in (set_up.folder / "venv/cpu-bridge/pyproject.toml").read_text()
    )
    wheel = set_up.folder / "cache/vllm-0.99.0-cp38-abi3-manylinux.whl"
    wheel.write_text("")
    *_, overlay, requirements, ours = set_up.installed(VERSION="0.99.0", EXTRAS="")
    assert overlay == f"python docker/overlay_vllm.py {wheel}"
    assert set_up.installed(VERSION="0.99.0", EXTRAS="") == []


def overlay_module() -> Any:
    spec = spec_from_file_location("overlay_vllm", SCRIPT.with_name("overlay_vllm.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_python_files_over_the_libraries_of_another_version(tmp_path: Path) -> None:
    overlay, package = overlay_module(), tmp_path / "vllm"
    (package / "old").mkdir(parents=True)
    for name in ("_C.abi3.so", "gone.py", "old/gone.py"):
        (package / name).write_text("0.32")
    with zipfile.ZipFile(tmp_path / "new.whl", "w") as wheel:
        for name in (
            "vllm/new.py",
            "vllm/a/new.json",
            "vllm/_C.abi3.so",
            "vllm/vllm-rs",
            "other.py",
        ):
            wheel.writestr(name, "0.33")
        asked = ["orjson>=3", "transformers>=5.16.1", "torch==2.14.0", "tilelang==0.1"]
        wheel.writestr("vllm.dist-info/METADATA", "".join(f"Requires-Dist: {r}\n" for r in asked))
        overlay.remove_python(package)
        overlay.unpack_python(wheel, tmp_path)
        wanted = overlay.requirements_of(wheel)
    found = {str(f.relative_to(package)): f.read_text() for f in package.rglob("*") if f.is_file()}
    assert found == {"_C.abi3.so": "0.32", "new.py": "0.33", "a/new.json": "0.33"}
    assert wanted == ["orjson>=3", "transformers>=5.16.1"]
