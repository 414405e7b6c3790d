# SPDX-License-Identifier: Apache-2.0
"""Runs at the start of every Python process that has this folder on its path."""

import os

if os.environ.get("SIMCUDA_LIBRARY"):
    from tests.simcuda.loading import load_with_torch

    load_with_torch(os.environ["SIMCUDA_LIBRARY"])
