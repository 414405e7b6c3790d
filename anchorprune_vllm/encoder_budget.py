# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, told what the vision tower has to do: unpruned tokens, not those that are left.

A step has a budget for the vision tower, and the encoder cache has room; vLLM measures both by the
tokens of a prompt. Pruned, an image takes up K of them, but the tower still sees all N: a step
would take in N / K times as many images as without pruning, with all their pixels on the device at
once, and requests that decode would wait for them.

vLLM lets its encoder cache manager be replaced (`--ec-manager-config`), and that one is asked for
every item whether it may be scheduled. Space is counted in K as before, work in N.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from anchorprune_vllm.plan import PlanFields, read_counts

CLASS_PATH = f"{__name__}.UnprunedWorkManager"


class UnprunedWorkManager(EncoderCacheManager):
    """Admits items to a step as long as the vision tower sees no more tokens than a step has.

    Unpruned, a step takes in the images whose tokens it computes, so it has at most as many of the
    tower's tokens as of the prompts' (`--max-num-batched-tokens`), or one item. An item that is
    alone is admitted whatever its size: none waits for ever. Items whose tower outputs a worker
    still has in its feature cache are counted all the same: the scheduler cannot know of them.
    """

    def __init__(self, cache_size: int, most_tokens: int) -> None:
        super().__init__(cache_size)
        self._most_tokens = most_tokens
        self._scheduled: dict[tuple[str, int], int] = {}
        """Items of this step, and the tower's tokens of each."""
        self._offered: dict[tuple[str, int], int] = {}
        """The same of items of the request that is looked at, which may yet not be scheduled."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> UnprunedWorkManager:
        return cls(cache_size, vllm_config.scheduler_config.max_num_encoder_input_tokens)

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        if not num_embeds_to_schedule:  # the first of this request in this step
            self._offered = {}
        before = {**self._scheduled, **self._offered}
        tokens = unpruned_tokens(request, input_id)
        if before and sum(before.values()) + tokens > self._most_tokens:
            return False
        if not super().can_allocate(
            request, input_id, encoder_compute_budget, num_embeds_to_schedule
        ):
            return False
        self._offered[request.request_id, input_id] = tokens
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        super().allocate(request, input_id)
        item = request.request_id, input_id
        self._scheduled[item] = self._offered.get(item, 0)

    def get_freed_mm_hashes(self) -> list[str]:
        """Called once at the end of each step."""
        self._scheduled = {}
        self._offered = {}
        return super().get_freed_mm_hashes()


def unpruned_tokens(request: Request, input_id: int) -> int:
    """Return how many tokens of an item the vision tower makes.

    Without a plan these are the tokens of the prompt: the client's own embeddings, for which no
    tower runs, and items that only workers can read (`--mm-processor-cache-type shm`).
    """
    feature = request.mm_features[input_id]
    counts: Any = (feature.data or {}).get(PlanFields.of(feature.modality).counts)
    if counts is None:
        return request.get_num_encoder_embeds(input_id)
    return read_counts(counts.data)[1].unpruned
