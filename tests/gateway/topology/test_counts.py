"""What workers have counted, as it is read, shown and scraped."""

from prometheus_client import CollectorRegistry, generate_latest

from gateway.topology.counts import MAX_NAMES, CountsCollector, read_counts
from protos import worker_pb2


def message(**counts):
    return worker_pb2.WorkerCounts(
        proposed_tokens={"lookup": 10, "draft": 4}, accepted_tokens={"lookup": 7}, preemptions={"swapped": 2}, **counts
    )


def test_counts_are_shown_by_their_source():
    tier = worker_pb2.HostTierCounts(
        total_pages=8, free_pages=5, held_pages=3, num_stored=9, num_loaded=2, num_dropped=4
    )
    shown = read_counts(message(host_tier=tier)).as_json()
    assert shown == {
        "speculation": {"draft": {"proposed": 4, "accepted": 0}, "lookup": {"proposed": 10, "accepted": 7}},
        "preemptions": {"swapped": 2},
        "host_tier": {"total": 8, "free": 5, "held": 3, "stored": 9, "loaded": 2, "dropped": 4},
    }
    assert read_counts(message()).as_json()["host_tier"] is None


def test_names_of_a_worker_are_not_believed():
    names = {"Bad": 1, 'a"b': 1, "": 1, "x" * 33: 1} | {f"name_{chr(97 + number)}": number for number in range(20)}
    kept = read_counts(worker_pb2.WorkerCounts(preemptions=names)).preemptions
    assert kept == {f"name_{chr(97 + number)}": number for number in range(MAX_NAMES)}


def test_each_worker_has_its_lines_in_a_scrape():
    registry, collector = CollectorRegistry(), CountsCollector()
    registry.register(collector)
    assert b'worker="d-0"' not in generate_latest(registry)
    collector.shown[("decode", "d-0")] = read_counts(message())
    text = generate_latest(registry).decode()
    assert 'tandem_worker_speculative_proposed_tokens_total{role="decode",source="lookup",worker="d-0"} 10.0\n' in text
    assert 'tandem_worker_preemptions_total{reason="swapped",role="decode",worker="d-0"} 2.0\n' in text
    assert "tandem_worker_host_tier_pages{" not in text
