"""`tandem up --autoscale` with the real autoscaler, supervisor and Redis, over stand-ins for gateway and workers."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tests.cli.test_up as stand_ins
from cli.main import main
from planning.autoscaler.decisions import Look, read_log
from services.cluster.embedded_redis import EmbeddedRedis
from tests.cli.test_up import Cluster, wait_until
from tests.planning.autoscaler.copies import FREEZES, Copies, check_chain, copies_of
from tests.waiting import HANG_LIMIT_S

# Lists the workers that live, and counts requests at the rate that a file names since the gateway's start.
GATEWAY = """
import http.server, json, os, pathlib, sys, time
sys.path.insert(0, sys.argv[3])
from services.runtime.process import die_with_parent
from tests.planning.autoscaler.pages import metrics, worker
die_with_parent()
folder, port, ended, last_s = pathlib.Path(sys.argv[1]), int(sys.argv[2]), 0.0, time.monotonic()
def lives(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global ended, last_s
        now_s, rate = time.monotonic(), float((folder / "rate").read_text())
        ended, last_s = ended + rate * (now_s - last_s), now_s
        pids = {path.stem: int(path.read_text()) for path in sorted(folder.glob("*.pid"))}
        workers = [
            worker(name.split("-")[0], id=name, pid=pid) for name, pid in pids.items() if lives(pid)
        ]
        body = metrics(ended=ended) if self.path == "/metrics" else json.dumps({"workers": workers}).encode()
        self.send_response(200 if workers or self.path != "/ready" else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
SCALING = ("--scale-every=0.5", "--scale-start-up=1", "--scale-settle=1", "--scale-headroom=1")
LEASE_S = 2


def running(cluster: Cluster) -> set[str]:
    found = set()
    for file in cluster.folder.glob("*.pid"):
        try:
            state = Path(f"/proc/{file.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.add(file.stem)
    return found


def autoscalers(cluster: Cluster) -> list[int]:
    """The processes of the autoscaler that this cluster has started, the first one first."""
    return [int(pid) for pid in re.findall(r"autoscaler +loading \(pid (\d+)\)", cluster.errors.read_text())]


# The lease of a killed one lasts for 15 s.
@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_come_and_go_with_the_load_even_if_the_autoscaler_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_killed: bool
) -> None:
    monkeypatch.setattr(stand_ins, "GATEWAY", GATEWAY)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    rate: Callable[[str], int] = (tmp_path / "rate").write_text
    rate("0")
    logs = tmp_path / "logs"
    cluster = Cluster(tmp_path, "--autoscale=1:6", "--log-dir", str(logs), *SCALING)
    try:
        assert cluster.ready_line().startswith("ready ")
        wait_until(lambda: len(autoscalers(cluster)) == 1)
        assert running(cluster) == {"prefill-0", "decode-0"}
        rate("4")  # takes 2 prefill and 5 decode workers, more than there may be
        wait_until(lambda: len(running(cluster)) >= 4)
        if is_killed:
            os.kill(autoscalers(cluster)[0], signal.SIGKILL)
            wait_until(lambda: len(autoscalers(cluster)) == 2)
        wait_until(lambda: len(running(cluster)) == 6)
        time.sleep(1.5)
        assert len(running(cluster)) == 6, "the budget"
        if is_killed:
            os.kill(autoscalers(cluster)[1], signal.SIGKILL)
        rate("0")
        wait_until(lambda: running(cluster) == {"prefill-0", "decode-0"})
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.end() == 0
        wait_until(lambda: cluster.processes() == [])
    finally:
        cluster.process.kill()
        cluster.process.wait()
        assert cluster.process.stdout is not None
        cluster.process.stdout.close()
    looks = [record for record in read_log(logs / "decisions.jsonl") if isinstance(record, Look)]
    orders = [look for look in looks if look.done.startswith("ordered ")]
    assert len(orders) >= 2
    assert all("requests/s within" in look.decision.reason for look in orders)
    assert main(["autoscaler", "replay", str(logs / "decisions.jsonl")]) == 0
    assert f"{len(looks)} looks, 0 decided otherwise" in capsys.readouterr().out


@pytest.fixture
def two_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, Copies]]:
    """A cluster without an autoscaler of its own, and those beside it; the load is in the file `rate`."""
    monkeypatch.setattr(stand_ins, "GATEWAY", GATEWAY)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "rate").write_text("0")
    with EmbeddedRedis() as redis:
        cluster = Cluster(tmp_path, f"--redis={redis.url}")
        try:
            url = cluster.ready_line().split()[1].removeprefix("http=")
            flags = [f"--gateways={url}", f"--redis={redis.url}", "--max-workers=6", f"--lease={LEASE_S}", *SCALING]
            with copies_of(tmp_path, flags) as copies:
                yield cluster, copies
        finally:
            cluster.process.kill()
            cluster.process.wait()
            assert cluster.process.stdout is not None
            cluster.process.stdout.close()


