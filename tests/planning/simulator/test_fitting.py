"""Least squares over relative errors."""

import random

import pytest

from planning.simulator.fitting import fitted, tried


def test_factors_of_exact_times_are_found() -> None:
    source = random.Random(1)
    rows = [(1.0, source.uniform(1, 1e4), source.uniform(1, 1e8)) for _ in range(50)]
    times = [0.01 * a + 1e-4 * b + 1e-9 * c for a, b, c in rows]
    found = fitted(rows, times)
    assert found.factors == pytest.approx((0.01, 1e-4, 1e-9), rel=1e-9)
    assert found.worst_error < 1e-9


def test_a_factor_that_would_be_negative_is_0_and_the_rest_is_fitted_without_it() -> None:
    rows = [(1.0, x, x * x) for x in (1.0, 2.0, 3.0, 4.0)]
    found = fitted(rows, [10 + 5 * x - 0.5 * x * x for _, x, _ in rows])
    assert found.factors[2] == 0.0
    without = fitted([row[:2] for row in rows], [10 + 5 * x - 0.5 * x * x for _, x, _ in rows])
    assert found.factors[:2] == pytest.approx(without.factors)


def test_errors_are_relative_to_each_row_and_of_rows_never_seen() -> None:
    found = tried((2.0,), [(1.0,), (10.0,), (100.0,), (50.0,)], times_s=[2.0, 20.0, 100.0, 100.0])
    assert (found.mean_error, found.worst_error, found.p95_error) == pytest.approx((0.25, 1.0, 1.0))
    assert str(found) == "error mean 25.0%, p95 100.0%, worst 100.0%"


def test_a_short_row_counts_as_much_as_a_long_one() -> None:
    found = fitted([(1.0,), (1000.0,)], [1.1, 1000.0])
    assert 1.04 < found.factors[0] < 1.06
