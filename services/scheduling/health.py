"""Which workers get no work because they are slow, silent or erring, or because their GPU is in trouble. Pure.

A process can be alive, keep its lease and still answer ten times too slowly. Three signals say so, each within three
seconds of the fault where the worker has work and answers are expected within 0.2 s:

  slow     the median of its latency ratios (actual / predicted) of the last `SLOW_WINDOW_S`, or of its last
           `MIN_RATIOS` where those are fewer, is more than `SLOW_RATIO`, and than `SLOW_RATIO` times the median of the
           other workers': predictions that are wrong for all accuse no worker. So is that of the last `MIN_RATIOS`, and
           a result that comes `CONFIRM_S` later must confirm both: a busy machine delays everything that is under way
           at one moment, which is one observation, however many results it makes late;
  silent   work is outstanding, and nothing came for `SILENCE_FACTOR` times what was expected, at least `MIN_SILENCE_S`.
           Where that is true of more than half of the group the fault is here or everywhere, and no worker is accused;
  erring   three errors within ten seconds, or two within `ERROR_WINDOW_S` and not more successes than errors.

What follows is a breaker's business (`services.runtime.breaker`): no new work but one probe at a time, the first
after one second, then after two, then every `MAX_OPEN_S`. Probes that are answered in time during a probation close it.
So a worker is back, counted from its recovery, within the limit of a silent probe, MAX_OPEN_S, the probation and one
answer: within ten seconds where answers are expected within a second. A worker that was ejected shortly before has a
longer probation, up to `MAX_PROBATION_S`. `due_for_probe` names the workers that should be tried now.

Never more than half of a group is left alone, and never its last worker, whatever all the signals say together. A
worker that should be left alone and for that reason is not is *suspected*. The idea of ejecting outliers against their
group, up to a share of it, is Envoy's outlier detection.

Time is an argument, in seconds of one monotonic clock.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.runtime.breaker import WINDOW_S, CircuitState
from services.scheduling.breakers import Breakers
from services.scheduling.gpu_judgement import GpuJudgement, GpuState

SLOW_WINDOW_S = 1.5
"""How far back ratios count in the judgement of slowness."""
ERROR_WINDOW_S = 3.0
"""How far back answers count in the error rate."""
REFERENCE_S = 10.0
"""How far back the others' ratios count, with which a worker's are compared."""
SLOW_RATIO = 3.0
"""How many times slower than expected, and than the others, a worker must be."""
RECOVERED_RATIO = 2.0
"""A probe is good up to this ratio, or this many times the others' median."""
MIN_RATIOS = 3
SILENCE_FACTOR = 4.0
MIN_SILENCE_S = 0.5
MAX_OPEN_S = 4.0
MAX_PROBATION_S = 60.0
CONFIRM_S = 0.5
"""How long a worker must have been found slow before a result can confirm it: longer than most pauses of a process."""
MAX_REMEMBERED = 16
MAX_GROUPS = 256
JUDGE_EVERY_S = 0.2
"""A group is not judged more often than this: notes are cheap, judging is not."""
FORGET_AFTER_S = 600.0
NOBODY: frozenset[str] = frozenset()
CAUSES = ("slow", "silent", "erring", "gpu")
"""Why a worker may be kept from work."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a worker should get no work. `kind`: slow, silent, erring or gpu; `figures` are what was measured."""

    kind: str
    words: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Circuit:
    """A worker that should get no work, or whose state has changed: `closed` if it gets work again.

    `since_s`: when the cause was found, on the clock of the calls. `num_openings`: how often it was found lately.
    """

    worker_id: str
    state: CircuitState
    cause: Cause
    since_s: float
    num_openings: int