def test_of_two_copies_one_acts_and_when_it_is_killed_the_other_one_does(two_copies: tuple[Cluster, Copies]) -> None:
    cluster, copies = two_copies
    # The second one looks more often, so that it sees first what is to be done, and must leave it to the first one.
    first = copies.start("first", "--scale-every=1.5")
    wait_until(lambda: first.acts)
    second = copies.start("second")
    wait_until(lambda: second.waits and len(second.looks()) > 0)
    (cluster.folder / "rate").write_text("4")
    wait_until(lambda: len(first.orders()) > 0)
    wait_until(lambda: any("acts" in look.done for look in second.looks()))
    first.kill()
    assert second.orders() == []
    wait_until(lambda: second.acts)
    wait_until(lambda: len(running(cluster)) == 6)
    again = copies.start("first")
    wait_until(lambda: again.waits)
    (cluster.folder / "rate").write_text("0")
    wait_until(lambda: running(cluster) == {"prefill-0", "decode-0"})
    orders = check_chain((first, second), first="1:1")
    assert orders[0] == first.orders()[0]
    assert orders[-1] == second.orders()[-1]
    assert again.orders() == first.orders()
    for copy in (first, second):
        assert main(["autoscaler", "replay", str(copy.decisions)]) == 0


def test_a_copy_that_was_frozen_before_its_order_does_not_give_it_any_more(two_copies: tuple[Cluster, Copies]) -> None:
    cluster, copies = two_copies
    first = copies.start("first", program=FREEZES)
    wait_until(lambda: first.acts)
    second = copies.start("second", "--max-workers=4")
    wait_until(lambda: second.waits)
    (cluster.folder / "rate").write_text("4")
    wait_until(lambda: first.is_frozen)
    wait_until(lambda: second.acts)
    wait_until(lambda: len(running(cluster)) == 4)
    first.send(signal.SIGCONT)
    wait_until(lambda: any(look.done.startswith(("failed", "ordered")) for look in first.looks()))
    wait_until(lambda: first.waits)
    assert first.orders() == []
    stale = next(look for look in first.looks() if look.done.startswith("failed"))
    assert "its lease had ended" in stale.done
    assert len(running(cluster)) == 4
    check_chain((first, second), first="1:1")


def test_copies_with_one_file_of_decisions_are_told_so(two_copies: tuple[Cluster, Copies]) -> None:
    _, copies = two_copies
    first = copies.start("first")
    wait_until(lambda: first.acts)
    same = copies.start("first")
    assert same.process.wait(HANG_LIMIT_S) == 2
    assert "give each copy a file of its own (--decisions)" in same.log.read_text()


def test_limits_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--autoscale", "3:2"]) == 2
    assert main(["up", "--autoscale", "1:1"]) == 2
    said = capsys.readouterr().err
    assert "MIN:MAX, two whole numbers of at least 1" in said
    assert "MAX must be at least 2" in said
