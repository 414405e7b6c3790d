# SPDX-License-Identifier: Apache-2.0
"""The parameters of AnchorPrune, named and preset as in the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from anchorprune_vllm.checks import check_choice, check_number, check_whole

Stage2 = Literal["importance", "diversity", "additive", "multiplicative"]
"""The score of Stage 2: importance times novelty, or one of the paper's ablations, which are
novelty alone, relevance plus novelty, and relevance times novelty."""
STAGES_2: tuple[Stage2, ...] = get_args(Stage2)

Order = Literal["native", "selection"]
"""The order of the kept tokens: that of the image, or that in which they were chosen."""
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True)
class AnchorParams:
    """The parameters of AnchorPrune; raises ValueError for values that are out of range."""

    min_anchor: int | None = None
    """K_min of every unit, or None for the paper's schedule."""
    tau: float = 0.2
    """The cosine distance above which a token counts as novel."""
    patience: int = 3
    """P: the anchor ends with this many novel tokens."""
    max_anchor_ratio: float = 0.5
    """K_max as a share of the unit's budget."""
    stage2: Stage2 = "importance"
    order: Order = "native"

    def __post_init__(self) -> None:
        if self.min_anchor is not None:
            check_whole("min_anchor", self.min_anchor, low=1)
        check_number("tau", self.tau, "from 0 to 2", lambda tau: 0 <= tau <= 2)
        check_whole("patience", self.patience, low=1)
        ratio = self.max_anchor_ratio
        check_number("max_anchor_ratio", ratio, "above 0 and up to 1", lambda r: 0 < r <= 1)
        check_choice("stage2", self.stage2, STAGES_2)
        check_choice("order", self.order, ORDERS)
