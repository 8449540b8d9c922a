"""What the model-server protocol of Kubernetes' inference gateways asks for, under vLLM's names, which they know.

A gateway is one model server: its endpoint picker chooses between gateways, and never sees a worker.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

Population = Mapping[tuple[str, str, str], int]
"""(model, service class, `queued` or `running`) → answers now, zeros included."""


class ModelServer(Collector):
    """To be registered. `kv_use` gives the taken share of the KV pages of each of these models."""

    def __init__(
        self, population: Callable[[], Population], kv_use: Callable[[Iterable[str]], Mapping[str, float]]
    ) -> None:
        self._population = population
        self._kv_use = kv_use

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Returns what a scrape gets."""
        waiting, running, use = families = self.describe()
        numbers: Counter[tuple[str, str]] = Counter()
        for (model, _, state), number in self._population().items():
            numbers[model, state] += number
        for model, share in self._kv_use(sorted({model for model, _ in numbers})).items():
            waiting.add_metric((model,), numbers[model, "queued"])
            running.add_metric((model,), numbers[model, "running"])
            use.add_metric((model,), share)
        return families

    def describe(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
        """Returns the names, for the registry."""
        labels = ("model_name",)
        return (
            GaugeMetricFamily("vllm:num_requests_waiting", "Answers of a model that wait for workers.", labels=labels),
            GaugeMetricFamily("vllm:num_requests_running", "Answers of a model that workers have.", labels=labels),
            GaugeMetricFamily(
                "vllm:kv_cache_usage_perc",
                "Share of the KV pages of a model's decode workers that is taken, from 0 to 1.",
                labels=labels,
            ),
        )
