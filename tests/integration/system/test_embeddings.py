"""Embeddings of a whole cluster: those of `transformers`, and the same bits when a worker is killed with its texts."""

import base64
import os
import re
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cluster import Cluster, running_cluster
from tests.waiting import HANG_LIMIT_S

VARIANT = "qwen3-tied-bias"
NUM_TEXTS = 120
WAIT_S = HANG_LIMIT_S


def vectors(cluster: Cluster, texts: list[list[int]]) -> list[bytes]:
    answer = cluster.post("/v1/embeddings", {"input": texts, "encoding_format": "base64"})
    return [base64.b64decode(one["embedding"]) for one in answer["data"]]


def num_sent(cluster: Cluster, worker_id: str) -> float:
    """How many texts the gateway has given to a worker."""
    sample = rf'^tandem_sent_attempts_total\{{role="prefill",worker="{worker_id}"\}} (\S+)'
    found = re.search(sample, cluster.get_text("/metrics"), re.M)
    return float(found[1]) if found else 0.0


@pytest.mark.slow
def test_a_killed_prefill_worker_changes_no_bit(
    checkpoint: Any, reference: Any, random_ids: Any, wait_until_idle: Any
) -> None:
    texts = [random_ids(1 + number % 90, seed=number) for number in range(NUM_TEXTS)]
    flags = ("--embeddings", "on", "--dtype", "float32", "--chunk-tokens", "32", "--kv-memory", "64MiB")
    with running_cluster(*flags, model=checkpoint(VARIANT), prefill=2, decode=1) as cluster:
        undisturbed = vectors(cluster, texts)
        workers = [worker for worker in cluster.get("/cluster")["workers"] if worker["role"] == "prefill"]
        doomed = workers[0]
        before = num_sent(cluster, doomed["id"])
        # A stopped worker keeps what it was given, so that it has texts when it dies.
        os.kill(doomed["pid"], signal.SIGSTOP)
        found: list[list[bytes]] = []
        asking = threading.Thread(target=lambda: found.append(vectors(cluster, texts)))
        asking.start()
        deadline_s = time.monotonic() + WAIT_S
        while num_sent(cluster, doomed["id"]) == before:
            assert time.monotonic() < deadline_s, "no text was given to the worker"
            time.sleep(0.02)
        os.kill(doomed["pid"], signal.SIGKILL)
        asking.join(WAIT_S)
        assert found == [undisturbed]
        metrics = cluster.get_text("/metrics")
        assert re.search(r'^tandem_retries_total\{reason="worker_lost"\} [1-9]', metrics, re.M)
        wait_until_idle(cluster)
    for text, vector in zip(texts, undisturbed, strict=True):
        with torch.no_grad():
            state = reference(VARIANT).model(torch.tensor([text])).last_hidden_state[0, -1].double()
        assert np.frombuffer(vector, "<f4") == pytest.approx((state / state.norm()).numpy(), abs=1e-5)
