# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from anchorprune_vllm.testing.local_model import one_rank


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process group that models need."""
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield
