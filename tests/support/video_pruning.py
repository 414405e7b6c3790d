# SPDX-License-Identifier: Apache-2.0
"""vLLM's own video pruning, without the plugin: run this with VLLM_PLUGINS="" in the environment.

Argument: a Qwen2.5-VL. Prints one line of JSON: tokens of the prompt unpruned and pruned.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.engine import GREEDY, generate, make_engine, request
from tests.support.pictures import QUESTIONS, clip

if __name__ == "__main__":
    lengths = []
    for rate in (None, 0.5):
        with make_engine(Path(sys.argv[1]), None, video_pruning_rate=rate) as engine:
            (output,) = generate(engine, request(QUESTIONS[0], clip(5)))
            assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
            lengths.append(len(output.prompt_token_ids))
    print(json.dumps(lengths))
