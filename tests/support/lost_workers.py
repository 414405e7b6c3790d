# SPDX-License-Identifier: Apache-2.0
"""Lets xdist see that a process of tests is gone, even if its children live on."""

from __future__ import annotations

import os
from functools import partial

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Close the pipe to xdist in every process that is forked from a process of tests.

    xdist takes a process for lost when its pipe ends, and an engine's forked processes would keep
    that open.
    """
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":  # xdist's, in its processes alone
            pipe = plugin.channel.gateway._io.outfile.fileno()
            os.register_at_fork(after_in_child=partial(os.close, pipe))
