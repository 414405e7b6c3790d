# SPDX-License-Identifier: Apache-2.0
"""docker/setup_venv.sh asks pip for what EXTRAS names, and only when something has changed.

Python is a stand-in that writes down what it is asked: nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker/setup_venv.sh"

PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) echo 3.11.9 ;;
    "-m venv") mkdir -p "$3/bin" && touch "$3/pyvenv.cfg" && cp "$0" "$3/bin/python" ;;
    "-m pip") echo "$@" >>"$ASKED" ;;
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
                **environment,
            },
            check=True,
            capture_output=True,
            timeout=60,
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
