"""What holds each model back now: a sample of all workers each second, and the judgement of the last seconds of them.

Workers count the seconds in which they compute; how full decode workers are follows from the law of their steps, which
says what they would do with the largest batch. The judgement itself is `services.scheduling.bottleneck`.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
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
"""Samples, one a second, whose means are judged."""
MAX_BATCH = 256
"""The largest batch of a decode worker that does not say it."""
BATCH = ServiceClass.BATCH.name.lower()


class _Sample(NamedTuple):
    """One worker at one moment. `fill`: what it does of what it could while it computes; None: it has no work."""

    at_s: float
    step_s: float | None
    fill: float | None
    link: float
    pages: float


class _Moment(NamedTuple):
    """One model's answers, and what the gateway's thread had done, at one moment."""

    at_s: float
    busy_s: float
    waiting: int
    urgent: int
    batch: int


class BottleneckWatch(Collector):
    """To be registered. `look` is called each second, in the thread whose work `busy_s` tells.

    `members` are all workers, `population` all answers by model, class and state. `itl_target_s` limits batches.
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
        self._samples: dict[tuple[str, str], deque[_Sample]] = {}
        """By id and incarnation."""
        self._moments: dict[str, deque[_Moment]] = {}
        self._judges: dict[str, Judge] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._findings: dict[str, Finding] = {}

    def look(self) -> None:
        """Takes a sample of everything, and judges."""
        now_s = self._clock.monotonic()
        ready = [member for member in self._members() if member.state is WorkerState.READY]
        self._sample(ready, now_s)
        self._count(now_s, self._busy_s())
        for model, moments in self._moments.items():
            snapshot = self._snapshots[model] = Snapshot(
                workers=[self._use(member) for member in ready if member.record.model == model],
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

    def _sample(self, ready: Sequence[Member], now_s: float) -> None:
        samples, self._samples = self._samples, {}
        ready_ids = {member.record.id for member in ready}
        for member in ready:
            key, counts, load = _key(member), member.session.counts, member.load
            kept = self._samples[key] = samples.get(key) or deque(maxlen=WINDOW_S + 1)
            links = [link for peer, link in member.session.links.items() if peer in ready_ids]
            # A worker tells of a link when it has just sent something, so that some bytes are always under way.
            booked = [min(1.0, link.underway_bytes / link.bytes_per_s) for link in links]
            taken = load.pages_used + load.pages_reserved + load.pages_promised
            kept.append(
                _Sample(
                    now_s,
                    None if counts is None else counts.step_s,
                    self._fill(member),
                    fmean(booked or [0.0]),
                    taken / load.pages_total if load.pages_total else 0.0,
                )
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

    def _use(self, member: Member) -> WorkerUse:
        samples = self._samples[_key(member)]
        first, last = samples[0], samples[-1]
        fills = [sample.fill for sample in samples if sample.fill is not None]
        busy = _risen(first.step_s, last.step_s, last.at_s - first.at_s)
        if busy is None:
            busy = len(fills) / len(samples)
        link, pages = fmean(sample.link for sample in samples), fmean(sample.pages for sample in samples)
        if member.record.role == "prefill":
            return WorkerUse("prefill", busy, link, pages)
        return WorkerUse("decode", min(1.0, busy) * fmean(fills or [0.0]), link, pages)


def _key(member: Member) -> tuple[str, str]:
    return member.record.id, member.record.incarnation


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
