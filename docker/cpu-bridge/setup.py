# SPDX-License-Identifier: Apache-2.0
"""One module and the `.pth` file that imports it; pyproject.toml has no word for the latter."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "vllm_cpu_bridge.pth"


class BuildWithPth(build_py):
    """Puts the `.pth` file beside the modules: Python reads it only at the top of site-packages."""

    def run(self) -> None:
        super().run()
        self.copy_file(PTH, str(Path(self.build_lib, PTH)))


setup(py_modules=["vllm_cpu_bridge"], cmdclass={"build_py": BuildWithPth})
