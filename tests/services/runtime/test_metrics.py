"""Numbers and format are those of prometheus_client's own counters and histograms, in less of the time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.runtime.metrics import Counts, Distributions, FastRegistry, process_registry

BOUNDS = (0.001, 0.01, 0.1, 1, 2.5)
NAMES = st.sampled_from(["a", 'q"uo\\te', "b\nreak", "naïve"])
VALUES = st.one_of(st.sampled_from(BOUNDS), st.floats(min_value=0, max_value=10))


@pytest.fixture(autouse=True)
def _no_times_of_creation():
    process_registry("test")  # which has them left out


def page(text):
    return text.decode().splitlines()


def numbers(text):
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page(text) if line[0] != "#"}


@given(st.lists(st.tuples(VALUES, st.integers(1, 5), NAMES)))
def test_a_distribution_is_what_a_histogram_is(observed):
    ours, theirs = FastRegistry(), CollectorRegistry()
    fast = Distributions("x_seconds", "Words,\nmore\\words.", ("who", "a"), ours, bounds=BOUNDS)
    slow = Histogram("x_seconds", "Words,\nmore\\words.", ("who", "a"), buckets=BOUNDS, registry=theirs)
    for value, times, who in observed:
        fast.labels(who, "1").observe_often(value, times)
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


@given(st.lists(st.tuples(VALUES, NAMES)))
def test_openmetrics_is_what_prometheus_client_writes(observed):
    ours, theirs = FastRegistry(), CollectorRegistry()
    fast = Distributions("x_seconds", 'Words,\nmore "words".', ("who",), ours, bounds=BOUNDS)
    fast_count = Counts("y", "Words.", ("who",), ours)
    slow = Histogram("x_seconds", 'Words,\nmore "words".', ("who",), buckets=BOUNDS, registry=theirs)
    slow_count = Counter("y", "Words.", ("who",), registry=theirs)
    for value, who in observed:
        fast.labels(who).observe(value)
        slow.labels(who).observe(value)
        fast_count.labels(who).value += 1
        slow_count.labels(who).inc()
    expected = page(generate_openmetrics(theirs))
    assert [line.split(" ")[0] for line in page(ours.text(is_openmetrics=True))] == [
        line.split(" ")[0] for line in expected[:-1]
    ]
    assert page(ours.text(is_openmetrics=True))[0] == expected[0]


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_an_exemplar_leads_from_a_bucket_to_the_last_trace_in_it():
    registry = FastRegistry()
    times = Distributions("x_seconds", "Words.", (), registry, bounds=BOUNDS).labels()
    for value, trace_id in ((0.5, "a" * 32), (0.7, TRACE), (9.0, TRACE), (0.8, "")):
        times.observe(value)
        times.exemplify(value, trace_id)
    (family,) = text_string_to_metric_families((registry.text(is_openmetrics=True) + b"# EOF\n").decode())
    found = {sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar is not None}
    assert {le: (each.labels, each.value) for le, each in found.items()} == {
        "1.0": ({"trace_id": TRACE}, 0.7),
        "+Inf": ({"trace_id": TRACE}, 9.0),
    }
    assert b"trace_id" not in registry.text(), "the older format has no exemplars"


def test_every_process_says_what_it_is_and_takes():
    lines = page(generate_latest(process_registry("a-program")))
    assert any(line.startswith('tandem_build_info{program="a-program",') for line in lines)
    figures = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if line.startswith("process_")}
    assert figures["process_resident_memory_bytes"] > 2**20
    assert 0 < figures["process_open_fds"] <= figures["process_max_fds"]
    assert figures["process_start_time_seconds"] < time.time()


def test_no_series_tells_when_it_was_created():
    registry = process_registry("test")
    Counter("x", "Words.", registry=registry)
    assert "_created" not in generate_latest(registry).decode()
    assert "_created" not in generate_openmetrics(registry).decode()


def test_a_name_is_taken_once_and_labels_fit():
    registry = FastRegistry()
    counts = Counts("x", "Words.", ("who",), registry)
    with pytest.raises(ValueError, match="already"):
        Distributions("x", "Words.", (), registry, bounds=BOUNDS)
    with pytest.raises(ValueError, match="labels"):
        counts.labels()
    assert counts.labels("a") is counts.labels("a")
