import contextlib
import socket
import urllib.request

import pytest

from services.runtime import config
from services.runtime.errors import ConfigError
from tests.waiting import HANG_LIMIT_S
from worker.config import WorkerConfig
from worker.metrics import Load, WorkerMetrics

REQUIRED = ["--id", "prefill-0", "--model", "/models/some"]


def test_metrics_can_be_scraped() -> None:
    def load() -> Load:
        return Load(8, 5, 0, 1, 2, promised_pages=3)

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        settings = config.load(WorkerConfig, [*REQUIRED, f"--metrics-port={port}"], prog="test", environ={})
        with pytest.raises(ConfigError, match="--metrics-port"):
            WorkerMetrics(worker_id="w").serve(settings, load)
    metrics = WorkerMetrics(worker_id="w")
    assert metrics.serve(settings, load) == f"127.0.0.1:{port}"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_LIMIT_S) as response:
        text = response.read().decode()
    assert 'tandem_kv_pages{state="used",worker="w"} 2.0' in text
    assert 'tandem_kv_pages_promised{worker="w"} 3.0' in text
    metrics.close()
    metrics.close()
    with contextlib.closing(socket.create_server(("127.0.0.1", port))):
        pass  # another life of the worker may have the port


def test_pulls_are_counted_by_what_became_of_them() -> None:
    metrics = WorkerMetrics(worker_id="w")
    metrics.note_pull(num_tokens=800, num_bytes=64_000)
    metrics.note_pull(num_tokens=0, num_bytes=0)
    metrics.note_pull(num_tokens=0, num_bytes=0)
    value = metrics.registry.get_sample_value
    assert value("tandem_pulls_total", {"worker": "w", "outcome": "fetched"}) == 1
    assert value("tandem_pulls_total", {"worker": "w", "outcome": "computed"}) == 2
    assert value("tandem_pulled_bytes_total", {"worker": "w"}) == 64_000
