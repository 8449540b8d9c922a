"""The median of the others is that of the list without one number."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from services.scheduling.medians import median_without


@given(st.lists(st.integers(0, 9), min_size=2), st.data())
def test_it_is_the_median_of_the_list_without_that_number(numbers: list[int], data: st.DataObject) -> None:
    one = data.draw(st.sampled_from(numbers))
    others = list(numbers)
    others.remove(one)
    assert median_without(sorted(numbers), one) == median(others)


def test_without_others_there_is_none() -> None:
    assert median_without([3.0], 3.0) is None
    assert median_without([], 3.0) is None
