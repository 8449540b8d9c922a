"""Counters and histograms for places that every token passes, and figures that every process has. Knows no service.

prometheus_client takes a lock and, for a histogram, walks through the buckets each time: 1.18 us for a token's count
and its gap, where the plain numbers here take 0.23 us (`python -m benchmarks.metrics`). It keeps the figures that are
read at a scrape only, such as those of the process, which it already has. Here one thread writes plain numbers and any
thread may read them for a scrape, so an update is an addition. What a scrape reads may be one update older in one
number than in another, never a torn one.
"""

import platform
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.runtime import logs, rpc, telemetry
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.version import version

Child = TypeVar("Child")


def process_registry(program: str) -> CollectorRegistry:
    """Returns a registry with what every process shows: its build, its use of the machine, its spans, its certificate.

    `program` is the program's name, such as `gateway`. From now on no counter or histogram of this process has a
    series with the time at which it was created: they double the series of a page, and no query asks for them.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotations there
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for figures in (BuildInfo(program), SpanCounts(), LostLogLines(), CertificateEnd()):
        registry.register(figures)
    return registry


class Count:
    """One counter. Add to `value`; never take away."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Exemplar(NamedTuple):
    """One observed value, the trace in which it was seen, and when, in seconds since 1970."""

    trace_id: str
    value: float
    unix_s: float

    def __str__(self) -> str:
        return f' # {{trace_id="{self.trace_id}"}} {float(self.value)!r} {self.unix_s:.3f}'


class Distribution:
    """One histogram: how many of what was observed were at most each bound, and their sum.

    `exemplars` holds the last exemplar of a bucket by its number.
    """

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float) -> None:
        """Takes a value in the unit of the bounds."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_often(self, value: float, times: int) -> None:
        """Takes a value that was seen this often."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def exemplify(self, value: float, trace_id: str) -> None:
        """Has a value that was observed lead to its trace, until another one of its bucket does.

        Nothing happens without a `trace_id`, which is 32 hex digits of a trace that is recorded.
        """
        if trace_id:
            exemplar = Exemplar(trace_id, value, SYSTEM_CLOCK.unix_ns() / 1e9)
            self.exemplars[bisect_left(self.bounds, value)] = exemplar

    def cumulative(self) -> list[int]:
        """Returns how many were at most each bound, and finally the number of all."""
        return list(accumulate(self.counts))


class FastRegistry:
    """The families of one page, in the order in which they were made."""

    def __init__(self) -> None:
        self._families: dict[str, _Family[Count] | _Family[Distribution]] = {}

    def add(self, family: "_Family[Count] | _Family[Distribution]") -> None:
        """Shows a family from now on. Raises ValueError if its name is taken."""
        if self._families.setdefault(family.name, family) is not family:
            raise ValueError(f"there is a {family.name} already")

    def text(self, *, is_openmetrics: bool = False) -> bytes:
        """Returns all of them in Prometheus' text format, or in that of OpenMetrics without its last line."""
        return "".join([family.text(is_openmetrics=is_openmetrics) for family in self._families.values()]).encode()


class _Family(ABC, Generic[Child]):
    """Children by the values of their labels; look one up once and keep it.

    Its text costs a few microseconds a child, since the names of its lines are made once: a page is made on the event
    loop, where prometheus_client's way, an object for each line, would hold up every stream for tens of milliseconds.
    """

    kind: str

    def __init__(self, name: str, words: str, labels: Sequence[str]) -> None:
        self.name = name
        self._words = words.replace("\\", r"\\").replace("\n", r"\n")
        self._labels = tuple(labels)
        self._children: dict[tuple[str, ...], tuple[Child, list[str]]] = {}
        """With the names of its lines."""

    def labels(self, *values: str) -> Child:
        """Returns the child with these values, in the labels' order. Raises ValueError for another number of them."""
        known = self._children.get(values)
        if known is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self.name} has the labels {self._labels}")
            said = [f'{label}="{_escaped(value)}"' for label, value in zip(self._labels, values, strict=True)]
            known = self._children[values] = self._make(), self._names(said)
        return known[0]

    def text(self, *, is_openmetrics: bool = False) -> str:
        """Returns the family's lines. Only OpenMetrics has exemplars, and names counters without `_total`."""
        title = self.name if is_openmetrics else self._title
        words = self._words.replace('"', r"\"") if is_openmetrics else self._words
        lines = [f"# HELP {title} {words}\n# TYPE {title} {self.kind}\n"]
        for child, names in list(self._children.values()):
            lines += self._lines_with_exemplars(child, names) if is_openmetrics else self._lines(child, names)
        return "".join(lines)

    @property
    def _title(self) -> str:
        return self.name

    def _lines_with_exemplars(self, child: Child, names: list[str]) -> list[str]:
        return self._lines(child, names)

    @abstractmethod
    def _make(self) -> Child: ...

    @abstractmethod
    def _names(self, said: list[str]) -> list[str]: ...

    @abstractmethod
    def _lines(self, child: Child, names: list[str]) -> list[str]: ...


