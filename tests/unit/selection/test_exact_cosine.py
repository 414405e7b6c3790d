# SPDX-License-Identifier: Apache-2.0
"""Distances without rounding: the same bits in any order of summation."""

import math
from fractions import Fraction
from itertools import product

import torch

from anchorprune_vllm.selection.exact_cosine import distances, unit_rows


def random_rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_distances_are_exact(subtests):
    for width in (1, 3, 64, 1023, 3584):
        with subtests.test(width=width):
            rows = unit_rows(random_rows(1, 8, width))
            found = distances(rows, rows[:, :2])
            for i in range(8):
                for j in range(2):
                    pairs = zip(rows[0, i].tolist(), rows[0, j].tolist(), strict=True)
                    exact = (
                        sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs), start=Fraction(0))
                        / 2
                    )
                    assert Fraction(found[0, i, j].item()) == min(exact, Fraction(2))


def test_any_order_gives_the_same_bits():
    rows = unit_rows(random_rows(1, 50, 999))
    shuffled = rows[:, :, torch.randperm(999, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(distances(rows, rows), distances(shuffled, shuffled))


def test_close_to_the_true_cosine(subtests):
    for scale, dtype in product(
        [1e-4, 1.0, 1e3], [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    ):
        with subtests.test(scale=scale, dtype=dtype):
            given = (random_rows(20, 256) * scale).to(dtype)
            found = distances(unit_rows(given)[None], unit_rows(given)[None])[0]
            exact = given.double()
            true = 1 - torch.nn.functional.cosine_similarity(exact[:, None], exact, dim=-1)
            assert (found - true).abs().max() < 3e-7
            assert math.isclose(float(unit_rows(given)[0].norm()), 1, abs_tol=1e-6)


def test_lengths_far_from_one_do_not_matter():
    rows = random_rows(4, 32)
    for scale in (2.0**-120, 2.0**120):
        assert torch.equal(unit_rows(rows * scale), unit_rows(rows))


def test_entries_are_float32_numbers():
    rows = unit_rows(random_rows(20, 256))
    assert torch.equal(rows.float().double(), rows)


def test_copies_alone_are_at_zero(subtests):
    for width in (1, 3, 64, 1023, 3584):
        with subtests.test(width=width):
            rows = random_rows(40, width)
            rows[20:] = rows[:20] * 4  # the same direction
            rows[30:] *= torch.linspace(1, 1.001, width)  # nearly the same, but for a width of 1
            found = distances(unit_rows(rows)[None], unit_rows(rows)[None])[0]
            assert (found.diagonal(20)[:10] == 0).all()
            assert (found.diagonal(20)[10:] > 0).all() == (width > 1)


def test_a_row_without_a_direction_is_at_distance_one(subtests):
    """Or without a length: float64 numbers whose squares are not numbers; float32 has none."""
    for bad in (0.0, 1e-200, 1e200, torch.nan, torch.inf, -torch.inf):
        with subtests.test(bad=bad):
            given = random_rows(5, 16, dtype=torch.float64)
            given[2] = bad
            found = distances(unit_rows(given)[None], unit_rows(given)[None])[0]
            assert (found[2] - 1).abs().max() < 1e-7
            assert torch.equal(found[:, 2], found[2])
            assert found[2, 2] == 1


def test_distances_stay_between_zero_and_two():
    rows = unit_rows(random_rows(1, 300, 17))
    both = torch.cat([rows, -rows], 1)
    found = distances(both, both)
    assert found.min() == 0
    assert found.max() == 2
