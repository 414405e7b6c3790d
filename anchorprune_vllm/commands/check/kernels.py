# SPDX-License-Identifier: Apache-2.0
"""Check the kernels of this machine against plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anchorprune_vllm.commands.check.findings import SEND_REPORT, Finding
from anchorprune_vllm.selection import AnchorParams, Candidates, select_batch
from anchorprune_vllm.selection.anchorprune import contextual_expansion, protected_anchor
from anchorprune_vllm.selection.exact_cosine import (
    MAX_DISTANCE,
    distances,
    unit_rows,
    working_dtype,
)
from anchorprune_vllm.selection.kernels import (
    expand_item,
    host_expansion,
    runs_triton,
)
from anchorprune_vllm.selection.scores import Score
from anchorprune_vllm.signals.attention import received_attention, received_in_blocks

LARGEST_REGRET = 1e-5
_SIZES = ((1, 8), (57, 16), (576, 1024), (1296, 512), (2881, 256), (5000, 64), (10368, 64))
_LARGE = 4000  # tokens from which on only few are selected, as plain torch is slow
_CPU = torch.device("cpu")
_ADVICE = (
    f"Pruning would keep other tokens than it should. {SEND_REPORT}, with the GPU's name, as an "
    "issue; until then, leave out --anchorprune-budget."
)


def check_choices(
    device: torch.device, sizes: Sequence[tuple[int, int]] = _SIZES
) -> Iterator[Finding]:
    """Select tokens of random items of several sizes, and compare both stages."""
    worst, anchors_differ, tried = 0.0, 0, 0
    for tokens, width in sizes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for budget in {1, 64} if tokens > _LARGE else {1, (tokens + 3) // 4, tokens}:
                item = random_item(tokens, width, budget, dtype)
                anchor = _anchor(item, _CPU)
                anchors_differ += not torch.equal(_anchor(item, device).cpu(), anchor)
                score = Score(item.importance.to(device, working_dtype(device)))
                chosen = expand_item(item.features.to(device), score, anchor.to(device), budget)
                worst = max(worst, regret(item.features, item.importance, anchor, chosen.cpu()))
                tried += 1
    with_numba = device.type == "cpu" and host_expansion() is not contextual_expansion
    form = "Triton" if runs_triton(device) else "numba" if with_numba else "torch"
    found = f"{form}: {tried} random items of 1 to {sizes[-1][0]:,} tokens"
    if device.type == "cpu":
        yield Finding("anchors", "skipped", "a CPU has no kernel to compare")
    else:
        problem = f"{found}: {anchors_differ} differ" if anchors_differ else ""
        yield Finding.of("anchors", problem, _ADVICE, f"{found}: all as in plain torch")
    regretted = f"{found}: a choice scores {worst:.1e} below the best one"
    problem = regretted if worst > LARGEST_REGRET else ""
    found = f"{found}: none scores more than 1e-5 below the best one"
    yield Finding.of("expansion", problem, _ADVICE, found)

    # Select from items with several units, alone and in one batch.
    items = [
        _moved(random_item(tokens, 96, tokens // 5, torch.float16), device)._replace(
            units=torch.arange(tokens) * units // tokens
        )
        for tokens, units in ((700, 1), (1300, 4), (90, 3))
    ]
    alone = [select_batch([item], AnchorParams())[0].indices.tolist() for item in items]
    together = [kept.indices.tolist() for kept in select_batch(items, AnchorParams())]
    problem = "" if alone == together else "items keep other tokens alone than at once"
    found = f"{len(items)} items: the same tokens alone and at once"
    yield Finding.of("batches", problem, _ADVICE, found)


def _moved(item: Candidates, device: torch.device) -> Candidates:
    """Return an item with its tensors on a device."""
    fields = item._asdict().items()
    moved: dict[str, Any] = {name: x.to(device) for name, x in fields if isinstance(x, Tensor)}
    return item._replace(**moved)


def random_item(tokens: int, width: int, budget: int, dtype: torch.dtype) -> Candidates:
    """Draw an item on the CPU, some of whose tokens look alike, and some of which are copies."""
    random = torch.Generator().manual_seed(tokens + budget)
    centres = torch.randn(tokens // 4 + 1, width, generator=random)
    features = centres.repeat(4, 1)[:tokens]
    features[::3] += 0.4 * torch.randn(len(features[::3]), width, generator=random)
    relevance = torch.randn(tokens, generator=random)
    importance = torch.rand(tokens, generator=random)
    return Candidates(relevance, features.to(dtype), importance, budget)


def _anchor(item: Candidates, device: torch.device) -> Tensor:
    """Return the anchor [N] of an item by the kernel of a device; on the CPU, by plain torch."""
    if device.type == "cpu":
        return protected_anchor(item, AnchorParams())
    (kept,) = select_batch([_moved(item, device)], AnchorParams())
    anchor = torch.zeros(len(item.features), dtype=torch.bool, device=device)
    return anchor.scatter_(0, kept.indices, kept.is_anchor)


def regret(features: Tensor, weight: Tensor, anchor: Tensor, chosen: Tensor) -> float:
    """Return by how much the worst choice scores below the best one at its time.

    Args:
        features: [N, D] on the CPU.
        weight: [N], what novelty is multiplied by.
        anchor: [N] bool, chosen first.
        chosen: [K] in the order of choice.
    """
    rows = unit_rows(features)[None]
    novelty = rows.new_full(anchor.shape, MAX_DISTANCE)
    taken = torch.zeros_like(anchor)
    worst = 0.0
    for step, choice in enumerate(chosen.tolist()):
        scores = (weight.double() * novelty).masked_fill(taken, -torch.inf)
        if step >= int(anchor.sum()):
            worst = max(worst, float(scores.max() - scores[choice]))
        elif not anchor[choice] or taken[choice]:
            return float("inf")
        taken[choice] = True
        novelty = novelty.minimum(distances(rows, rows[:, choice : choice + 1]).flatten())
    return worst


def check_received_attention(device: torch.device) -> Iterator[Finding]:
    """Compare importance from a tower's attention with plain torch on the CPU."""
    name = "received attention"
    if not runs_triton(device):
        yield Finding(name, "skipped", "this device uses plain torch: there is no kernel to check")
        return
    random = torch.Generator().manual_seed(0)
    differences = []
    for segments in ([64], [100, 33, 400]):
        query, key = torch.randn(2, sum(segments), 4, 80, generator=random).bfloat16()
        expected = received_in_blocks(query.float(), key.float(), segments, 80**-0.5)
        found = received_attention(query.to(device), key.to(device), segments, 80**-0.5)
        differences.append((found.cpu() - expected).abs().max() / expected.max())
    worst = float(torch.stack(differences).max())  # NaN if one of them is
    text = f"largest difference to torch in float32: {worst:.1e} of the largest"
    yield Finding.of(name, "" if worst < 1e-2 else text, _ADVICE, text)


def check_waits(device: torch.device) -> Iterator[Finding]:
    """Let torch raise an error if the host waits for the GPU during selection."""
    name = "host waits"
    if device.type == "cpu":
        yield Finding(name, "skipped", "a CPU has nothing to wait for")
        return
    item = _moved(random_item(576, 256, 64, torch.bfloat16), device)
    select_batch([item], AnchorParams())  # compiles kernels, which may wait
    problem, before = "", torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        select_batch([item], AnchorParams())
    except RuntimeError as error:
        problem = f"the host waits for the GPU: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    advice = f"Answers are right, but every request waits. {SEND_REPORT}."
    yield Finding.of(name, problem, advice, "none during selection")
