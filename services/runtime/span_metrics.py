"""Spans that left this process and spans that were lost, for Prometheus. Knows no trace."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from services.runtime import telemetry


class SpanCounts(Collector):
    """To be registered; reads `telemetry.counts` for each scrape."""

    def collect(self) -> Iterable[CounterMetricFamily]:
        """What a scrape gets."""
        exported, dropped = self.describe()
        num_exported, num_dropped = telemetry.counts()
        exported.add_metric((), num_exported)
        dropped.add_metric((), num_dropped)
        return exported, dropped

    def describe(self) -> tuple[CounterMetricFamily, CounterMetricFamily]:
        """The names, for the registry."""
        return (
            CounterMetricFamily("tandem_spans_exported", "Spans that the collector has taken."),
            CounterMetricFamily("tandem_spans_dropped", "Spans that did not fit into the queue or were not taken."),
        )
