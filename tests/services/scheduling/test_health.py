"""A worker that is slow, silent or erring gets no new work within 3 s and is back in 10 s; half of a role stays."""

import heapq
import itertools
import random
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.gpu_judgement import GpuJudgement, GpuState
from services.scheduling.health import (
    CONFIRM_S,
    JUDGE_EVERY_S,
    MAX_PROBATION_S,
    MIN_SILENCE_S,
    WorkerHealth,
    _median_without,
)
from tests.examples import examples

GROUP = ["a", "b", "c", "d"]
OUT = GpuJudgement(GpuState.OUT, 0.0, ("xid_79",))


def seen(health, now_s, **ratios):
    for worker_id, ratio in ratios.items():
        for _ in range(3):
            health.note_success(worker_id, ratio, now_s)


def judged_out(health, now_s, **ratios):
    """Returns the workers that are out after results at two moments, the second at `now_s`."""
    for at_s in (now_s - CONFIRM_S, now_s):
        seen(health, at_s, **ratios)
        out = health.out_of_rotation(GROUP, at_s)
    return out


def test_who_is_three_times_slower_than_the_others_gets_nothing():
    health = WorkerHealth()
    assert judged_out(health, 0.5, a=6.1, b=2.0, c=2.0, d=1.0) == {"a"}
    assert health.num_ejected == 1
    health = WorkerHealth()
    assert judged_out(health, 0.5, a=5.9, b=2.0, c=2.0, d=1.0) == set()


def test_predictions_that_are_wrong_for_all_accuse_nobody():
    health = WorkerHealth()
    assert judged_out(health, 0.5, a=20.0, b=25.0, c=15.0, d=22.0) == set()


def test_a_little_slower_than_predicted_is_healthy_however_fast_the_others_are():
    health = WorkerHealth()
    assert judged_out(health, 0.5, a=2.9, b=0.1, c=0.1, d=0.1) == set()


def test_one_slow_answer_is_nothing():
    health = WorkerHealth()
    seen(health, 0.0, a=1.0, b=1.0)
    health.note_success("a", 100.0, 0.1)
    assert judged_out(health, 0.7) == set()


def test_a_hiccup_of_a_busy_worker_is_nothing():
    health = WorkerHealth()
    seen(health, 0.0, a=1.0, b=1.0)
    for number in range(50):
        health.note_success("a", 20.0, 0.1 + number / 1000)
    assert health.out_of_rotation(GROUP, 0.2) == set()
    for number in range(50):
        health.note_success("a", 1.0, 0.2 + number / 1000)
    assert health.out_of_rotation(GROUP, 0.5) == set()


def test_results_that_are_late_at_one_moment_are_one_observation():
    health = WorkerHealth()
    seen(health, 0.0, b=1.0)
    for number in range(9):
        health.note_success("a", 20.0, 0.1 + number / 100)
    for judged_s in (0.2, 0.5, 0.8, 1.5, 5.0):
        assert health.out_of_rotation(GROUP, judged_s) == set()
    health.note_success("a", 20.0, 5.1)
    assert health.out_of_rotation(GROUP, 5.1 + JUDGE_EVERY_S) == {"a"}


def test_silence_with_work_outstanding():
    health = WorkerHealth()
    health.note_load("a", 2, 0.2, 1.0)
    health.note_load("b", 0, 0.2, 1.0)
    assert health.out_of_rotation(GROUP, 1.7) == set()
    assert health.out_of_rotation(GROUP, 2.0) == {"a"}
    health = WorkerHealth()
    health.note_load("a", 2, 0.001, 1.0)  # nobody is that punctual
    assert health.out_of_rotation(GROUP, 1.0 + MIN_SILENCE_S) == set()
    health.note_success("a", 1.0, 1.4)
    assert health.out_of_rotation(GROUP, 1.0 + MIN_SILENCE_S + 0.3) == set()