class Counts(_Family[Count]):
    """A counter by labels; its samples get `_total` at the end of their name."""

    kind = "counter"

    def __init__(self, name: str, words: str, labels: Sequence[str], registry: FastRegistry) -> None:
        super().__init__(name, words, labels)
        registry.add(self)

    @property
    def _title(self) -> str:
        return f"{self.name}_total"

    def total(self) -> float:
        """Returns the sum of all children."""
        return sum([child.value for child, _ in list(self._children.values())])

    def _make(self) -> Count:
        return Count()

    def _names(self, said: list[str]) -> list[str]:
        return [_name(f"{self.name}_total", said)]

    def _lines(self, child: Count, names: list[str]) -> list[str]:
        return [f"{names[0]} {float(child.value)!r}\n"]


class Distributions(_Family[Distribution]):
    """A histogram by labels. `bounds` rise; the last one, infinity, is added."""

    kind = "histogram"

    def __init__(
        self, name: str, words: str, labels: Sequence[str], registry: FastRegistry, *, bounds: Sequence[float]
    ) -> None:
        super().__init__(name, words, labels)
        self._bounds = tuple(bounds)
        self._limits = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        registry.add(self)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The bounds of the buckets, without infinity."""
        return self._bounds

    def totals(self) -> list[int]:
        """Returns the count of each bucket over all children; the last one is of values beyond the last bound."""
        counts = [child.counts for child, _ in list(self._children.values())]
        return [sum(column) for column in zip(*counts, strict=True)] or [0] * (len(self._bounds) + 1)

    def _make(self) -> Distribution:
        return Distribution(self._bounds)

    def _names(self, said: list[str]) -> list[str]:
        # Sorted, as prometheus_client has them.
        buckets = [_name(f"{self.name}_bucket", sorted([*said, f'le="{limit}"'])) for limit in self._limits]
        return [*buckets, _name(f"{self.name}_count", said), _name(f"{self.name}_sum", said)]

    def _lines(self, child: Distribution, names: list[str]) -> list[str]:
        total, counts = child.sum, child.cumulative()
        figures = [f"{name} {count}.0\n" for name, count in zip(names, [*counts, counts[-1]], strict=False)]
        return [*figures, f"{names[-1]} {float(total)!r}\n"]

    def _lines_with_exemplars(self, child: Distribution, names: list[str]) -> list[str]:
        lines = self._lines(child, names)
        for bucket, exemplar in list(child.exemplars.items()):
            lines[bucket] = f"{lines[bucket][:-1]}{exemplar}\n"
        return lines


def _name(name: str, said: Sequence[str]) -> str:
    return f"{name}{{{','.join(sorted(said))}}}" if said else name


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class BuildInfo(Collector):
    """To be registered; says which version of which program this is, and on which Python it runs."""

    def __init__(self, program: str) -> None:
        self._program = program

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Returns what a scrape gets."""
        (info,) = self.describe()
        info.add_metric((self._program, version(), platform.python_version()), 1)
        return (info,)

    def describe(self) -> tuple[GaugeMetricFamily]:
        """Returns the name, for the registry."""
        labels = ("program", "version", "python")
        return (GaugeMetricFamily("tandem_build_info", "1 for what runs: program and versions.", labels=labels),)


class SpanCounts(Collector):
    """To be registered; reads `telemetry.counts` for each scrape."""

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Returns what a scrape gets."""
        exported, dropped = self.describe()
        num_exported, num_dropped = telemetry.counts()
        exported.add_metric((), num_exported)
        dropped.add_metric((), num_dropped)
        return exported, dropped

    def describe(self) -> tuple[CounterMetricFamily, CounterMetricFamily]:
        """Returns the names, for the registry."""
        return (
            CounterMetricFamily("tandem_spans_exported", "Spans that the collector has taken."),
            CounterMetricFamily("tandem_spans_dropped", "Spans that did not fit into the queue or were not taken."),
        )


class LostLogLines(Collector):
    """Log lines that this process could not write, read from `services.runtime.logs` at each scrape."""

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Returns the number for a scrape."""
        (lost,) = self.describe()
        lost.add_metric((), logs.lost.count)
        return (lost,)

    def describe(self) -> tuple[CounterMetricFamily]:
        """Returns the name, for the registry."""
        text = "Log lines that could not be written, for example because the disk is full."
        return (CounterMetricFamily("tandem_lost_log_lines", text),)


class CertificateEnd(Collector):
    """To be registered; looks at the process's identity for each scrape. Without TLS there is no figure."""

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Returns what a scrape gets."""
        (end,) = self.describe()
        identity = rpc.identity()
        if identity is not None:
            end.add_metric((), identity.end_unix_s())
        return (end,)

    def describe(self) -> tuple[GaugeMetricFamily]:
        """Returns the name, for the registry."""
        what = "When the TLS certificate of this process expires, in seconds since 1970."
        return (GaugeMetricFamily("tandem_tls_certificate_end_timestamp_seconds", what),)
