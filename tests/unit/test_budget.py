# SPDX-License-Identifier: Apache-2.0
"""Counting: exact, and the same in every process."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anchorprune_vllm.budget import Budget, max_anchor, min_anchor, unit_budgets

ALLOWED = (
    "give a positive whole number of tokens such as 64, or a share above 0% up to 100% such as "
    '"10%"; "100%" keeps all tokens.'
)


def test_parse_and_canonical_text(subtests):
    for value, text in (
        (64, "64"),
        ("64", "64"),
        (" 064 ", "64"),
        ("10%", "10%"),
        ("11.1%", "11.1%"),
        ("11.10%", "11.1%"),
        ("10.0%", "10%"),
        ("100%", "100%"),
        ("0.001%", "0.001%"),
        (Budget(count=3), "3"),
    ):
        with subtests.test(value=value):
            budget = Budget.parse(value)
            assert str(budget) == text
            assert Budget.parse(str(budget)) == budget
            assert hash(Budget.parse(str(budget))) == hash(budget)


def test_refused_in_words(subtests):
    for value in (
        *(0, -1, 1.5, 64.0, True, False, None, [64], b"64", Fraction(1, 2)),
        *("", " ", "0", "-1", "+5", "1.5", "abc", "٣", "1" * 19),
        *("0%", "0.0%", "200%", "100.1%", "-5%", "%", "10 %", "1e1%", "nan%", ".5%"),
    ):
        with subtests.test(value=value):
            with pytest.raises(ValueError) as refused:  # noqa: PT011
                Budget.parse(value)
            assert str(refused.value) == f"Budget {value!r} is not allowed: {ALLOWED}"


def test_refusal_stays_one_short_line():
    with pytest.raises(ValueError, match="is not allowed") as refused:
        Budget.parse("line\n" * 1000)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_budget_made_directly_is_checked_too(subtests):
    for fields in (
        {},
        {"count": 1, "percent": Decimal(1)},
        {"count": 0},
        {"count": True},
        {"percent": Decimal(0)},
        {"percent": Decimal(101)},
    ):
        words = r"^(Budget .* is not allowed|A budget has either)"
        with subtests.test(**fields), pytest.raises(ValueError, match=words):
            Budget(**fields)


def test_tokens(subtests):
    for value, candidates, tokens in (
        ("5.6%", 576, 32),
        ("11.1%", 576, 64),
        ("22.2%", 576, 128),
        ("5.6%", 2880, 161),
        ("50%", 1, 1),  # half up
        ("50%", 5, 3),
        ("49.9%", 5, 2),
        ("0.001%", 10, 1),  # at least one
        ("100%", 577, 577),
        (64, 576, 64),
        (64, 63, 63),  # never more than there are
        (1, 1, 1),
        (5, 0, 0),
        ("10%", 0, 0),
    ):
        with subtests.test(value=value, candidates=candidates):
            assert Budget.parse(value).tokens(candidates) == tokens


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_a_share_is_exact(thousandths, candidates):
    thousandths = min(thousandths, 100_000)
    budget = Budget.parse(f"{thousandths // 1000}.{thousandths % 1000:03}%")
    doubled = 2 * thousandths * candidates + 100_000  # in 1/200000 of a token, plus one half
    assert budget.tokens(candidates) == max(1, doubled // 200_000)


def test_keeps_all():
    assert Budget.parse("100%").keeps_all
    assert Budget.parse("100.00%").keeps_all
    assert not Budget.parse("99.99%").keeps_all
    assert not Budget.parse(100).keeps_all


def test_unit_budgets(subtests):
    for total, sizes, budgets in (
        (160, [576] * 5, [32] * 5),
        (512, [196] * 16, [32] * 16),
        (64, [576], [64]),
        (2, [10] * 5, [1, 1, 0, 0, 0]),  # fewer tokens than units: ties to the lower
        (7, [1, 2, 4], [1, 2, 4]),
        (3, [1, 2, 4], [0, 1, 2]),  # 3/7, 6/7, 12/7: the largest remainders are the last two
        (5, [3, 3, 3], [2, 2, 1]),
        (0, [3, 3], [0, 0]),
        (0, [], []),
        (0, [0, 0], [0, 0]),
        (1, [0, 1], [0, 1]),
    ):
        with subtests.test(total=total, sizes=sizes):
            assert unit_budgets(total, sizes) == budgets


@given(st.lists(st.integers(0, 700), min_size=1, max_size=40), st.data())
def test_unit_budgets_are_largest_remainder(sizes, data):
    candidates = sum(sizes)
    total = data.draw(st.integers(0, candidates))
    budgets = unit_budgets(total, sizes)
    assert sum(budgets) == total
    quotas = [Fraction(total * size, candidates or 1) for size in sizes]
    for budget, quota, size in zip(budgets, quotas, sizes, strict=True):
        assert abs(budget - quota) < 1
        assert 0 <= budget <= size
    # Whoever was rounded up has the larger remainder, or the same and comes first.
    rank = [(quota % 1, -unit) for unit, quota in enumerate(quotas)]
    up = [rank[unit] for unit, quota in enumerate(quotas) if budgets[unit] > quota]
    down = [rank[unit] for unit, quota in enumerate(quotas) if budgets[unit] < quota]
    assert not up or not down or min(up) > max(down)


def test_unit_budgets_refuses_what_cannot_be_shared():
    for total in (-1, 7):
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            unit_budgets(total, [2, 4])
        assert str(refused.value) == (
            f"{total} tokens cannot be shared among units of 6 candidates in all: "
            "the total must be between 0 and the number of candidates."
        )


def test_min_anchor_is_the_papers_table(subtests):
    """The paper's table of anchor configurations: units, total budget, K_min per unit."""
    for units, total, minimum in (
        (1, 32, 5),  # LLaVA-1.5
        (1, 64, 10),  # LLaVA-1.5 and Qwen2.5-VL
        (1, 128, 20),  # LLaVA-1.5 and Qwen2.5-VL
        (1, 256, 40),  # Qwen2.5-VL
        (5, 160, 5),  # LLaVA-NeXT
        (5, 320, 10),
        (5, 640, 20),
        (16, 512, 5),  # LLaVA-Video
        (16, 1024, 10),
    ):
        with subtests.test(units=units, total=total):
            shares = unit_budgets(total, [576] * units)
            assert [min_anchor(share) for share in shares] == [minimum] * units


def test_anchor_bounds_at_the_edges():
    assert [min_anchor(budget) for budget in (0, 1, 6, 7, 12, 13)] == [0, 1, 1, 1, 1, 2]
    assert max_anchor(0, 0, 0.5) == 0
    assert max_anchor(1, 1, 0.5) == 1  # not floor(1/2): at least the minimum
    assert max_anchor(64, 10, 0.5) == 32
    assert max_anchor(5, 1, 0.5) == 2
    assert max_anchor(8, 20, 0.5) == 8  # never above the budget


@given(st.integers(1, 100), st.integers(0, 10_000))
@example(29, 100)  # with floats, floor(0.29 * 100) is 28
def test_max_anchor_floors_the_decimal_that_was_written(hundredths, budget):
    assert max_anchor(budget, 0, hundredths / 100) == hundredths * budget // 100
