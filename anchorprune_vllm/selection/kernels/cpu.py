# SPDX-License-Identifier: Apache-2.0
"""The greedy loop for a CPU, where a pass over all features per step is what costs.

Scores only fall as the kept set grows: an old score is an upper bound. So steps are taken among the
few tokens that scored best when all scores were last computed, as long as the best of them is above
every old score outside. Then all scores are brought up to date by one matrix product. Cosines are
exact (`cosine.py`), so it does not matter by which product they were computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anchorprune_vllm.selection.cosine import to_distances
from anchorprune_vllm.selection.expand import Worth, greedy_expansion

# Few enough for their features to stay in a core's cache, many enough to last for some steps:
# measured best around these for N = 576 to 2880.
_SMALLEST_FRONT = 128
_FRONT_SHARE = 6


def lazy_expansion(
    rows: Tensor, worth: Worth, novelty: Tensor, taken: Tensor, steps: int
) -> Tensor:
    """`greedy_expansion` of one item, with the host reading every score.

    Args:
        rows: [N, D] of `unit_rows`.
        worth: [N] each, float64.
        novelty: [N] float64 of `novelty_to_anchor`.
        taken: [N] bool, tokens that cannot be chosen.
        steps: how many tokens to choose.

    Returns:
        [steps] int64, in the order of choice.
    """
    size = max(_SMALLEST_FRONT, len(rows) // _FRONT_SHARE)
    if len(rows) <= size or bool((worth.factor < 0).any()):  # a negative score rises
        batch = Worth(worth.factor[None], None if worth.addend is None else worth.addend[None])
        return greedy_expansion(rows[None], batch, novelty[None], taken[None], steps)[0]
    taken = taken.clone()
    chosen: list[int] = []
    while len(chosen) < steps:
        # 1. All scores as they are now, the best of them in front, lower indices first.
        scores = worth.of(novelty).masked_fill_(taken, -torch.inf)
        best = scores.topk(size + 1)
        front, outside = best.indices[:size].sort().values, float(best.values[size])
        # 2. Steps among those in front, while nothing outside can be as good.
        new = _choose_in_front(
            rows[front],
            worth.at(front),
            novelty[front],
            taken[front],
            outside,
            steps - len(chosen),
        )
        picks = front[new] if new else scores.argmax(0, keepdim=True)
        chosen += picks.tolist()
        if len(chosen) < steps:
            # 3. Everything up to date again.
            taken[picks] = True
            novelty = novelty.minimum(to_distances(rows @ rows[picks].T).amin(1))
    return torch.tensor(chosen, dtype=torch.int64)


def _choose_in_front(
    rows: Tensor, worth: Worth, novelty: Tensor, taken: Tensor, outside: float, most: int
) -> list[int]:
    """Greedy choices, as indices into `rows`, up to the first that is not above `outside`."""
    chosen: list[int] = []
    while len(chosen) < most:
        score, choice = worth.of(novelty).masked_fill_(taken, -torch.inf).max(0)
        if not float(score) > outside:
            break
        place = int(choice)
        chosen.append(place)
        taken[place] = True
        novelty = novelty.minimum(to_distances(rows @ rows[place]))
    return chosen
