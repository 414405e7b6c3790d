# SPDX-License-Identifier: Apache-2.0
"""The kernels of this machine, against the same in plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anchorprune_vllm.selection import AnchorParams, Candidates, select_batch
from anchorprune_vllm.selection import expand as plain
from anchorprune_vllm.selection.anchor import relevance_anchors
from anchorprune_vllm.selection.cosine import distances, unit_rows, working_dtype
from anchorprune_vllm.selection.expand import Score
from anchorprune_vllm.selection.kernels import anchoring, expand_item, runs_triton
from anchorprune_vllm.selection.select import anchored_units
from anchorprune_vllm.signals.attention import received_attention, received_in_blocks
from anchorprune_vllm.tools.check.findings import Finding

LARGEST_REGRET = 1e-5
_SIZES = ((1, 8), (57, 16), (576, 1024), (1296, 512), (2881, 256))
_ADVICE = (
    "Pruning would keep other tokens than it should. Please send the report of --json, with the "
    "GPU's name, as an issue; until then, leave out --anchorprune-budget."
)


def check_choices(
    device: torch.device, sizes: tuple[tuple[int, int], ...] = _SIZES
) -> Iterator[Finding]:
    """Choose tokens of random items of several sizes, and compare both stages."""
    form = "Triton" if runs_triton(device) else "numba" if device.type == "cpu" else "torch"
    worst, anchors_differ, tried = 0.0, 0, 0
    for tokens, width in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            for budget in {1, (tokens + 3) // 4, tokens}:
                item = random_item(tokens, width, budget, dtype)
                anchor = _anchor(item, torch.device("cpu"))
                anchors_differ += not torch.equal(_anchor(item, device).cpu(), anchor)
                score = Score(item.importance.to(device, working_dtype(device)))
                chosen = expand_item(item.features.to(device), score, anchor.to(device), budget)
                worst = max(worst, regret(item.features, item.importance, anchor, chosen.cpu()))
                tried += 1
    found = f"{form}: {tried} random items of 1 to {sizes[-1][0]:,} tokens"
    if device.type == "cpu":
        yield Finding("anchors", "skipped", "a CPU has the plain form alone")
    elif anchors_differ:
        yield Finding("anchors", "FAILED", f"{found}: {anchors_differ} differ", _ADVICE)
    else:
        yield Finding("anchors", "ok", f"{found}: all as in plain torch")
    if worst > LARGEST_REGRET:
        text = f"{found}: a choice scores {worst:.1e} below the best one"
        yield Finding("expansion", "FAILED", text, _ADVICE)
    else:
        yield Finding("expansion", "ok", f"{found}: no choice scores 1e-5 below the best one")


def random_item(tokens: int, width: int, budget: int, dtype: torch.dtype) -> Candidates:
    """Draw an item on the CPU, some of whose tokens look alike, and some of which are copies."""
    random = torch.Generator().manual_seed(tokens + budget)
    centres = torch.randn(tokens // 4 + 1, width, generator=random)
    features = centres.repeat(4, 1)[:tokens]
    features[::3] += 0.4 * torch.randn(len(features[::3]), width, generator=random)
    return Candidates(
        torch.randn(tokens, generator=random),
        features.to(dtype),
        torch.rand(tokens, generator=random),
        budget,
    )


def _anchor(item: Candidates, device: torch.device) -> Tensor:
    """Return the anchor [N] of an item by the form for a device; on the CPU, the plain one."""
    assert item.relevance is not None
    params = AnchorParams()
    form = relevance_anchors if device.type == "cpu" else anchoring(device)
    (anchor,) = form(
        [item.relevance.to(device)],
        [item.features.to(device)],
        [anchored_units(item, params)],
        params.tau,
        params.patience,
    )
    return anchor


def regret(features: Tensor, weight: Tensor, anchor: Tensor, chosen: Tensor) -> float:
    """Return by how much the worst choice scores below the best one at its time.

    Args:
        features: [N, D] on the CPU.
        weight: [N], what novelty is multiplied with.
        anchor: [N] bool, chosen first.
        chosen: [K] in the order of choice.
    """
    rows = unit_rows(features)[None]
    novelty = rows.new_full(anchor.shape, plain.MAX_DISTANCE)
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
    """Compare importance from a tower's attention with the same in plain torch on the CPU."""
    if not runs_triton(device):
        yield Finding("received attention", "skipped", "there is a form in torch alone here")
        return
    random = torch.Generator().manual_seed(0)
    worst = 0.0
    for segments in ([64], [100, 33, 400]):
        query, key = torch.randn(2, sum(segments), 4, 80, generator=random).bfloat16()
        expected = received_in_blocks(query.float(), key.float(), segments, 80**-0.5)
        found = received_attention(query.to(device), key.to(device), segments, 80**-0.5)
        worst = max(worst, float((found.cpu() - expected).abs().max() / expected.max()))
    text = f"largest difference to torch in float32: {worst:.1e} of the largest"
    if worst < 1e-2:
        yield Finding("received attention", "ok", text)
    else:
        yield Finding("received attention", "FAILED", text, _ADVICE)


def check_waits(device: torch.device) -> Iterator[Finding]:
    """Let torch raise an error if the host waits for the GPU while tokens are chosen."""
    if device.type == "cpu":
        yield Finding("host waits", "skipped", "a CPU has nothing to wait for")
        return
    item = random_item(576, 256, 64, torch.bfloat16)
    assert item.relevance is not None
    moved = item._replace(
        relevance=item.relevance.to(device),
        features=item.features.to(device),
        importance=item.importance.to(device),
    )
    select_batch([moved], AnchorParams())  # compiled before it is watched
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        select_batch([moved], AnchorParams())
    except RuntimeError as error:
        yield Finding(
            "host waits",
            "FAILED",
            f"the host waits for the GPU: {str(error).splitlines()[0]}",
            "Answers are right, but every request waits. Please send the report of --json.",
        )
    else:
        yield Finding("host waits", "ok", "none while tokens are chosen")
    finally:
        torch.cuda.set_sync_debug_mode(before)
