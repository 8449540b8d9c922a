"""When this process's certificate ends, for Prometheus."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.runtime import rpc


class CertificateEnd(Collector):
    """To be registered; looks at the process's identity for each scrape. Without TLS there is no figure."""

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """What a scrape gets."""
        (end,) = self.describe()
        identity = rpc.identity()
        if identity is not None:
            end.add_metric((), identity.end_unix_s())
        return (end,)

    def describe(self) -> tuple[GaugeMetricFamily]:
        """The name, for the registry."""
        what = "When the TLS certificate of this process expires, in seconds since 1970."
        return (GaugeMetricFamily("tandem_tls_certificate_end_timestamp_seconds", what),)
