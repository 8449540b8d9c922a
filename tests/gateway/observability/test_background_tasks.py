"""Failures of background tasks are on the metrics page."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from gateway.observability.background_tasks import BackgroundTaskMetrics


def test_each_task_has_its_own_counter():
    registry, num_failures = CollectorRegistry(), {}
    registry.register(BackgroundTaskMetrics(SimpleNamespace(num_failures=num_failures)))
    assert b"{task=" not in generate_latest(registry)
    num_failures.update(workers=3, session=1)
    page = generate_latest(registry).decode()
    assert 'tandem_background_task_failures_total{task="workers"} 3.0' in page
    assert 'tandem_background_task_failures_total{task="session"} 1.0' in page
