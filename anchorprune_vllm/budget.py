# SPDX-License-Identifier: Apache-2.0
"""Compute how many tokens are kept: K, K_u, K_min and K_max, which no other module computes.

The placeholders of a prompt and the embeddings that fill them are made in different processes and
must agree on every number, so both use this module. All arithmetic is exact (integers and
fractions), because a float that is rounded differently would give a wrong number of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

_COUNT = re.compile(r"[0-9]{1,18}")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


@dataclass(frozen=True)
class Budget:
    """The tokens to keep of one image or video: a number, or a share of the candidates.

    Exactly one of the two fields is set. `Budget.parse` reads both forms.
    """

    count: int | None = None
    percent: Decimal | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.percent is None):
            raise ValueError("A budget has either a count or a percent: give exactly one of them.")
        if self.count is not None and (type(self.count) is not int or self.count < 1):
            raise ValueError(_refusal(self.count))
        if self.percent is not None and not 0 < self.percent <= 100:
            raise ValueError(_refusal(f"{self.percent}%"))

    @classmethod
    def parse(cls, value: object) -> Budget:
        """Read `64`, `"64"`, `"10%"`, `"11.1%"` or a `Budget`; raise ValueError otherwise."""
        if isinstance(value, Budget):
            return value
        if type(value) is int and value > 0:  # not a bool
            return cls(count=value)
        if isinstance(value, str):
            text = value.strip()
            if _COUNT.fullmatch(text) and int(text) > 0:
                return cls(count=int(text))
            share = _PERCENT.fullmatch(text)
            if share and 0 < Decimal(share[1]) <= 100:
                return cls(percent=Decimal(share[1]))
        raise ValueError(_refusal(value))

    @property
    def keeps_all(self) -> bool:
        """Return whether nothing is pruned, however many candidates there are."""
        return self.percent == 100

    def tokens(self, candidates: int) -> int:
        """Return K for a number of candidates: at least 1, and never more than there are.

        A share is rounded half up: 11.1% of 576 is 63.936, so K is 64.
        """
        if self.count is not None:
            wanted = self.count
        else:
            assert self.percent is not None
            doubled = 2 * candidates * Fraction(self.percent) / 100
            wanted = max(1, int(doubled + 1) // 2)
        return min(wanted, candidates)

    def __str__(self) -> str:
        """Return the canonical text that `parse` reads back, such as `64`, `10%` or `11.1%`."""
        if self.percent is None:
            return str(self.count)
        text = f"{self.percent:f}"
        if "." in text:
            text = text.rstrip("0").rstrip(".")
        return f"{text}%"


def _refusal(value: object) -> str:
    return (
        f"Budget {value!r:.80} is not allowed: give a positive whole number of tokens such as 64, "
        'or a share above 0% up to 100% such as "10%"; "100%" keeps all tokens.'
    )


def unit_budgets(total: int, unit_sizes: Sequence[int]) -> list[int]:
    """Return K_u of each unit: `total` shared in proportion to the units' numbers of candidates.

    Remainders are given to the units with the largest ones; ties go to the lower unit. The shares
    add up to `total`. As that is at most the number of candidates, no unit gets more than it has.
    """
    candidates = sum(unit_sizes)
    if not 0 <= total <= candidates:
        raise ValueError(
            f"{total} tokens cannot be shared among units of {candidates} candidates in all: "
            "the total must be between 0 and the number of candidates."
        )
    if not candidates:
        return [0] * len(unit_sizes)
    shares = [divmod(total * size, candidates) for size in unit_sizes]
    budgets = [whole for whole, _ in shares]
    by_remainder = sorted(range(len(shares)), key=lambda unit: -shares[unit][1])  # stable
    for unit in by_remainder[: total - sum(budgets)]:
        budgets[unit] += 1
    return budgets


def min_anchor(unit_budget: int) -> int:
    """Return K_min, the size at which a unit's anchor starts: 5/32 of its budget, at least 1.

    The paper has a table (32: 5, 64: 10, 128: 20, 256: 40), which this rule reproduces. A unit
    without a budget has no anchor.
    """
    return max(1, 5 * unit_budget // 32) if unit_budget else 0


def max_anchor(unit_budget: int, minimum: int, ratio: float) -> int:
    """Return K_max, the largest size of a unit's anchor: `ratio` of its budget.

    It is at least `minimum`, so that a budget of 1 gives an anchor of 1, and at most the budget.
    """
    # The decimal number is used as written: as a binary float, 0.7 is less, and 70% of 10 gives 6.
    limit = int(Fraction(repr(float(ratio))) * unit_budget)
    return min(unit_budget, max(minimum, limit))
