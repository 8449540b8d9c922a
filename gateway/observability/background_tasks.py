"""Metrics of the background tasks of a gateway."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.runtime.background_tasks import BackgroundTasks


class BackgroundTaskMetrics(Collector):
    """Reads the number of failures when metrics are scraped."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics of one scrape."""
        (failures,) = self.describe()
        for name, number in self._tasks.num_failures.items():
            failures.add_metric((name,), number)
        return (failures,)

    def describe(self) -> tuple[CounterMetricFamily]:
        """Returns the metric without values, for the registry."""
        help_text = "Unexpected errors of background tasks. The gateway restarts the task after each."
        return (CounterMetricFamily("tandem_background_task_failures", help_text, labels=("task",)),)
