"""Amounts over time, against a sum over small pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.simulator.timeline import Timeline

SPAN = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5))


@given(st.lists(SPAN, max_size=8), st.integers(1, 7))
def test_means_are_those_of_a_sum_by_quarters(spans, width_quarters):
    timeline, quarters = Timeline(width_quarters / 4), [0] * 41
    for one, other, amount in spans:
        begin, end = sorted((one, other))
        timeline.add(begin / 4, end / 4, amount)
        for quarter in range(begin, end):
            quarters[quarter] += amount
    assert timeline.total == pytest.approx(sum(quarters) / 4)
    means = timeline.means(10.0)
    for bucket, mean in enumerate(means):
        own = quarters[bucket * width_quarters : min((bucket + 1) * width_quarters, 40)]
        assert mean == pytest.approx(sum(own) / len(own) if own else 0.0)


def test_the_last_bucket_may_be_cut_short():
    timeline = Timeline(1.0)
    timeline.add(0.0, 2.5, 4.0)
    assert timeline.means(2.5) == [4.0, 4.0, 4.0]
