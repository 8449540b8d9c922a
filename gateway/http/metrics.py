"""What clients hold of the gateway over HTTP, for Prometheus: connections, and memory for bodies."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.http.bodies import Bodies
from gateway.http.connections import Connections


class HttpUse(Collector):
    """To be registered; looks at both for each scrape."""

    def __init__(self, connections: Connections, bodies: Bodies) -> None:
        self._connections = connections
        self._bodies = bodies

    def collect(self) -> Iterable[Metric]:
        """Returns what a scrape gets."""
        connections, bodies = self._connections, self._bodies
        num_open, num_cut, num_bytes, num_refused = self.describe()
        num_open.add_metric((), connections.num_open)
        num_cut.add_metric(("idle",), connections.num_ended)
        num_cut.add_metric(("new",), connections.num_refused)
        num_bytes.add_metric(("bodies",), bodies.num_bytes)
        num_bytes.add_metric(("unread",), connections.unread.num_bytes)
        num_bytes.add_metric(("pipelined",), connections.later.num_bytes)
        for whose in ("tenant", "all"):
            num_refused.add_metric((whose,), bodies.num_refused[whose])
        return num_open, num_cut, num_bytes, num_refused

    def describe(self) -> tuple[GaugeMetricFamily, CounterMetricFamily, GaugeMetricFamily, CounterMetricFamily]:
        """Returns the names, for the registry."""
        return (
            GaugeMetricFamily("tandem_http_connections", "Connections of the HTTP API now."),
            CounterMetricFamily(
                "tandem_http_connections_cut",
                "Connections ended because there were too many: idle ones for new ones, new ones where none was idle.",
                labels=("which",),
            ),
            GaugeMetricFamily(
                "tandem_http_request_bytes",
                "Memory that requests take now: bodies, what of them was not asked for yet, requests before their "
                "turn.",
                labels=("what",),
            ),
            CounterMetricFamily(
                "tandem_body_refusals",
                "Bodies that found no room, by whose share was used up: tenant, all.",
                labels=("whose",),
            ),
        )
