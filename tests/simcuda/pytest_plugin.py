# SPDX-License-Identifier: Apache-2.0
"""`python -m pytest -p tests.simcuda.pytest_plugin`: this process has the device."""

import os

from tests.simcuda.build import built_library
from tests.simcuda.loading import load_with_torch

os.environ["TRITON_INTERPRET"] = "1"  # Triton asks once, when it is imported
load_with_torch(built_library())
