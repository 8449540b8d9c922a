import contextlib
import socket
import urllib.request

import pytest

from services.runtime import config
from services.runtime.errors import ConfigError
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
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text = response.read().decode()
    assert 'tandem_kv_pages{state="used",worker="w"} 2.0' in text
    assert 'tandem_kv_pages_promised{worker="w"} 3.0' in text
    metrics.close()
    metrics.close()
    with contextlib.closing(socket.create_server(("127.0.0.1", port))):
        pass  # another life of the worker may have the port
