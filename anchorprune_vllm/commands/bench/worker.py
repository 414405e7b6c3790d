# SPDX-License-Identifier: Apache-2.0
"""What a benchmark reads in the worker: `--worker-extension-cls` adds it to vLLM's own.

vLLM's own encoder times wait for the device before and after every call, and no flag of the command
line turns them on.
"""

from __future__ import annotations

from typing import Any

import torch

from anchorprune_vllm.metrics.stopwatch import Stopwatch


class StageTimes:
    """Methods for `collective_rpc`."""

    model_runner: Any

    def anchorprune_start_timing(self) -> None:
        """From now on, time the calls that embed media, and note the highest level of memory."""
        model, watch = self.model_runner.get_model(), Stopwatch()
        embed, device = model.embed_multimodal, self.model_runner.device

        def timed(**kwargs: Any) -> Any:
            with watch.timing(1, device):
                return embed(**kwargs)

        model.embed_multimodal, model.anchorprune_embedding_time = timed, watch
        if torch.cuda.is_available():
            # vLLM tries the largest batch at start-up: requests may need less.
            torch.cuda.reset_peak_memory_stats()

    def anchorprune_read_stages(self) -> dict[str, float]:
        """Seconds of embedding media, and of selection as a part of it; bytes on the device."""
        model = self.model_runner.get_model()
        embedding, _ = model.anchorprune_embedding_time.read()
        pruner = getattr(model, "_pruner", None)
        selection = 0.0 if pruner is None else pruner.selection_time.read()[0]
        stages = {"embedding_seconds": embedding, "selection_seconds": selection}
        if torch.cuda.is_available():
            # vLLM fills the device with its KV cache, however much of it requests need.
            cache = {tensor.data_ptr(): tensor.nbytes for tensor in self.model_runner.kv_caches}
            stages["device_bytes"] = torch.cuda.max_memory_allocated() - sum(cache.values())
        return stages