def test_when_most_are_silent_the_fault_is_not_theirs():
    health = WorkerHealth()
    for worker_id in "abc":
        health.note_load(worker_id, 1, 0.1, 0.0)
    assert health.out_of_rotation(GROUP, 10.0) == set()
    health.note_load("c", 0, 0.1, 10.0)
    assert health.out_of_rotation(GROUP, 10.1 + JUDGE_EVERY_S) == {"a", "b"}


def test_what_is_told_of_a_circuit():
    health = WorkerHealth()
    health.note_error("a", 1.0)
    health.note_error("a", 2.0)
    assert (health.circuit("a"), health.take_changes()) == ("closed", []), "nobody has looked yet"
    health.note_gpu("b", OUT, 2.0)
    health.note_gpu("c", OUT, 2.5)
    health.out_of_rotation(GROUP, 3.0)
    told = {one.worker_id: (one.state, one.cause.kind, one.cause.words, one.since_s) for one in health.take_changes()}
    assert told == {
        "b": ("open", "gpu", "its GPU: xid_79", 2.0),
        "c": ("open", "gpu", "its GPU: xid_79", 2.5),
        "a": ("suspected", "erring", "2 of the last 2 answers within 10 s were errors", 2.0),
    }
    assert health.circuit("a") == "suspected", "it gets work"
    health.note_gpu("b", GpuJudgement(), 4.0)
    assert health.out_of_rotation(GROUP, 4.0) == {"a", "c"}
    assert [(one.worker_id, one.state) for one in health.take_changes()] == [("a", "open"), ("b", "closed")]
    assert health.out_of_rotation(GROUP, 4.1) == {"a", "c"}
    assert health.take_changes() == []
    (worker,) = [one for one in health.circuits() if one.worker_id == "a"]
    assert worker.cause.figures == {"errors": 2, "answers": 2}


def test_who_leaves_and_is_back_is_told_once():
    health = WorkerHealth()
    for _ in range(2):
        health.note_error("a", 1.0)
    assert health.out_of_rotation(GROUP, 1.0) == {"a"}
    assert [one.state for one in health.take_changes()] == ["open"]
    health.note_gone("a", 1.1)
    assert health.out_of_rotation(GROUP[1:], 1.2) == set()
    assert health.circuits() == []
    assert health.out_of_rotation(GROUP, 1.3) == {"a"}
    assert [one.worker_id for one in health.circuits()] == ["a"]
    assert health.take_changes() == []
    health.note_gone("a", 2.0)
    health.note_gone("b", 700.0)
    assert health._known == {}


def test_figures_of_who_is_slow_and_who_is_silent():
    health = WorkerHealth()
    health.note_load("d", 3, 0.2, 0.0)
    assert judged_out(health, 3.0, a=6.1, b=2.0, c=2.0) == {"a", "d"}
    causes = {one.worker_id: one.cause for one in health.circuits()}
    assert causes["a"].words == "its own steps take 6.1 times as long as expected, with the others 2 times"
    assert causes["a"].figures == {"ratio": 6.1, "others": 2.0}
    assert causes["d"].kind == "silent"
    assert causes["d"].figures["waiting"] == 3
    assert "3 requests wait" in causes["d"].words


def test_errors():
    health = WorkerHealth()
    health.note_error("a", 0.0)
    assert health.out_of_rotation(GROUP, 0.0) == set()
    health.note_error("a", 1.0)
    assert health.out_of_rotation(GROUP, 1.0) == {"a"}
    health = WorkerHealth()
    for now_s in (0.0, 4.0, 8.0):  # some among many, but three within ten seconds
        assert health.out_of_rotation(GROUP, now_s) == set()
        for _ in range(5):
            health.note_success("b", 1.0, now_s)
        health.note_error("b", now_s)
    assert health.out_of_rotation(GROUP, 8.0) == {"b"}


