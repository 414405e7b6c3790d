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

from collections.abc import Hashable
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from anchorprune_vllm.plan import PlanFields, read_counts

CLASS_PATH = f"{__name__}.UnprunedWorkManager"

_SHARE_OF_PIXELS = 8
"""A further question about media of the same step costs this part of the media's tokens: the tower
does not run for it, but its pixels are on the device once more. An estimate: going by the sizes of
layers, pixels take up 5 to 15% of the memory that the tower needs to encode them."""


class _Work(NamedTuple):
    """What an item costs the vision tower."""

    media: Hashable
    tokens: int


class UnprunedWorkManager(EncoderCacheManager):
    """Admits items to a step as long as the vision tower sees no more tokens than a step has.

    Unpruned, a step takes in the images whose tokens it computes, so it has at most as many of the
    tower's tokens as of the prompts' (`--max-num-batched-tokens`), or one item. An item that is
    alone is admitted whatever its size: none waits for ever. Questions about the same media in one
    step run the tower once. Items whose tower outputs a worker still has from earlier steps are
    counted all the same: the scheduler cannot know what its feature cache has dropped.
    """

    def __init__(self, cache_size: int, most_tokens: int) -> None:
        super().__init__(cache_size)
        self._most_tokens = most_tokens
        self._scheduled: dict[tuple[str, int], _Work] = {}
        """Items of this step. One whose request is preempted in the same step stays: the step then
        does less than was counted."""
        self._offered: dict[tuple[str, int], _Work] = {}
        """Items of the request that is looked at, which may yet not be scheduled."""

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
        before = {**self._scheduled, **self._offered}.values()
        work = tower_work(request, input_id)
        if work.media in {other.media for other in before}:
            work = work._replace(tokens=work.tokens // _SHARE_OF_PIXELS)
        if before and sum(other.tokens for other in before) + work.tokens > self._most_tokens:
            return False
        if not super().can_allocate(
            request, input_id, encoder_compute_budget, num_embeds_to_schedule
        ):
            return False
        self._offered[request.request_id, input_id] = work
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        super().allocate(request, input_id)
        item = request.request_id, input_id
        if item in self._offered:
            self._scheduled[item] = self._offered[item]

    def get_freed_mm_hashes(self) -> list[str]:
        """Called once at the end of each step."""
        self._scheduled = {}
        self._offered = {}
        return super().get_freed_mm_hashes()


def tower_work(request: Request, input_id: int) -> _Work:
    """Return which media an item is, and how many tokens the vision tower makes of it.

    Without a plan these are the tokens of the prompt: the client's own embeddings, for which no
    tower runs, and items that only workers can read (`--mm-processor-cache-type shm`).
    """
    feature = request.mm_features[input_id]
    data: Any = feature.data or {}
    fields = PlanFields.of(feature.modality)
    item = request.request_id, input_id
    if fields.counts not in data:
        return _Work(item, request.get_num_encoder_embeds(input_id))
    kept, tokens = read_counts(data[fields.counts].data)
    # An item that keeps all goes vLLM's way, for which the tower runs each time.
    media = item if tokens.are_all_kept(kept) else tuple(data[fields.media].data.tolist())
    return _Work(media, tokens.unpruned)
