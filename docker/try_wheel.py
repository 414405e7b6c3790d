# SPDX-License-Identifier: Apache-2.0
"""Install a wheel into a clean environment and try what users touch first.

    python docker/try_wheel.py dist/anchorprune_vllm-0.1.0-py3-none-any.whl

The environment has the wheel and nothing else of this project. vLLM and all other packages come
from the environment that runs this script, so nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "venv"
        venv.create(home)
        python = home / "bin" / "python"
        install = ["--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
        run(scratch, sys.executable, "-m", "pip", "--disable-pip-version-check", *install, wheel)
        # Behind the wheel's own files in the search path: what is there twice comes from the wheel.
        (site,) = home.glob("lib/python*/site-packages")
        others = sysconfig.get_paths()["purelib"]
        (site / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n")

        file = "import anchorprune_vllm as it; print(it.__file__, it.__version__)"
        imported, version = run(scratch, python, "-c", file).split()
        assert imported.startswith(str(site)), f"{imported} is not the wheel's"
        named = "from importlib.metadata import version; print(version('anchorprune-vllm'))"
        assert run(scratch, python, "-c", named).strip() == version
        assert run(scratch, home / "bin/anchorprune", "--version").strip() == version
        # Files that are no Python: weights, chat templates.
        print(run(scratch, home / "bin/anchorprune", "demo-model", "demo"), end="")
        serve = ("-m", "vllm.entrypoints.cli.main", "serve", "--help=AnchorPrune")
        flags = run(scratch, python, *serve)
        assert "--anchorprune-budget K" in flags, flags
        print(flags)
    print(f"{wheel.name}: installed, imported and asked for help.")


def run(folder: str, *command: str | Path) -> str:
    """Return what a command prints; fail with it if the command fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
