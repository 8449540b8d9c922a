"""Samples all workers each second, and finds the bottleneck of each model from the samples of the last seconds.

Workers count the seconds in which they compute. The load of a decode worker is its token rate as a share of its rate
with the largest batch, according to its measured step times. `services.scheduling.bottleneck` makes the decision.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from statistics import fmean
from typing import Any, NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.observability.model_server import Population
from gateway.topology.member import Member
from gateway.topology.pacing import thread_busy_s
from gateway.topology.reports import WorkerLoad
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.worker_state import WorkerState
from services.scheduling.bottleneck import Finding, Judge, Snapshot, WorkerUse, loads_of, said
from services.scheduling.capacity import largest_batch, tokens_per_s
from services.scheduling.entry import ServiceClass

WINDOW_S = 10
"""Length of the window over which samples are averaged, in seconds. There is one sample per second."""
PIECE_WORKERS = 250
"""Number of workers that are sampled without a pause. Sampling them takes a few milliseconds."""
MAX_BATCH = 256
"""Assumed largest batch of a decode worker that does not report it."""
BATCH = ServiceClass.BATCH.name.lower()


class _Sample(NamedTuple):
    """One worker at one moment. `fill` is its share of the maximum token rate, or None if the worker has no work."""

    at_s: float
    step_s: float | None
    fill: float | None
    link: float
    pages: float


class _Window:
    """The last samples of one worker, with the sums of their figures."""

    __slots__ = ("_fill", "_link", "_num_fills", "_pages", "_samples")

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._fill = self._link = self._pages = 0.0
        self._num_fills = 0

    def add(self, sample: _Sample) -> None:
        """Adds a sample, and drops the oldest if there are too many."""
        self._samples.append(sample)
        self._sum(sample, 1)
        if len(self._samples) > WINDOW_S + 1:
            self._sum(self._samples.popleft(), -1)

    def use(self, role: str) -> WorkerUse:
        """Returns the means of the window."""
        number, first, last = len(self._samples), self._samples[0], self._samples[-1]
        busy = _risen(first.step_s, last.step_s, last.at_s - first.at_s)
        if busy is None:
            busy = self._num_fills / number
        # Rounded, because sums from which figures were taken off again are not exactly 0.
        link, pages = round(self._link / number, 12), round(self._pages / number, 12)
        if role == "prefill":
            return WorkerUse("prefill", busy, link, pages)
        fill = round(self._fill / self._num_fills, 12) if self._num_fills else 0.0
        return WorkerUse("decode", min(1.0, busy) * fill, link, pages)

    def _sum(self, sample: _Sample, sign: int) -> None:
        self._link += sign * sample.link
        self._pages += sign * sample.pages
        if sample.fill is not None:
            self._fill += sign * sample.fill
            self._num_fills += sign


class _Moment(NamedTuple):
    """The responses of one model, and the busy time of the gateway's thread, at one moment."""

    at_s: float
    busy_s: float
    waiting: int
    urgent: int
    batch: int


