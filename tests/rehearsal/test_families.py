# SPDX-License-Identifier: Apache-2.0
"""Families that the general adapter serves, on vLLM's CUDA platform and with both runners.

Of the first-class families these cannot run there. Three need a kernel of vLLM's CUDA build, which
the simulated device does not have; they run on the second runner in
`tests/engine/test_families_reference.py`:

- `qwen3-vl-moe` chooses experts with `_moe_C.topk_softmax`,
- `glm-4v-moe` chooses groups of experts with `_moe_C.grouped_topk`,
- `llama4` sorts tokens by expert with `_moe_C.moe_align_block_size`.

The fourth is `qwen3.5`: the launch of vLLM's kernel `causal_conv1d_fn` asks a tensor for its
`nelement`, which what Triton's interpreter passes to it does not have.
"""

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
ON_ONE = {"gemma4": "V2", "idefics3": "V1", "internvl-chat": "V2", "pixtral": "V1"}
"""Families that run on one of the runners alone, to save time, and which it is."""
CASES = [
    *((arch, runner) for arch in FAMILIES for runner in ("V1", "V2")),
    *ON_ONE.items(),
]
WITH_TIMES = ("qwen3-vl", "glm-4v", "internvl")
"""Families whose prompts have a text beside each frame of a video: a time, or a number."""
WITH_MROPE = ("qwen3-vl", "qwen2-vl", "glm-4v")
WAITS_BY_ITSELF = ("mistral3", "pixtral")
"""Families whose tower waits for the device in vLLM's own code, of which it may only warn then."""
# Images that see each other are computed in one step; and the general adapter refuses the client's
# own embeddings for models with M-RoPE.
OPTIONS: Mapping[str, Any] = {"max_num_batched_tokens": 512, "enable_mm_embeds": False}
LIMITS: Mapping[str, Any] = {"image": {"count": 3, "width": 252, "height": 252}}
VIDEOS: Mapping[str, Any] = {"video": {"count": 1, "width": 168, "height": 168, "num_frames": 4}}


@pytest.mark.parametrize(("arch", "runner"), CASES)
def test_family(
    arch: str,
    runner: Any,
    small_models: Callable[[str], Path],
    rehearse: Rehearse,
    record_property: Callable[[str, object], None],
) -> None:
    has_videos = arch in WITH_TIMES
    limits = {**LIMITS, **(VIDEOS if has_videos else {})}
    family_options = TINY_MODELS[arch].engine_arguments
    options = {**OPTIONS, "limit_mm_per_prompt": limits, **family_options}
    variables = {"VLLM_GPU_SYNC_CHECK": "warn"} if arch in WAITS_BY_ITSELF else {}
    engine = Engine("chats", ["chats", *(["stamped"] if has_videos else [])], options=options)
    job = Job(str(small_models(arch)), [engine], variables=variables)
    rehearsal = Rehearsal(rehearse(job, "cpu")["chats"], rehearse(job, runner)["chats"])
    equal, all_answers = rehearsal.equal_answers()
    waits = [len(rehearsal.waits_of_ours(in_encoder=where)) for where in (True, False)]
    media = "images, videos" if has_videos else "images"
    row = (arch, media, runner, "its own", f"{equal} of {all_answers}", *map(str, waits))
    record_property(ROW, row)
    rehearsal.check_platform(runner)
    rehearsal.check_answers()
    rehearsal.check_waits(is_native=arch in WITH_MROPE)
    rehearsal.check_compilation()
