"""A batch whose gateway is killed in the middle: the restarted one continues, and every row has one answer."""

import collections
import json
import os
import re
import signal
import time
import urllib.request

import openai
import pytest

from benchmarks.cluster import running_cluster
from tests.free_ports import free_port
from tests.waiting import HANG_LIMIT_S

NUM_ROWS = 1000
KILL_AT = 400
ROWS_AT_ONCE = 16


def num_attempts(port):
    """What the decode worker was asked to compute, by how it ended."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_LIMIT_S) as response:
        text = response.read().decode()
    found = re.findall(r'^tandem_attempts_total\{outcome="(\w+)",[^}]*\} ([0-9.]+)$', text, re.MULTILINE)
    return {outcome: round(float(value)) for outcome, value in found if float(value)}


def watched(client, batch_id, holds, timeout_s=HANG_LIMIT_S):
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            batch = client.batches.retrieve(batch_id)
            if holds(batch):
                return batch
        except (openai.APIConnectionError, openai.InternalServerError):
            pass  # the gateway is being started again
        time.sleep(0.05)
    raise AssertionError(f"it did not come to that in {timeout_s} s")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_batch_outlives_a_killed_gateway_with_each_row_answered_once(monkeypatch):
    port = free_port()
    monkeypatch.setenv("TANDEM_METRICS_PORT", str(port))
    monkeypatch.setenv("TANDEM_BATCH_ROWS", str(ROWS_AT_ONCE))
    rows = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"def f{number}(", "max_tokens": 12, "temperature": 1.0, "seed": number},
        }
        for number in range(NUM_ROWS)
    ]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    with running_cluster(prefill=0, decode=1) as cluster:
        client = openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=("rows.jsonl", content), purpose="batch")
        began_s = time.monotonic()
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        before = watched(client, batch.id, lambda now: now.request_counts.completed >= KILL_AT)
        victim = cluster.gateway_pid()
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        at_once = watched(client, batch.id, lambda now: True).request_counts.completed
        assert cluster.gateway_pid() != victim
        watched(client, batch.id, lambda now: now.request_counts.completed > at_once)
        taken_over_s = time.monotonic()
        after = watched(client, batch.id, lambda now: now.status == "completed")
        ended_s = time.monotonic()
        results = [json.loads(line) for line in client.files.content(after.output_file_id).text.splitlines()]
        samples = {number: cluster.post("/v1/completions", rows[number]["body"]) for number in (0, KILL_AT, 999)}
        attempts = num_attempts(port)
    assert before.request_counts.total == NUM_ROWS
    assert (after.request_counts.completed, after.request_counts.failed) == (NUM_ROWS, 0)
    assert after.error_file_id is None
    times = collections.Counter(line["custom_id"] for line in results)
    assert times == {f"row-{number}": 1 for number in range(NUM_ROWS)}
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in results}
    for number, answer in samples.items():
        assert texts[f"row-{number}"] == answer["choices"][0]["text"]
    num_twice = sum(attempts.values()) - len(samples) - NUM_ROWS
    assert 0 <= num_twice <= ROWS_AT_ONCE
    print(  # noqa: T201 - the figures that were asked for
        f"{NUM_ROWS} rows in {ended_s - began_s:.1f} s, the gateway killed when {at_once} had results; the next result "
        f"{taken_over_s - killed_s:.1f} s later; {num_twice} rows computed twice; attempts at the worker: {attempts}"
    )
