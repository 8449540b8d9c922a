"""Figures of workers are of those that exist now, and states without workers are zeros: an alert can be on them."""

from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from gateway.observability.worker_figures import WorkerFigures
from gateway.topology.presence import Presence
from gateway.topology.reports import WorkerLoad
from services.runtime.worker_state import WorkerState

IDLE = WorkerLoad()


def member(role, worker_id, load=IDLE, *, state=WorkerState.READY, model="m", degrees=(0, 0)):
    record = SimpleNamespace(
        role=role,
        id=worker_id,
        model=model,
        version="1",
        host="h",
        region="eu",
        layout_fingerprint="f",
        tensor_parallel=degrees[0],
        pipeline_parallel=degrees[1],
    )
    return SimpleNamespace(
        record=record, load=load, state=state, session=SimpleNamespace(counts=None), gpu_facts=None, gpu=None
    )


@pytest.fixture
def figures():
    return WorkerFigures()


def samples(figures):
    registry = CollectorRegistry()
    registry.register(figures)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def value(figures, name, **labels):
    return samples(figures)[name, tuple(sorted(labels.items()))]


def test_a_role_without_workers_has_zeros_in_every_state(figures):
    shown = samples(figures)
    for role in ("prefill", "decode"):
        for state in (*WorkerState, "gone"):
            assert shown["tandem_workers", (("role", role), ("state", str(state)))] == 0
        assert shown["tandem_vanished_workers_total", (("role", role),)] == 0


def test_workers_are_counted_by_role_and_state(figures):
    members = [member("decode", "d-0"), member("decode", "d-1"), member("prefill", "p-0", state=WorkerState.DRAINING)]
    figures.show(members)
    assert value(figures, "tandem_workers", role="decode", state="ready") == 2
    assert value(figures, "tandem_workers", role="prefill", state="draining") == 1
    assert value(figures, "tandem_workers", role="prefill", state="ready") == 0


def test_workers_that_vanished_stay_counted(figures):
    figures.presence = Presence(lambda: {"decode": 3})
    figures.presence.num_vanished = Counter(decode=4)
    assert value(figures, "tandem_vanished_workers_total", role="decode") == 4
    assert value(figures, "tandem_expected_workers", role="decode") == 3


def test_a_worker_is_described(figures):
    figures.show([member("decode", "d-0", WorkerLoad(running=5, waiting=2), degrees=(4, 2))])
    assert value(figures, "tandem_worker_devices", role="decode", worker="d-0") == 8
    assert value(figures, "tandem_worker_sequences", role="decode", worker="d-0", state="waiting") == 2
    facts = {"model": "m", "version": "1", "host": "h", "region": "eu", "layout": "f"}
    assert value(figures, "tandem_worker_info", role="decode", worker="d-0", **facts) == 1


def test_a_worker_of_unknown_degree_has_one_device(figures):
    figures.show([member("decode", "d-0")])
    assert value(figures, "tandem_worker_devices", role="decode", worker="d-0") == 1


def test_what_was_sent_to_a_worker_goes_with_it(figures):
    both = [member("decode", "d-0"), member("prefill", "d-1")]
    figures.show(both)
    for _ in range(3):
        figures.note_sent("decode", "d-0")
    assert value(figures, "tandem_sent_attempts_total", role="decode", worker="d-0") == 3
    figures.show(both[1:])
    figures.show(both)
    assert ("tandem_sent_attempts_total", (("role", "decode"), ("worker", "d-0"))) not in samples(figures)


def test_pages_in_use_are_those_of_a_models_decode_workers(figures):
    half, full = WorkerLoad(8, 2, 2, 1, 3), WorkerLoad(8, 0, 0, 0, 8)
    figures.show(
        [
            member("decode", "d-0", half, model="a"),
            member("decode", "d-1", full, model="a"),
            member("prefill", "p-0", full, model="b"),
        ]
    )
    assert figures.kv_use(["a", "b", "c"]) == {"a": 12 / 16, "b": 1.0, "c": 1.0}
