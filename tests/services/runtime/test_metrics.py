"""Numbers and format are those of prometheus_client's own counters and histograms, in less of the time."""

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from services.runtime.metrics import Counts, Distributions, FastRegistry

BOUNDS = (0.001, 0.01, 0.1, 1, 2.5)
NAMES = st.sampled_from(["a", 'q"uo\\te', "b\nreak", "naïve"])
VALUES = st.one_of(st.sampled_from(BOUNDS), st.floats(min_value=0, max_value=10))


def page(text):
    """What is scraped, without the times of creation that prometheus_client adds."""
    return [line for line in text.decode().splitlines() if "_created" not in line]


def numbers(text):
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page(text) if line[0] != "#"}


@given(st.lists(st.tuples(VALUES, st.integers(1, 5), NAMES)))
def test_a_distribution_is_what_a_histogram_is(observed):
    ours, theirs = FastRegistry(), CollectorRegistry()
    fast = Distributions("x_seconds", "Words,\nmore\\words.", ("who", "a"), ours, bounds=BOUNDS)
    slow = Histogram("x_seconds", "Words,\nmore\\words.", ("who", "a"), buckets=BOUNDS, registry=theirs)
    for value, times, who in observed:
        fast.labels(who, "1").observe(value, times)
        for _ in range(times):
            slow.labels(who, "1").observe(value)
    assert numbers(ours.text()) == pytest.approx(numbers(generate_latest(theirs)))
    assert [line.split(" ")[0] for line in page(ours.text())] == [
        line.split(" ")[0] for line in page(generate_latest(theirs))
    ]


@given(st.lists(st.tuples(st.integers(0, 9), NAMES)))
def test_a_count_is_what_a_counter_is(added):
    ours, theirs = FastRegistry(), CollectorRegistry()
    fast = Counts("x", "Words.", ("who",), ours)
    slow = Counter("x", "Words.", ("who",), registry=theirs)
    for amount, who in added:
        fast.labels(who).value += amount
        slow.labels(who).inc(amount)
    assert page(ours.text()) == page(generate_latest(theirs))


def test_a_name_is_taken_once_and_labels_fit():
    registry = FastRegistry()
    counts = Counts("x", "Words.", ("who",), registry)
    with pytest.raises(ValueError, match="already"):
        Distributions("x", "Words.", (), registry, bounds=BOUNDS)
    with pytest.raises(ValueError, match="labels"):
        counts.labels()
    assert counts.labels("a") is counts.labels("a")


def test_a_token_costs_less_than_with_prometheus_client():
    registry, fast_registry = CollectorRegistry(), FastRegistry()
    count = Counts("a", "Words.", (), fast_registry).labels()
    gaps = Distributions("b", "Words.", (), fast_registry, bounds=[n / 100 for n in range(20)]).labels()
    their_count = Counter("c", "Words.", registry=registry)
    their_gaps = Histogram("d", "Words.", buckets=[n / 100 for n in range(20)], registry=registry)

    def ours():
        count.value += 1
        gaps.observe(0.1, 1)

    def theirs():
        their_count.inc(1)
        their_gaps.observe(0.1)

    fast, slow = (min(timeit.repeat(work, number=2000, repeat=20)) for work in (ours, theirs))
    assert fast < slow
