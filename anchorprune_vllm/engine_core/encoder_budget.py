# SPDX-License-Identifier: Apache-2.0
"""An encoder cache manager that counts the vision tower's work in unpruned tokens.

A step has a budget for the vision tower, and the encoder cache has a capacity; vLLM measures both
in tokens of the prompt. A pruned image takes up K of them, but the tower still sees all N. A step
would thus admit N / K times as many images as without pruning, with all their pixels on the device
at once, and requests that decode would wait for them.

vLLM allows its encoder cache manager to be replaced (`--ec-manager-config`), and asks it for every
item whether the item may be scheduled. Here, space is counted in K as before, and work in N.
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
"""A further question about media of the same step costs this part of the media's tokens. The tower
does not run for it again, but its pixels are on the device once more. This is an estimate: judging
by the sizes of layers, pixels take up 5 to 15% of the memory that the tower needs for them."""


class _Work(NamedTuple):
    """The work that an item is for the vision tower."""

    media: Hashable
    tokens: int


class UnprunedWorkManager(EncoderCacheManager):
    """Admits items to a step as long as the vision tower sees no more tokens than a step has.

    Without pruning, a step computes the tokens of the images it admits, so the tower sees at most
    as many tokens as prompts have in a step (`--max-num-batched-tokens`), or one item. A single
    item is admitted whatever its size, so that none waits forever. Questions about the same media
    in one step run the tower once. Items are counted even if a worker has cached their tower
    outputs, because the scheduler cannot know what the feature cache has dropped.
    """

    def __init__(self, cache_size: int, most_tokens: int) -> None:
        super().__init__(cache_size)
        self._most_tokens = most_tokens
        self._scheduled: dict[tuple[str, int], _Work] = {}
        """The items of this step. An item stays even if its request is preempted in the same step,
        which then does less work than was counted."""
        self._offered: dict[tuple[str, int], _Work] = {}
        """Admitted items of the current request, which may still not be scheduled."""

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
        if not num_embeds_to_schedule:  # the first item of this request in this step
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
        """Return the hashes of freed items, as vLLM asks once at the end of each step."""
        self._scheduled = {}
        self._offered = {}
        return super().get_freed_mm_hashes()


def tower_work(request: Request, input_id: int) -> _Work:
    """Return an item's media, and the number of tokens that the vision tower makes of it.

    Without a plan, this is the number of tokens in the prompt. The client's own embeddings, for
    which no tower runs, have no plan; items that only workers can read have none here
    (`--mm-processor-cache-type shm`).
    """
    feature = request.mm_features[input_id]
    data: Any = feature.data or {}
    fields = PlanFields.of(feature.modality)
    item = request.request_id, input_id
    if fields.counts not in data:
        return _Work(item, request.get_num_encoder_embeds(input_id))
    kept, tokens = read_counts(data[fields.counts].data)
    # An item that keeps all tokens takes vLLM's own path, on which the tower runs each time.
    media = item if tokens.are_all_kept(kept) else tuple(data[fields.media].data.tolist())
    return _Work(media, tokens.unpruned)