def test_probes_and_the_way_back():
    health = WorkerHealth()
    assert judged_out(health, 0.0, a=10.0, b=1.0, c=1.0) == {"a"}
    assert health.due_for_probe(GROUP, 0.9) == []
    assert (health.due_for_probe(GROUP, 1.0), health.out_of_rotation(GROUP, 1.0)) == (["a"], {"a"})
    slow = health.begin("a", 1.0, expected_s=0.1)
    assert slow
    assert health.begin("a", 1.0) == 0
    assert (health.due_for_probe(GROUP, 1.0), health.out_of_rotation(GROUP, 1.0)) == ([], {"a"})
    # It takes too long: failed before it ends, and its end says nothing more.
    assert health.out_of_rotation(GROUP, 1.6) == {"a"}
    assert health.due_for_probe(GROUP, 3.6) == ["a"]
    second = health.begin("a", 3.6, expected_s=0.1)
    health.note_success("a", 10.0, 3.65, probe=slow)
    health.note_abandoned("a", slow)
    assert health.out_of_rotation(GROUP, 3.7) == {"a"}
    health.note_success("a", 1.2, 3.7, probe=second)
    for now_s in (4.7, 5.7, 6.7):  # good for three seconds on end
        assert health.out_of_rotation(GROUP, now_s) == {"a"}
        health.note_success("a", 1.2, now_s, probe=health.begin("a", now_s, expected_s=0.1))
    assert (health.out_of_rotation(GROUP, 6.8), health.num_ejected) == (set(), 0)


def test_a_probe_that_fails_and_one_that_says_nothing():
    health = WorkerHealth()
    health.note_error("a", 0.0)
    health.note_error("a", 0.0)
    health.note_error("a", 1.0, probe=health.begin("a", 1.0))
    assert health.due_for_probe(GROUP, 2.9) == []
    probe = health.begin("a", 3.0)
    health.note_abandoned("a", probe)
    assert health.due_for_probe(GROUP, 3.0) == ["a"]
    health.note_success("a", 9.0, 3.1, probe=health.begin("a", 3.0))
    assert health.due_for_probe(GROUP, 7.0) == []
    assert health.due_for_probe(GROUP, 7.2) == ["a"]


def test_a_gpu_that_is_out_counts_to_the_half_that_may_be():
    health = WorkerHealth()
    for _ in range(2):
        health.note_error("a", 0.0)
    health.note_gpu("b", OUT, 0.0)
    health.note_gpu("c", OUT, 0.0)
    assert health.out_of_rotation(GROUP, 0.0) == {"b", "c"}
    assert health.out_of_rotation(["a", "b"], 0.0) == {"b"}
    assert health.out_of_rotation(["b"], 0.0) == set()
    assert health.num_ejected == 3
    health.note_gpu("b", GpuJudgement(GpuState.DEGRADED, 0.5, ("hot",)), 0.0)
    assert health.out_of_rotation(GROUP, 0.5) == {"a", "c"}
    assert {one: judgement.weight for one, judgement in health.weak_gpus.items()} == {"b": 0.5, "c": 0.0}


def test_workers_that_are_gone_are_forgotten():
    health = WorkerHealth()
    for number in range(2000):
        health.note_success(f"w{number}", 1.0, float(number))
    assert len(health._workers) < 700


def test_a_gpu_that_is_out_stays_so_however_long_nothing_else_is_heard():
    health = WorkerHealth()
    health.note_success("b", 1.0, 0.0)
    health.note_gpu("b", OUT, 0.0)
    for number in range(2000):
        health.note_success(f"w{number}", 1.0, float(number))
    assert health.out_of_rotation(GROUP, 2000.0) == {"b"}
    health.note_gpu("b", GpuJudgement(), 2000.0)
    assert (health.out_of_rotation(GROUP, 2001.0), health.weak_gpus, health.num_ejected) == (set(), {}, 0)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=9), st.data())
def test_median_of_the_others(figures, data):
    figures.sort()
    index = data.draw(st.integers(0, len(figures) - 1))
    others = figures[:index] + figures[index + 1 :]
    assert _median_without(figures, figures[index]) == (median(others) if others else None)
    assert _median_without(figures, None) == median(figures)


