# SPDX-License-Identifier: Apache-2.0
"""The state that vLLM's second model runner keeps for a model with native positions.

That runner has positions and token ids on the device, and asks a model that prunes for the delta of
the answer's positions whenever media are used. The delta is known from the time when the prompt was
laid out, so it is kept from then on, and the host need not read it from the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState


class NativePositionsState(DefaultModelState):
    """vLLM's default state, except that it keeps the deltas of prompts."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: Any,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        if self.mm_pruner is None:  # only text is served
            return
        rope_state = self.rope_state
        self.mm_pruner.rope_state = _KnownDeltas(rope_state)
        # A step with media copies the deltas to the device twice, each time into the next buffer of
        # a pool. vLLM's pool has one buffer for each step in flight, so the second copy would
        # overwrite a buffer that the previous step may still read.
        rope_state.prefill_delta = UvaBackedTensor(
            rope_state.max_num_reqs,
            rope_state.prefill_delta.dtype,
            2 * rope_state.prefill_delta.pool.max_concurrency,
        )


class _KnownDeltas:
    """The positions of prompts, as vLLM's `MultiModalPruner` reads and writes them."""

    def __init__(self, rope_state: RopeState) -> None:
        self._rope_state = rope_state
        self.read_prefill_positions = rope_state.read_prefill_positions

    def update_prefill_positions(self, req_idx: int, positions: Tensor, delta: None) -> None:
        """Write positions, and leave the delta as it was when the prompt was laid out."""
        known = int(self._rope_state.prefill_delta.np[req_idx])
        self._rope_state.update_prefill_positions(req_idx, positions, known)