@dataclass(slots=True)
class _Worker:
    ratios: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_REMEMBERED))
    """(when, actual / predicted)"""
    outcomes: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=MAX_REMEMBERED))
    """(when, whether it was an error)"""
    reference: float = 1.0
    """Median of the others' ratios when they were last compared."""
    num_outstanding: int = 0
    expected_s: float = 0.0
    heard_s: float = 0.0
    """When something came last, or work began while no work was outstanding."""
    touched_s: float = 0.0
    probe: int = 0
    """The number of the last probe."""
    probe_until_s: float = 0.0
    """When the probe is taken for failed."""
    slow_since_s: float = math.inf
    """When the first of the judgements in a row was made that found the worker slow."""
    cause: Cause | None = None
    """Why its breaker opened last."""

    def ratio(self, since_s: float, min_ratios: int) -> float | None:
        """Returns the (lower) median of the ratios since `since_s`; None where they are fewer than `min_ratios`."""
        recent = sorted([ratio for at_s, ratio in self.ratios if at_s >= since_s])
        return recent[(len(recent) - 1) // 2] if len(recent) >= min_ratios else None

    def last_ratio(self, since_s: float) -> float | None:
        """Returns the median of the last MIN_RATIOS ratios; None where they are fewer, or older than `since_s`."""
        last = list(self.ratios)[-MIN_RATIOS:]
        if len(last) < MIN_RATIOS or last[0][0] < since_s:
            return None
        return sorted([ratio for _, ratio in last])[(MIN_RATIOS - 1) // 2]

    def slow_ratio(self, now_s: float) -> float | None:
        """Returns the ratio that shows the worker to be slow, the smaller of both medians; None where it is not."""
        last = self.last_ratio(now_s - REFERENCE_S)
        if last is None:
            return None
        ratio = min(last, self.ratio(now_s - SLOW_WINDOW_S, MIN_RATIOS) or last)
        return ratio if ratio > SLOW_RATIO * max(1.0, self.reference) else None

    def usual_ratio(self, since_s: float) -> float | None:
        """Returns what others are compared with: the last ratios, since what slows all workers shows there first."""
        last = self.last_ratio(since_s)
        return self.ratio(since_s, 1) if last is None else last

    def is_silent(self, now_s: float) -> bool:
        return self.num_outstanding > 0 and now_s - self.heard_s > self.patience_s(self.expected_s)

    def patience_s(self, expected_s: float) -> float:
        """Returns how long to wait for what should come after `expected_s`."""
        return max(MIN_SILENCE_S, SILENCE_FACTOR * expected_s * max(1.0, self.reference))

    def is_erring(self, now_s: float) -> bool:
        recent = [is_error for at_s, is_error in self.outcomes if at_s >= now_s - ERROR_WINDOW_S]
        num_errors = sum(recent)
        return num_errors >= 2 and 2 * num_errors >= len(recent)

    def why_erring(self, now_s: float) -> Cause:
        recent = [is_error for at_s, is_error in self.outcomes if at_s >= now_s - WINDOW_S]
        num_errors, num_ended = sum(recent), len(recent)
        words = f"{num_errors} of the last {num_ended} answers within {WINDOW_S:g} s were errors"
        return Cause("erring", words, {"errors": num_errors, "answers": num_ended})

    def why_silent(self, now_s: float) -> Cause:
        silent_s, patience_s = now_s - self.heard_s, self.patience_s(self.expected_s)
        words = (
            f"nothing came for {silent_s:.2g} s (limit {patience_s:.2g} s), and {self.num_outstanding} requests wait"
        )
        figures = {"silent_s": silent_s, "limit_s": patience_s, "waiting": self.num_outstanding}
        return Cause("silent", words, figures)

    def why_slow(self, ratio: float) -> Cause:
        words = f"its own steps take {ratio:.3g} times as long as expected, with the others {self.reference:.3g} times"
        return Cause("slow", words, {"ratio": ratio, "others": self.reference})

    def forgive(self) -> None:
        self.ratios.clear()
        self.outcomes.clear()
        self.slow_since_s = math.inf


class WorkerHealth:
    """The health of all workers of one gateway, by worker id, since a crash loop makes many processes of one worker.

    `before_judging` is called with a group that is about to be judged, to call `note_load` for its workers.
    """

    def __init__(self, *, before_judging: Callable[[Sequence[str]], None] = lambda group: None) -> None:
        self._before_judging = before_judging
        self._breakers = Breakers(max_open_s=MAX_OPEN_S, max_probation_s=MAX_PROBATION_S)
        self._workers: dict[str, _Worker] = {}
        self._judged_s: dict[tuple[str, ...], float] = {}
        """When each group was judged last."""
        self._weak_gpus: dict[str, GpuJudgement] = {}
        """Judgements of GPUs that are not ok, kept until they are, however long nothing else is heard of them."""
        self._gpu_out: dict[str, float] = {}
        """Workers whose GPU is out, and since when."""
        self._known: dict[str, Circuit] = {}
        """Circuits that are not closed, as of the last look at their group."""
        self._changes: list[Circuit] = []
        self._gone_s: dict[str, float] = {}
        """Workers that have left and have not been seen in a group since, and when they left."""

    @property
    def num_ejected(self) -> int:
        """Workers whose breaker is open or whose GPU is out, probed and suspected ones included."""
        return self._breakers.num_open + sum(not self._breakers.is_open(worker_id) for worker_id in self._gpu_out)

    @property
    def weak_gpus(self) -> Mapping[str, GpuJudgement]:
        """The judgements of GPUs that are degraded or out, by worker."""
        return self._weak_gpus

    # What is seen.

    def begin(self, worker_id: str, now_s: float, *, expected_s: float = 0.0) -> int:
        """Notes that a request goes there, whose first answer should come in about `expected_s` seconds.

        Returns 0, or the number of the probe that it is; however a probe ends, that must be noted with its number.
        """
        if not self._breakers.begin(worker_id, now_s):
            return 0
        worker = self._worker(worker_id, now_s)
        worker.probe += 1
        worker.probe_until_s = now_s + worker.patience_s(expected_s)
        return worker.probe

    def note_load(self, worker_id: str, num_outstanding: int, expected_s: float, now_s: float) -> None:
        """Notes how many requests wait for something from there; some of it should come in about `expected_s`."""
        worker = self._worker(worker_id, now_s)
        if num_outstanding and not worker.num_outstanding:
            worker.heard_s = now_s
        worker.num_outstanding = num_outstanding
        worker.expected_s = expected_s

    def note_heard(self, worker_id: str, now_s: float) -> None:
        """Records a sign of life of the worker that is not judged."""
        self._worker(worker_id, now_s).heard_s = now_s

    def note_success(self, worker_id: str, latency_ratio: float, now_s: float, *, probe: int = 0) -> None:
        """Notes that something came, after `latency_ratio` times what was predicted (positive and finite).

        Predict with the speeds that are usual for the role: a worker's own measured ones follow its fault.
        """
        worker = self._worker(worker_id, now_s)
        worker.heard_s = now_s
        worker.outcomes.append((now_s, False))
        worker.ratios.append((now_s, latency_ratio))
        if not (probe and self._is_current(worker_id, probe)):
            return
        if latency_ratio <= RECOVERED_RATIO * max(1.0, worker.reference):
            if self._breakers.succeeded(worker_id, now_s):
                worker.forgive()
        else:
            self._breakers.failed(worker_id, now_s, is_probe=True)

    def note_error(self, worker_id: str, now_s: float, *, probe: int = 0) -> None:
        """Notes that something failed there, through the worker's own fault."""
        worker = self._worker(worker_id, now_s)
        worker.heard_s = now_s
        worker.outcomes.append((now_s, True))
        was_open = self._breakers.is_open(worker_id)
        self._breakers.failed(worker_id, now_s, is_probe=probe > 0 and self._is_current(worker_id, probe))
        if worker.is_erring(now_s):
            self._breakers.trip(worker_id, now_s)
        if not was_open and self._breakers.is_open(worker_id):
            worker.cause = worker.why_erring(now_s)

    def note_abandoned(self, worker_id: str, probe: int) -> None:
        """Notes that a probe ended without saying anything about the worker, as when its client left."""
        if probe and self._is_current(worker_id, probe):
            self._breakers.abandoned(worker_id)

    def note_gpu(self, worker_id: str, judgement: GpuJudgement, now_s: float) -> None:
        """Takes the judgement of a worker's GPU, which holds until the next one; ok also when the worker left."""
        self._weak_gpus.pop(worker_id, None)
        since_s = self._gpu_out.pop(worker_id, now_s)
        if judgement.state is not GpuState.OK:
            self._weak_gpus[worker_id] = judgement
        if judgement.state is GpuState.OUT:
            self._gpu_out[worker_id] = since_s

    # What follows.

    def out_of_rotation(self, group: Sequence[str], now_s: float) -> frozenset[str]:
        """Returns the workers of a role that get no new work now: at most half, and never the last one."""
        key = tuple(group)
        if now_s - self._judged_s.get(key, -math.inf) >= JUDGE_EVERY_S:
            if len(self._judged_s) >= MAX_GROUPS:
                self._judged_s.clear()  # groups come and go with their workers
            self._judged_s[key] = now_s
            self._before_judging(group)
            self._judge(group, now_s)
        if not (self._gpu_out or self._known or self._breakers.num_open):
            return NOBODY
        for worker_id in self._gone_s.keys() & set(group) if self._gone_s else ():
            del self._gone_s[worker_id]
        bad = [worker_id for worker_id in group if worker_id in self._gpu_out]
        bad += [worker_id for worker_id in self._breakers.opened(group) if worker_id not in self._gpu_out]
        left_alone = frozenset(bad[: len(group) // 2])
        self._note_circuits(group, bad, left_alone)
        return left_alone

    def due_for_probe(self, group: Iterable[str], now_s: float) -> list[str]:
        """Returns the ejected workers that should be tried with a request now, to find out which have recovered."""
        if not self._breakers.num_open:
            return []
        return [
            worker_id
            for worker_id in group
            if self._breakers.is_open(worker_id)
            and not self._breakers.shut([worker_id], now_s)
            and worker_id not in self._gpu_out
        ]

    def circuit(self, worker_id: str) -> CircuitState:
        """Returns whether a worker gets new work, as of the last look at its group; open where its GPU is out."""
        known = self._known.get(worker_id)
        if known is None:
            return "closed"
        return "half_open" if known.state == "open" and self._breakers.is_probing(worker_id) else known.state

    def circuits(self) -> list[Circuit]:
        """Returns all circuits that are not closed, as of the last look, without those of workers that have left."""
        return [
            replace(known, state=self.circuit(known.worker_id))
            for known in self._known.values()
            if known.worker_id not in self._gone_s
        ]

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would return any."""
        return bool(self._changes)

    def take_changes(self) -> list[Circuit]:
        """Returns the changes of circuits since the last call, in order. Being tried is not a change."""
        changes, self._changes = self._changes, []
        return changes

    def note_gone(self, worker_id: str, now_s: float) -> None:
        """Notes that the worker has left. What is known of it is kept for a while, as it may be back."""
        self._gone_s[worker_id] = now_s
        for one in [one for one, at_s in self._gone_s.items() if now_s - at_s > FORGET_AFTER_S]:
            del self._gone_s[one]
            self._known.pop(one, None)

    def _note_circuits(self, group: Sequence[str], bad: Sequence[str], left_alone: frozenset[str]) -> None:
        for worker_id in bad:
            known = self._known.get(worker_id)
            state: CircuitState = "open" if worker_id in left_alone else "suspected"
            cause, since_s = self._cause(worker_id)
            if known is None or known.state != state or known.cause is not cause:
                self._known[worker_id] = Circuit(
                    worker_id, state, cause, since_s, max(1, self._breakers.num_openings(worker_id))
                )
                if known is None or known.state != state or known.cause.kind != cause.kind:
                    self._changes.append(self._known[worker_id])
        for worker_id in set(group).difference(bad) & self._known.keys() if self._known else ():
            self._changes.append(replace(self._known.pop(worker_id), state="closed"))

    def _cause(self, worker_id: str) -> tuple[Cause, float]:
        """Returns why the worker should get no work, and since when."""
        worker, opened_s = self._workers.get(worker_id), self._breakers.opened_at_s(worker_id)
        if worker_id in self._gpu_out:
            since_s = self._gpu_out[worker_id]
            known = self._known.get(worker_id)
            cause = Cause("gpu", "its GPU: " + ", ".join(self._weak_gpus[worker_id].reasons))
            return (known.cause if known is not None and known.cause == cause else cause), since_s
        assert opened_s is not None, "it is bad for its GPU or for its breaker"
        return (worker.cause if worker is not None else None) or _FORGOTTEN, opened_s

    def _is_current(self, worker_id: str, probe: int) -> bool:
        """Whether this probe is the one under way: one that took too long has failed already."""
        return self._breakers.is_probing(worker_id) and self._workers[worker_id].probe == probe

    def _judge(self, group: Sequence[str], now_s: float) -> None:
        known = {worker_id: worker for worker_id in group if (worker := self._workers.get(worker_id)) is not None}
        figures = {
            worker_id: ratio
            for worker_id, worker in known.items()
            if not self._breakers.is_open(worker_id) and (ratio := worker.usual_ratio(now_s - REFERENCE_S)) is not None
        }
        in_order = sorted(figures.values())
        silent = {worker_id for worker_id, worker in known.items() if worker.is_silent(now_s)}
        if len(silent) > len(group) // 2:
            silent.clear()
        for worker_id, worker in known.items():
            reference = _median_without(in_order, figures.get(worker_id))
            if reference is not None:
                worker.reference = reference
            if self._breakers.is_probing(worker_id):
                if now_s > worker.probe_until_s:
                    self._breakers.failed(worker_id, now_s, is_probe=True)
                continue
            ratio = worker.slow_ratio(now_s)
            worker.slow_since_s = math.inf if ratio is None else min(worker.slow_since_s, now_s)
            is_silent = worker_id in silent
            is_slow = ratio is not None and worker.ratios[-1][0] >= worker.slow_since_s + CONFIRM_S
            if self._breakers.is_open(worker_id) or not (is_slow or is_silent):
                continue
            worker.cause = worker.why_silent(now_s) if is_silent or ratio is None else worker.why_slow(ratio)
            self._breakers.trip(worker_id, now_s)

    def _worker(self, worker_id: str, now_s: float) -> _Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            for other_id, other in list(self._workers.items()):
                if now_s - other.touched_s > FORGET_AFTER_S:
                    del self._workers[other_id]
            worker = self._workers[worker_id] = _Worker()
        worker.touched_s = now_s
        return worker


_FORGOTTEN = Cause("erring", "what it did is too long ago to be known")


def _median_without(in_order: list[float], figure: float | None) -> float | None:
    """Returns the median of sorted figures without one of them; None where no other is left."""
    num_left = len(in_order) - (figure is not None)
    if num_left == 0:
        return None
    gap = len(in_order) if figure is None else bisect_left(in_order, figure)

    def at(index: int) -> float:
        return in_order[index + (index >= gap)]

    middle = num_left // 2
    return at(middle) if num_left % 2 else (at(middle - 1) + at(middle)) / 2
