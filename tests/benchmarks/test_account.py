"""What is read of a cluster's programs, and what a phase of them counts."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.account import CLIENT, CPU, GATEWAY, STEPS, TOKENS, Account, keep_account, read_counts, within
from benchmarks.cluster import Cluster

PAGES = {
    "/metrics": "process_cpu_seconds_total {n}.5\ntandem_queue_seconds_sum 99\n",
    "/a/metrics": 'process_cpu_seconds_total 2.0\ntandem_computed_tokens_total{{worker="a"}} {n}00\n'
    'tandem_step_seconds_sum{{worker="a"}} 0.25\ntandem_step_seconds_count{{worker="a"}} 7\n',
    "/b/metrics": 'process_cpu_seconds_total 3.0\ntandem_computed_tokens_total{{worker="b"}} 50\n',
}


class Programs(BaseHTTPRequestHandler):
    """A gateway and two decode workers, each of whose pages counts how often it was read."""

    reads: dict[str, int]

    def do_GET(self) -> None:
        self.reads[self.path] = n = self.reads.get(self.path, 0) + 1
        host = f"127.0.0.1:{cast('HTTPServer', self.server).server_port}"
        targets = f'[{{"targets": ["{host}/a", "{host}/b"], "labels": {{"role": "decode"}}}}]'
        body = (targets if self.path == "/metrics/targets" else PAGES[self.path].format(n=n)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    server = HTTPServer(("127.0.0.1", 0), type("Counting", (Programs,), {"reads": {}}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Cluster(f"http://127.0.0.1:{server.server_port}", "", cast("Any", None), Path())
    server.shutdown()
    thread.join()
    server.server_close()


def test_counters_of_workers_of_one_role_are_added_up_and_others_are_left_out(cluster: Cluster) -> None:
    counts = read_counts(cluster)
    assert counts.pop((CLIENT, CPU)) > 0
    assert counts == {
        (GATEWAY, CPU): 1.5,
        ("decode", CPU): 5.0,
        ("decode", TOKENS): 150.0,
        ("decode", STEPS): 0.25,
        ("decode", "tandem_step_seconds_count"): 7.0,
    }


def test_an_account_is_of_the_time_between_two_reads(cluster: Cluster) -> None:
    account = asyncio.run(keep_account(cluster, after_s=0.0, for_s=0.05))
    assert account.seconds >= 0.05
    assert account.counts[GATEWAY, CPU] == 1.0
    assert account.counts["decode", STEPS] == 0.0
    assert account.computed_tokens == 100.0


def test_figures_are_told_for_a_second_and_moments_count_that_lie_in_it() -> None:
    account = Account(10.0, 14.0, {("decode", TOKENS): 100.0, ("prefill", TOKENS): 60.0, (CLIENT, CPU): 2.0})
    assert account.figures() == {CLIENT: {CPU: 0.5}, "decode": {TOKENS: 25.0}, "prefill": {TOKENS: 15.0}}
    assert within(account, [9.9, 10.0, 13.9, 14.0]) == 2