class BottleneckWatch(Collector):
    """Finds the bottleneck of each model, and exports it as metrics.

    Its caller runs `pieces` each second, in the thread whose busy time `busy_s` returns. `members` returns all workers,
    and `population` the number of responses by model, class, and state. `itl_target_s` limits batches.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        population: Callable[[], Population],
        *,
        busy_s: Callable[[], float] = thread_busy_s,
        itl_target_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._members = members
        self._population = population
        self._busy_s = busy_s
        self._itl_target_s = itl_target_s
        self._clock = clock
        self._windows: dict[tuple[str, str], _Window] = {}
        """By id and incarnation."""
        self._moments: dict[str, deque[_Moment]] = {}
        self._judges: dict[str, Judge] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._findings: dict[str, Finding] = {}

    def pieces(self) -> Iterator[None]:
        """Samples all workers and finds the bottlenecks. Yields between parts, so that other tasks can run."""
        now_s = self._clock.monotonic()
        ready = [member for member in self._members() if member.state is WorkerState.READY]
        ready_ids = {member.record.id for member in ready}
        windows: dict[tuple[str, str], _Window] = {}
        uses: dict[str, list[WorkerUse]] = {}
        for number, member in enumerate(ready, start=1):
            key = member.record.id, member.record.incarnation
            window = windows[key] = self._windows.get(key) or _Window()
            window.add(self._sample(member, ready_ids, now_s))
            uses.setdefault(member.record.model, []).append(window.use(member.record.role))
            if number % PIECE_WORKERS == 0:
                yield
                now_s = self._clock.monotonic()
        self._windows = windows
        self._count(now_s, self._busy_s())
        for model, moments in self._moments.items():
            yield
            snapshot = self._snapshots[model] = Snapshot(
                workers=uses.get(model, []),
                gateway=_risen(moments[0].busy_s, moments[-1].busy_s, moments[-1].at_s - moments[0].at_s) or 0.0,
                waiting=fmean(moment.waiting for moment in moments),
                is_batch_only=any(moment.batch for moment in moments) and not any(moment.urgent for moment in moments),
            )
            finding = self._judges.setdefault(model, Judge()).judge(snapshot, now_s)
            if finding is None:
                self._findings.pop(model, None)
            else:
                self._findings[model] = finding

    def told(self) -> list[dict[str, Any]]:
        """Returns what holds models back, as `/cluster` and the dashboard show it; empty: nothing does."""
        now_s, unix_s = self._clock.monotonic(), self._clock.unix_ns() / 1e9
        return [
            {
                "model": model,
                "role": finding.place.role,
                "resource": finding.place.resource,
                "said": said(finding),
                "since_unix_s": unix_s - (now_s - finding.since_s),
                "is_batch_only": finding.is_batch_only,
                "loads": [
                    {"role": place.role, "resource": place.resource, "load": round(load, 4)}
                    for place, load in finding.loads.items()
                ],
                "gains": [
                    {"role": gain.role, "share": round(gain.share, 4), "then": str(gain.then)} for gain in finding.gains
                ],
            }
            for model, finding in sorted(self._findings.items())
        ]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Returns what a scrape gets."""
        loads, bottleneck = families = self.describe()
        for model, snapshot in self._snapshots.items():
            for place, load in loads_of(snapshot).items():
                loads.add_metric((model, *place), load)
        for model, finding in self._findings.items():
            work = "batch" if finding.is_batch_only else "urgent"
            bottleneck.add_metric((model, *finding.place, work), 1)
        return families

    def describe(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        """Returns the names, for the registry."""
        whose = ("model", "role", "resource")
        return (
            GaugeMetricFamily(
                "tandem_resource_load_ratio",
                "Share of a role's time or pages that is taken, mean of its workers over 10 s: compute, link, pages.",
                labels=whose,
            ),
            GaugeMetricFamily(
                "tandem_bottleneck",
                "1 for what holds a model back: the role and its resource; work: batch where no other work runs.",
                labels=(*whose, "work"),
            ),
        )

    def _sample(self, member: Member, ready_ids: Set[str], now_s: float) -> _Sample:
        counts, load = member.session.counts, member.load
        # A worker tells of a link when it has just sent something, so that some bytes are always under way.
        links = [link for peer, link in member.session.links.items() if peer in ready_ids]
        booked = [min(1.0, link.underway_bytes / link.bytes_per_s) for link in links]
        taken = load.pages_used + load.pages_reserved + load.pages_promised
        return _Sample(
            now_s,
            None if counts is None else counts.step_s,
            self._fill(member),
            fmean(booked) if booked else 0.0,
            taken / load.pages_total if load.pages_total else 0.0,
        )

    def _count(self, now_s: float, busy_s: float) -> None:
        models: dict[str, Counter[str]] = {}
        for (model, service_class, state), number in self._population().items():
            counts = models.setdefault(model, Counter())
            counts["waiting"] += number * (state == "queued")
            counts["batch" if service_class == BATCH else "urgent"] += number
        for model, counts in models.items():
            moments = self._moments.setdefault(model, deque(maxlen=WINDOW_S + 1))
            moments.append(_Moment(now_s, busy_s, counts["waiting"], counts["urgent"], counts["batch"]))

    def _fill(self, member: Member) -> float | None:
        load = member.load
        if not load.running and not load.waiting_tokens:
            return None
        if member.record.role == "prefill" or load.waiting_tokens:
            return 1.0  # Prompts take all of a step's time.
        return _fill(load, member.record.max_running or MAX_BATCH, self._itl_target_s)


def _fill(load: WorkerLoad, most: int, itl_target_s: float | None) -> float:
    """Returns a decode worker's tokens a second over those with the largest batch that places and target allow.

    One that has not measured its steps is as full as its places.
    """
    if load.decode_speed is None:
        return load.running / most
    line, context = load.decode_speed, load.context_tokens / load.running
    batch = largest_batch(lambda _: line, most, context_tokens=context, step_target_s=itl_target_s)
    best = tokens_per_s(line, batch, context_tokens=context)
    return tokens_per_s(line, load.running, context_tokens=context) / best if best > 0 else 0.0


def _risen(before: float | None, now: float | None, passed_s: float) -> float | None:
    """Returns by how much a count rose per second; None: it is not counted, or no time has passed."""
    return None if before is None or now is None or passed_s <= 0 else (now - before) / passed_s
