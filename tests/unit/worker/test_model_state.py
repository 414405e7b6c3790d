# SPDX-License-Identifier: Apache-2.0
"""vLLM's second runner keeps the delta of each prompt, and the host reads nothing to know it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mm_pruning import MultiModalPruner

from anchorprune_vllm.models.pruned_model import PrunedModel
from anchorprune_vllm.worker.model_state import NativePositionsState
from anchorprune_vllm.worker.positions import MediaPositions, with_positions
from tests.support.host_reads import NoHostReads

IMAGE, SIZE, REQUESTS, MAX_LENGTH = 7, 4, 4, 16
PLACES = torch.tensor([3, 20, 41])  # of the tokens that are kept of one image of 50
EXTENT = 50


class Model(PrunedModel):
    """Only what lays out prompts and places media."""

    def __init__(self) -> None:
        self._native_positions = True
        self._max_model_len = MAX_LENGTH
        self._media_token_ids = [IMAGE]

    def _extent(self, feature: MultiModalFeatureSpec) -> int:
        return EXTENT


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A state with vLLM's own positions and pruner, on the CPU."""

    def init(self: Any, config: Any, model: Any, cache: Any, device: torch.device) -> None:
        self.rope_state = RopeState(3, REQUESTS, MAX_LENGTH, MAX_LENGTH, device)
        self.mm_pruner = MultiModalPruner(model, self.rope_state, cache, SIZE)

    # There is no pinned memory here; then vLLM copies, in the same buffers.
    monkeypatch.setattr("vllm.v1.worker.gpu.buffer_utils.is_uva_available", lambda: False)
    monkeypatch.setattr(DefaultModelState, "__init__", init)
    return NativePositionsState(None, Model(), EncoderCache(), torch.device("cpu"))


def add(state: Any, slot: int, ids: list[int], offset: int) -> None:
    """Add a request whose image begins at `offset`.

    vLLM writes the positions by a kernel, which knows where a row begins and not where it ends.
    """
    image = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="",
        mm_position=PlaceholderRange(offset=offset, length=len(PLACES)),
    )
    state.mm_pruner.encoder_cache.add_request(str(slot), [image])
    positions, delta = state.mm_pruner.model.get_mrope_input_positions(ids, [image])
    rope = state.rope_state
    memory = rope.prefill_positions.gpu.view(-1)
    for row, places in enumerate(positions, start=3 * slot):
        memory[row * MAX_LENGTH : row * MAX_LENGTH + len(places)] = places
    rope.prefill_delta.np[slot] = delta


def recompute(state: Any, prompts: dict[int, list[int]]) -> None:
    """A step that computes these prompts whole."""
    tokens = torch.zeros(REQUESTS, MAX_LENGTH, dtype=torch.int32)
    for slot, ids in prompts.items():
        tokens[slot, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) for ids in prompts.values()])
    batch = SimpleNamespace(
        req_ids=[str(slot) for slot in prompts],
        idx_mapping_np=torch.tensor(list(prompts)).numpy(),
        prefill_len_np=lengths.numpy(),
        num_computed_prefill_tokens_np=torch.zeros_like(lengths).numpy(),
        num_scheduled_tokens=lengths.numpy(),
    )
    row = with_positions(torch.zeros(len(PLACES), SIZE), MediaPositions.at(PLACES))
    requests = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=tokens))
    with NoHostReads():
        state.mm_pruner.recompute([row] * len(prompts), batch, requests)


def positions_of(state: Any, slot: int, length: int) -> list[int]:
    return state.rope_state.read_prefill_positions(slot, length)[0].tolist()


def test_deltas_are_those_of_the_prompts(state: Any) -> None:
    image = [IMAGE] * len(PLACES)
    prompts = {
        0: [1, 1, *image, 1],
        1: [1, *image],  # the answer goes on behind the image
        3: [1, *image, 1, 1, IMAGE],  # of a request that starts again, the answer belongs to it
    }
    for slot, ids in prompts.items():
        add(state, slot, ids, offset=ids.index(IMAGE))
    recompute(state, prompts)
    assert positions_of(state, 0, 6) == [0, 1, 5, 22, 43, 52]
    assert positions_of(state, 1, 4) == [0, 4, 21, 42]
    assert positions_of(state, 3, 7) == [0, 4, 21, 42, 51, 52, 53]
    assert state.rope_state.prefill_delta.np.tolist() == [EXTENT - 3, EXTENT - 3, 0, EXTENT - 3]


def test_a_prompt_that_fills_the_context_leaves_the_next_row_alone(state: Any) -> None:
    ids = [1] * (MAX_LENGTH - len(PLACES)) + [IMAGE] * len(PLACES)
    add(state, 1, [1, *[IMAGE] * len(PLACES)], offset=1)
    add(state, 0, ids, offset=MAX_LENGTH - len(PLACES))
    assert positions_of(state, 1, 4) == [0, -2, -2, -2]
    recompute(state, {0: ids})
    assert positions_of(state, 0, MAX_LENGTH)[-4:] == [12, 16, 33, 54]


def test_a_step_with_media_writes_no_buffer_that_the_step_before_reads(state: Any) -> None:
    rope = state.rope_state

    def step(delta: int) -> Tensor:
        """One copy as requests are added, one as media are placed; what the kernel then reads."""
        rope.prefill_delta.np[0] = delta
        rope.prefill_delta.copy_to_uva()
        return rope.prefill_delta.copy_to_uva()

    in_flight = step(delta=1)
    step(delta=2)
    assert in_flight[0] == 1


def test_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without media in prompts vLLM makes no pruner."""

    def init(self: Any, *args: Any) -> None:
        self.mm_pruner = None

    monkeypatch.setattr(DefaultModelState, "__init__", init)
    NativePositionsState(None, Model(), None, torch.device("cpu"))