EVENTS = st.one_of(
    st.tuples(st.just("pass"), st.floats(0, 5)),
    st.tuples(st.sampled_from(["begin", "load", "idle", "good", "slow", "error", "cancel"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["gpu out", "gpu ok"]), st.integers(0, 5)),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 6), st.lists(EVENTS, max_size=100))
def test_random_histories(size, events):
    """Whatever is seen: half of the group stays, probes go one at a time, and those that are well again come back."""
    health, now_s = WorkerHealth(), 0.0
    group = [f"w{number}" for number in range(size)]
    probes = dict.fromkeys(group, 0)

    def step(kind, value):
        nonlocal now_s
        if kind == "pass":
            now_s += value
            return
        worker_id = group[value % size]
        if kind == "begin":
            number = health.begin(worker_id, now_s, expected_s=0.1)
            if number:
                assert number > probes[worker_id]
                probes[worker_id] = number
        elif kind in ("load", "idle"):
            health.note_load(worker_id, int(kind == "load"), 0.1, now_s)
        elif kind in ("good", "slow"):
            health.note_success(worker_id, 1.0 if kind == "good" else 50.0, now_s, probe=probes[worker_id])
        elif kind == "error":
            health.note_error(worker_id, now_s, probe=probes[worker_id])
        elif kind == "cancel":
            health.note_abandoned(worker_id, probes[worker_id])
        else:
            health.note_gpu(worker_id, OUT if kind == "gpu out" else GpuJudgement(), now_s)

    for kind, value in events:
        step(kind, value)
        out = health.out_of_rotation(group, now_s)
        assert out <= set(group)
        assert len(out) <= size // 2 < size
        due = health.due_for_probe(group, now_s)
        for worker_id in due:
            assert health.begin(worker_id, now_s) > 0
            probes[worker_id] += 1
        # What is shown is what is done.
        assert {one for one in group if health.circuit(one) in ("open", "half_open")} == out
        reports = {circuit.worker_id: circuit for circuit in health.circuits()}
        assert len(reports) == health.num_ejected
        assert all(circuit.cause.words and circuit.num_openings > 0 for circuit in reports.values())
    # Everybody is well from here on: when the longest probation is over, nobody is left out.
    for number in range(size):
        step("gpu ok", number)
    end_s = now_s + MAX_PROBATION_S + 10
    while now_s < end_s:
        now_s += 0.4
        health.out_of_rotation(group, now_s)
        for worker_id in group:
            health.note_load(worker_id, 1, 0.1, now_s)
            health.note_success(worker_id, 1.0, now_s, probe=health.begin(worker_id, now_s, expected_s=0.1))
    assert health.num_ejected == 0
    assert health.out_of_rotation(group, now_s) == set()


