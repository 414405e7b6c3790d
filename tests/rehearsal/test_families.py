# SPDX-License-Identifier: Apache-2.0
"""Families that the general adapter serves, on vLLM's CUDA platform and with both runners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from anchorprune_vllm.testing.tiny_models import TINY_MODELS
from tests.rehearsal.comparison import Rehearsal
from tests.rehearsal.conftest import ROW, Rehearse
from tests.rehearsal.job import Engine, Job

FAMILIES = (
    "qwen3-vl",
    "qwen2-vl",
    "internvl",
    "gemma3",
    "glm-4v",
    "mistral3",
    "smolvlm",
)
"""Families whose language models need no kernel of vLLM's CUDA extensions, which are not there:
Gemma 4 and all that have experts do."""
WITH_MROPE = ("qwen3-vl", "qwen2-vl", "glm-4v")
WAITS_BY_ITSELF = ("mistral3",)
"""Families whose tower waits for the device in vLLM's own code, of which it may only warn then."""
# Images that see each other are computed in one step; and the general adapter refuses the client's
# own embeddings for models with M-RoPE.
OPTIONS: Mapping[str, Any] = {
    "max_num_batched_tokens": 512,
    "enable_mm_embeds": False,
    "limit_mm_per_prompt": {"image": {"count": 3, "width": 252, "height": 252}},
}


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_family(
    arch: str,
    runner: Any,
    small_models: Callable[[str], Path],
    rehearse: Rehearse,
    record_property: Callable[[str, object], None],
) -> None:
    options = {**OPTIONS, **TINY_MODELS[arch].engine_arguments}
    variables = {"VLLM_GPU_SYNC_CHECK": "warn"} if arch in WAITS_BY_ITSELF else {}
    engine = Engine("chats", ["chats"], options=options)
    job = Job(str(small_models(arch)), [engine], variables=variables)
    rehearsal = Rehearsal(rehearse(job, "cpu")["chats"], rehearse(job, runner)["chats"])
    equal, all_answers = rehearsal.equal_answers()
    waits = [len(rehearsal.waits_of_ours(in_encoder=where)) for where in (True, False)]
    row = (arch, "images", runner, "its own", f"{equal} of {all_answers}", *map(str, waits))
    record_property(ROW, row)
    rehearsal.check_platform(runner)
    rehearsal.check_answers()
    rehearsal.check_waits(is_native=arch in WITH_MROPE)
    rehearsal.check_compilation()
