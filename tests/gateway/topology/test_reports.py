"""What a worker says of its load is what the gateway reads, and nonsense is not calculated with."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.topology.reports import read_gpu, read_links, read_load
from protos import worker_pb2
from services.runtime.gpu_facts import THROTTLE_REASONS, GpuFacts
from services.scheduling.links import MAX_PEERS, NO_LINKS, PeerLink
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed
from worker.gpu import gpu_message
from worker.metrics import Load, Speeds


def test_what_a_worker_has_measured_arrives():
    speeds = Speeds((0.01, 0.002, 3e-7), (0.02, 0.003, 4e-6), (0.03, 5e8))
    load = read_load(Load(10, 4, 3, 2, 1, context_tokens=77, speeds=speeds).to_message(is_draining=False))
    assert (load.pages_total, load.pages_free, load.pages_cached, load.context_tokens) == (10, 4, 3, 77)
    assert load.prefill_speed == PrefillSpeed(0.01, 0.002, 3e-7)
    assert load.decode_speed == DecodeSpeed(0.02, 0.003, 4e-6)
    assert load.link_speed == LinkSpeed(0.03, 5e8)


def test_what_was_not_measured_is_not_known():
    message = Load(10, 10, 0, 0, 0).to_message(is_draining=True)
    assert not message.HasField("prefill_speed")
    load = read_load(message)
    assert load.is_draining
    assert (load.prefill_speed, load.decode_speed, load.link_speed) == (None, None, None)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_nonsense_is_not_calculated_with(wrong):
    message = worker_pb2.WorkerLoad(
        prefill_speed=worker_pb2.PrefillSpeed(overhead_s=wrong),
        decode_speed=worker_pb2.DecodeSpeed(s_per_context_token=wrong),
        link_speed=worker_pb2.LinkSpeed(latency_s=1, bytes_per_s=wrong),
    )
    load = read_load(message)
    assert (load.prefill_speed, load.decode_speed, load.link_speed) == (None, None, None)


def test_a_link_without_speed_is_not_divided_by():
    message = worker_pb2.WorkerLoad(link_speed=worker_pb2.LinkSpeed(latency_s=1))
    assert read_load(message).link_speed is None


def test_what_is_said_of_classes_arrives():
    message = Load(
        10, 10, 0, 0, 0, promised_pages_by_class=(0, 7, 1, 0, 9), running_by_class=(0, 2, 1, 0, 3)
    ).to_message(is_draining=False)
    message.num_preempted = 5
    load = read_load(message)
    assert load.pages_promised_by_class == (0, 7, 1, 0, 9)
    assert load.running_by_class == (0, 2, 1, 0, 3)
    assert load.num_preempted == 5


COUNTS = st.none() | st.integers(0, 2**63)


@given(
    st.builds(
        GpuFacts,
        temperature_c=st.none() | st.floats(-50, 200),
        slowdown_c=st.none() | st.floats(0, 200),
        num_uncorrected=COUNTS,
        is_remap_pending=st.none() | st.booleans(),
        has_remap_failed=st.none() | st.booleans(),
        throttle_reasons=st.frozensets(st.sampled_from(sorted(THROTTLE_REASONS))),
        free_bytes=COUNTS,
        total_bytes=COUNTS,
        xids=st.frozensets(st.integers(1, 200)),
        is_lost=st.booleans(),
    )
)
def test_what_a_gpu_says_arrives(facts):
    message = worker_pb2.GpuFacts.FromString(gpu_message(facts).SerializeToString())
    assert read_gpu(message) == facts


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_temperature_that_is_none_is_not_known(wrong):
    facts = read_gpu(worker_pb2.GpuFacts(temperature_c=wrong, slowdown_c=wrong, free_bytes=5))
    assert (facts.temperature_c, facts.slowdown_c, facts.free_bytes) == (None, None, 5)


def peer_link(worker_id, latency_s, bytes_per_s, underway_bytes=0):
    speed = worker_pb2.LinkSpeed(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return worker_pb2.PeerLink(worker_id=worker_id, speed=speed, underway_bytes=underway_bytes)


def test_what_is_told_of_links_is_kept_until_something_else_is_told():
    links = read_links(NO_LINKS, [peer_link("d-0", 0.1, 1e6), peer_link("d-1", 0.01, 1e9, 5)])
    assert links == {"d-0": PeerLink(0.1, 1e6), "d-1": PeerLink(0.01, 1e9, 5)}
    assert (links.least_latency_s, links.most_bytes_per_s) == (0.01, 1e9)
    links = read_links(links, [peer_link("d-1", 0.2, 1e5)])
    assert links == {"d-0": PeerLink(0.1, 1e6), "d-1": PeerLink(0.2, 1e5)}
    assert (links.least_latency_s, links.most_bytes_per_s) == (0.1, 1e6)


@pytest.mark.parametrize("numbers", [(math.nan, 1.0), (0.0, math.inf), (-1.0, 1.0), (0.0, 0.0)])
def test_a_link_of_nonsense_is_as_if_it_was_not_told(numbers):
    assert read_links(NO_LINKS, [peer_link("d-0", *numbers), worker_pb2.PeerLink(worker_id="d-1")]) == NO_LINKS


def test_a_worker_cannot_name_others_without_end():
    links = NO_LINKS
    for start in range(0, 3 * MAX_PEERS, MAX_PEERS // 2):
        links = read_links(links, [peer_link(f"d-{n}", 0.1, 1e6) for n in range(start, start + MAX_PEERS // 2)])
    assert len(links) == MAX_PEERS
    assert f"d-{3 * MAX_PEERS - 1}" in links
