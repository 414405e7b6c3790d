# SPDX-License-Identifier: Apache-2.0
"""Compiles the device once for each version of its source and of torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).parent / "device"
_BUILT = Path(__file__).parents[2] / "build" / "simcuda"  # ignored by git


def built_library() -> Path:
    """Return the compiled device; compiling takes half a minute.

    Raises RuntimeError if there is no C++ compiler, or if it fails.
    """
    files = sorted(_SOURCE.iterdir())
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(version.encode() + b"".join(file.read_bytes() for file in files))
    library = _BUILT / f"libsimcuda-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        _compile(library)
    return library


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _compile(library: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"simulated CUDA needs a C++ compiler, and {compiler} is not there: install one "
            "(Debian and Ubuntu: apt-get install g++), or name yours in CXX"
        )
    torch = torch_folder()
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [
        *(compiler, "-std=c++20", "-O1", "-fPIC", "-shared", str(_SOURCE / "simcuda.cpp")),
        *(f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"),
        *(f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"),
        *("-o", str(unfinished)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"simulated CUDA does not compile:\n{ended.stderr}")
    unfinished.rename(library)  # other processes see all of it, or nothing


if __name__ == "__main__":
    try:
        built_library()
    except RuntimeError as error:
        raise SystemExit(f"make rehearse: {error}") from error
