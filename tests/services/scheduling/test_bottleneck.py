"""What holds a model back, by table and by property; what a liar, a lost worker and no traffic make of it."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduling.bottleneck import (
    EASED,
    FULL,
    GATEWAY,
    LASTING_S,
    QUEUE,
    SHORT,
    Bottleneck,
    Judge,
    Snapshot,
    WorkerUse,
    find,
    gains_of,
    loads_of,
    said,
)

PREFILL, LINK, DECODE = Bottleneck("prefill", "compute"), Bottleneck("prefill", "link"), Bottleneck("decode", "compute")
PREFILL_PAGES, DECODE_PAGES = Bottleneck("prefill", "pages"), Bottleneck("decode", "pages")


def prefill(compute: float = 0.1, *, link: float = 0.1, pages: float = 0.1) -> WorkerUse:
    return WorkerUse("prefill", compute, link, pages)


def decode(compute: float = 0.1, *, pages: float = 0.1) -> WorkerUse:
    return WorkerUse("decode", compute, 0.0, pages)


def seen(*workers: WorkerUse, gateway: float = 0.1, waiting: float = 0.0) -> Snapshot:
    return Snapshot(workers=workers or (prefill(), decode()), gateway=gateway, waiting=waiting)


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        pytest.param(seen(), None, id="no traffic"),
        pytest.param(seen(prefill(0.95), decode()), PREFILL, id="prompts"),
        pytest.param(seen(prefill(link=0.95), decode(pages=1.0), waiting=9), LINK, id="pages wait for a slow link"),
        pytest.param(seen(prefill(), decode(0.95)), DECODE, id="answers"),
        pytest.param(seen(gateway=0.95), GATEWAY, id="the gateway"),
        pytest.param(seen(prefill(), decode(0.4, pages=0.9), waiting=3), DECODE_PAGES, id="few pages"),
        pytest.param(
            seen(prefill(), decode(0.8, pages=0.9), waiting=3), DECODE, id="answers that nearly fill the worker"
        ),
        pytest.param(seen(prefill(0.6), decode(pages=0.5), waiting=3), PREFILL, id="prompts that half fill the worker"),
        pytest.param(seen(prefill(0.4), decode(), waiting=3), QUEUE, id="nothing is half full"),
        pytest.param(seen(prefill(), decode(0.8)), None, id="nearly full, and nobody waits"),
        pytest.param(seen(prefill(), decode(0.4, pages=1.0)), None, id="full pages for which nobody waits"),
        pytest.param(seen(prefill(pages=0.9), decode(), waiting=3), PREFILL_PAGES, id="few pages for prompts"),
        pytest.param(seen(waiting=3), QUEUE, id="a rule"),
        pytest.param(seen(prefill(), waiting=3), DECODE, id="the last decode worker is lost"),
        pytest.param(seen(decode(0.95)), DECODE, id="no prefill worker"),
        pytest.param(seen(prefill(0.9), decode(0.99)), DECODE, id="the fuller one"),
        pytest.param(seen(prefill(1.0), prefill(0.1), decode()), None, id="another worker has time"),
        pytest.param(seen(prefill(link=1.0), prefill(link=1.0), decode()), LINK, id="all links"),
    ],
)
def test_the_resource_without_time_is_named(snapshot: Snapshot, expected: Bottleneck | None) -> None:
    assert find(snapshot) == expected


@given(st.floats(), st.floats(), st.floats(), st.integers(2, 6))
def test_one_worker_that_lies_moves_its_role_by_its_part_at_most(
    compute: float, link: float, pages: float, number: int
) -> None:
    honest = [prefill(0.2) for _ in range(number - 1)]
    loads = loads_of(seen(WorkerUse("prefill", compute, link, pages), *honest, decode()))
    assert all(0 <= load <= 1 for load in loads.values())
    assert 0.2 * (number - 1) / number - 1e-9 <= loads[PREFILL] <= 0.2 * (number - 1) / number + 1 / number + 1e-9


SHARE = st.floats(0, 1)
WORKERS = st.lists(
    st.one_of(st.builds(WorkerUse, st.just("prefill"), SHARE, SHARE, SHARE), st.builds(decode, SHARE, pages=SHARE)),
    max_size=6,
)
SNAPSHOTS = st.builds(Snapshot, workers=WORKERS, gateway=SHARE, waiting=st.floats(0, 100), is_batch_only=st.booleans())


@given(SNAPSHOTS)
def test_what_is_named_is_full_or_has_requests_waiting_for_it(snapshot: Snapshot) -> None:
    place, loads = find(snapshot), loads_of(snapshot)
    if DECODE not in loads:
        assert place == DECODE
    elif place is None:
        flows = [load for one, load in loads.items() if one.resource != "pages"]
        assert max(flows) < FULL
        assert snapshot.waiting < 1
    elif place.resource in ("compute", "link"):
        assert loads[place] == max(load for one, load in loads.items() if one.resource != "pages")
        assert loads[place] >= (FULL if snapshot.waiting < 1 else SHORT)
    else:
        assert snapshot.waiting >= 1


@given(SNAPSHOTS, st.sampled_from([PREFILL, LINK, DECODE, GATEWAY, DECODE_PAGES]))
def test_one_more_worker_helps_only_where_it_is_lacking(snapshot: Snapshot, place: Bottleneck) -> None:
    loads = loads_of(snapshot)
    gains = {gain.role: gain for gain in gains_of(snapshot, place)}
    if place not in loads:
        assert gains == {}
        return
    number = {role: sum(worker.role == role for worker in snapshot.workers) for role in ("prefill", "decode")}
    assert set(gains) == {"gateway", *(role for role, count in number.items() if count)}
    for role, gain in gains.items():
        assert gain.share >= 0
        assert gain.share <= 1 / number.get(role, 1) + 1e-9, "no more than its part of the role"
        assert role == place.role or gain.share == 0 or (place, role) == (LINK, "decode")


def test_a_gain_ends_where_the_next_resource_is_full() -> None:
    snapshot = seen(prefill(0.95), decode(0.8))
    assert find(snapshot) == PREFILL
    more_prefill, more_decode, more_gateways = gains_of(snapshot, PREFILL)
    assert (more_prefill.role, more_prefill.then) == ("prefill", DECODE)
    assert more_prefill.share == pytest.approx(1 / 0.8 - 1), "half the load would allow twice as much, decode 1.25"
    assert (more_decode.share, more_gateways.share) == (0, 0)


def test_what_waits_for_a_rule_gains_nothing_by_workers() -> None:
    assert gains_of(seen(waiting=9), QUEUE) == []


def follow(judge: Judge, *phases: tuple[Snapshot, float], since_s: float = 0.0) -> list[Bottleneck | None]:
    """What a judge says each second; each phase lasts for some seconds."""
    told, now_s = [], since_s
    for snapshot, lasts_s in phases:
        for _ in range(round(lasts_s)):
            finding = judge.judge(snapshot, now_s)
            told.append(None if finding is None else finding.place)
            now_s += 1.0
    return told


def test_a_burst_is_not_told_and_what_lasts_is() -> None:
    full, idle = seen(prefill(0.95), decode()), seen()
    assert set(follow(Judge(), (full, LASTING_S - 1), (idle, 30))) == {None}
    told = follow(Judge(), (full, 30), (idle, 30))
    assert told.index(PREFILL) == LASTING_S
    assert told[30 : 30 + round(LASTING_S)] == [PREFILL] * round(LASTING_S)
    assert told[-1] is None


def test_loads_around_the_limits_do_not_flicker() -> None:
    judge = Judge()
    nearly, full = seen(prefill(EASED + 0.01), decode()), seen(prefill(FULL + 0.01), decode())
    told = follow(judge, (full, 20), *((one, 1) for _ in range(30) for one in (nearly, full)))
    assert set(told[10:]) == {PREFILL}
    other = seen(prefill(0.95), decode(0.95 + 0.05))
    assert set(follow(judge, (other, 30), since_s=100.0)) == {PREFILL}, "another one is hardly fuller"
    assert follow(judge, (seen(prefill(0.86), decode(1.0)), 30), since_s=200.0)[-1] == DECODE


def test_two_that_are_alike_do_not_hide_each_other() -> None:
    phases = [(seen(prefill(0.95), decode(0.94)), 1), (seen(prefill(0.94), decode(0.95)), 1)] * 15
    assert follow(Judge(), *phases)[-1] in (PREFILL, DECODE)


def test_since_when_it_is_full_is_told() -> None:
    judge, full = Judge(), seen(prefill(0.95), decode())
    follow(judge, (seen(), 5), (full, 20))
    finding = judge.judge(full, 25.0)
    assert finding is not None
    assert finding.since_s == 5.0


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (
            seen(prefill(0.97), decode(0.5), waiting=3),
            "97% of what prefill workers can compute is taken, 3 requests wait; "
            "one more prefill worker: +100% requests, then prefill compute; one more decode worker: nothing; "
            "one more gateway: nothing",
        ),
        (seen(waiting=4), "nothing is full, so that requests wait for circuits, limits or workers kept for tenants"),
        (seen(prefill()), "no decode worker is ready"),
        (seen(gateway=0.9), "the gateway works 90% of the time"),
        (
            seen(prefill(link=0.9), decode()),
            "90% of the next second of the links of prefill workers is taken by pages; "
            "one more prefill worker: up to +100% requests, "
            "then prefill link; one more decode worker: up to +100% requests, then prefill link; one more gateway: "
            "nothing",
        ),
        (
            seen(prefill(), decode(pages=0.9), waiting=2),
            "90% of the pages of decode workers are taken, 2 requests wait",
        ),
        (
            replace(seen(prefill(0.9), decode()), is_batch_only=True),
            "90% of what prefill workers can compute is taken, all of it for batch work",
        ),
    ],
)
def test_it_is_said_in_a_sentence(snapshot: Snapshot, words: str) -> None:
    judge = Judge()
    follow(judge, (snapshot, 20))
    finding = judge.judge(snapshot, 20.0)
    assert finding is not None
    assert said(finding).startswith(words)


@given(st.lists(st.tuples(SNAPSHOTS, st.integers(1, 9)), max_size=10))
def test_it_changes_its_mind_no_faster_than_every_few_seconds(phases: list[tuple[Snapshot, int]]) -> None:
    told = follow(Judge(), *phases)
    changes = [second for second in range(1, len(told)) if told[second] != told[second - 1]]
    assert all(later - earlier >= math.floor(LASTING_S) for earlier, later in pairwise(changes))