class Cluster:
    """Workers with faults, and a gateway that sends each request to one at random that it may use."""

    def __init__(self, size, expected_s, rate, seed):
        self.health, self.rng = WorkerHealth(), random.Random(seed)
        self.group = [f"w{number}" for number in range(size)]
        self.expected_s, self.rate = expected_s, rate
        self.fault, self.until_s = None, 0.0
        self.outstanding = dict.fromkeys(self.group, 0)
        self.ends, self.order = [], itertools.count()
        self.sent = []
        self.num_slow = 0
        """Requests of clients that took more than three times as long as they should."""

    def run(self, from_s, to_s):
        now_s = from_s
        while now_s < to_s:
            now_s += 1 / self.rate
            while self.ends and self.ends[0][0] <= now_s:
                self._end(*heapq.heappop(self.ends))
            self._send(now_s)

    def _send(self, now_s):
        out = self.health.out_of_rotation(self.group, now_s)
        for worker_id in self.health.due_for_probe(self.group, now_s):
            self._go(worker_id, now_s)
        self._go(self.rng.choice([name for name in self.group if name not in out]), now_s)

    def _go(self, worker_id, now_s):
        probe = self.health.begin(worker_id, now_s, expected_s=self.expected_s)
        self.sent.append((now_s, worker_id, bool(probe)))
        took_s = self.expected_s * self.rng.uniform(0.7, 1.3)
        is_error = False
        if worker_id == self.group[0] and self.fault is not None:
            kind, factor = self.fault
            is_error = kind == "errors"
            took_s = {"slow": took_s * factor, "silent": 1e9, "errors": took_s}[kind]
        heapq.heappush(self.ends, (now_s + took_s, next(self.order), worker_id, now_s, probe, is_error))
        self._load(worker_id, 1, now_s)

    def _end(self, at_s, _, worker_id, began_s, probe, is_error):
        self._load(worker_id, -1, at_s)
        self.num_slow += not probe and at_s - began_s > 3 * self.expected_s
        if is_error:
            self.health.note_error(worker_id, at_s, probe=probe)
        else:
            self.health.note_success(worker_id, (at_s - began_s) / self.expected_s, at_s, probe=probe)

    def _load(self, worker_id, change, now_s):
        self.outstanding[worker_id] += change
        self.health.note_load(worker_id, self.outstanding[worker_id], self.expected_s, now_s)

    def recover(self, now_s):
        """What hung there continues: it ends within the usual time."""
        self.fault = None
        hung = [entry for entry in self.ends if entry[2] == self.group[0]]
        self.ends = [entry for entry in self.ends if entry[2] != self.group[0]]
        for end_s, *rest in hung:
            self.ends.append((min(end_s, now_s + self.expected_s), *rest))
        heapq.heapify(self.ends)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["slow", "silent", "errors"]),
    factor=st.floats(5, 50),
    size=st.integers(2, 6),
    expected_s=st.sampled_from([0.02, 0.1, 0.2]),
    lasts_s=st.floats(4, 30),
    seed=st.integers(0, 1000),
)
def test_out_within_three_seconds_and_back_within_ten(kind, factor, size, expected_s, lasts_s, seed):
    cluster = Cluster(size, expected_s, rate=8.0 * size, seed=seed)
    cluster.run(0.0, 5.0)
    assert cluster.health.num_ejected == 0
    cluster.fault = (kind, factor)
    cluster.run(5.0, 5.0 + lasts_s)
    late = [entry for entry in cluster.sent if entry[1] == "w0" and entry[0] > 8.0]
    assert all(is_probe for _, _, is_probe in late)
    assert len(late) <= 2 + lasts_s / 2
    cluster.recover(5.0 + lasts_s)
    cluster.run(5.0 + lasts_s, 15.0 + lasts_s)
    assert cluster.health.num_ejected == 0
    cluster.run(15.0 + lasts_s, 20.0 + lasts_s)
    assert any(name == "w0" and at_s > 15.0 + lasts_s for at_s, name, _ in cluster.sent)
    # Nobody else was ever accused.
    assert {name for _, name, is_probe in cluster.sent if is_probe} == {"w0"}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("factor", [20.0, 1000.0])
def test_who_flaps_is_not_taken_back_at_each_good_moment(size, factor):
    """Three requests a second for twenty seconds, and a worker that is slow or stands still every few seconds."""
    rng, slow = random.Random(size), []
    for seed in range(60):
        cluster = Cluster(size, rng.choice([0.05, 0.1, 0.2]), rate=3.0, seed=seed)
        bad_s, good_s = rng.uniform(1.5, 5), rng.uniform(1.5, 5)
        cluster.run(0.0, 5.0)
        now_s = 5.0
        while now_s < 25.0:
            cluster.fault = ("slow", factor)
            cluster.run(now_s, now_s + bad_s)
            cluster.recover(now_s + bad_s)
            cluster.run(now_s + bad_s, now_s + bad_s + good_s)
            now_s += bad_s + good_s
        slow.append(cluster.num_slow)
    assert max(slow) <= 5
    assert mean(slow) <= 2.5
