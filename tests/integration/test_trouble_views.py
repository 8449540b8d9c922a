"""Each trouble of a real cluster stands in every view: /cluster, metrics, `tandem status`, `tandem doctor`, the log.

The cluster is of real processes and certificates. What needs links between machines is in `tests.machines.troubles`.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis

from cli.main import main
from services.runtime.tls import TlsFiles, client_context
from tests.certificates import Authority
from tests.faults.harness import FaultCluster, Program
from tests.waiting import HANG_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = HANG_LIMIT_S
RAW_LINE = re.compile(r"^[IWEF]\d{4} ")
"""As gRPC's core writes."""


class Watched:
    """A cluster and the five views of it."""

    def __init__(self, cluster: FaultCluster, ca: Path | None = None) -> None:
        self.cluster = cluster
        self._ca = ca
        self.url = ("http://" if ca is None else "https://") + cluster["gateway-0"].http

    def get(self, path: str) -> str:
        context = None if self._ca is None else client_context(None, None, self._ca)
        with urllib.request.urlopen(self.url + path, timeout=HANG_LIMIT_S, context=context) as answer:
            return str(answer.read().decode())

    def shown(self) -> Any:
        return json.loads(self.get("/cluster"))

    def troubles(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(trouble["kind"], trouble["subject"]): trouble for trouble in self.shown()["troubles"]}

    def until(self, holds: Callable[[], Any], what: str) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                if holds():
                    return
            except OSError as error:
                what = f"{what} ({error})"
            if time.monotonic() > end_s:
                pytest.fail(f"{what}: {self.last_look()}")
            time.sleep(0.1)

    def last_look(self) -> str:
        return f"{self.shown()}\n" + "\n".join(self.cluster.lines("gateway-0")[-20:])

    def until_troubles(self, *wanted: tuple[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
        self.until(lambda: set(self.troubles()) == set(wanted), f"the troubles are not {wanted}")
        return self.troubles()

    def run(self, command: str) -> tuple[int, str]:
        """Exit code and output, of this process: `doctor` imports torch to see that it can be, and takes seconds."""
        given, said = {} if self._ca is None else {"TANDEM_TLS_CA": str(self._ca)}, io.StringIO()
        with (
            mock.patch.dict(os.environ, given),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            return main([command, "--url", self.url]), said.getvalue()

    def log(self, kind: str, subject: str) -> list[dict[str, Any]]:
        """What the gateway has said of a trouble."""
        lines = [json.loads(line) for line in self.cluster.lines("gateway-0") if line.startswith("{")]
        return [line for line in lines if (line.get("kind"), line.get("subject")) == (kind, subject)]

    def check_views(self, kind: str, subject: str, *, words: str, remedy: str) -> None:
        """A trouble that stands in /cluster stands in the other views too, with cause and remedy."""
        trouble = self.troubles()[kind, subject]
        assert words in trouble["cause"]
        assert remedy in trouble["remedy"]
        assert abs(time.time() - trouble["since_unix_s"]) < 2 * TIMEOUT_S  # real time: a moment, not a duration
        assert re.search(rf'^tandem_troubles{{kind="{kind}"}} [1-9]', self.get("/metrics"), re.MULTILINE)
        for command, code in (("status", 0), ("doctor", 1)):
            found, text = self.run(command)
            assert f"{kind} {subject}: {trouble['cause']}" in text
            assert remedy in text
            assert "nothing is wrong" not in text
            assert found == code
        self.check_log(kind, subject, is_over=False)

    def check_over(self, kind: str, subject: str) -> None:
        """It stands nowhere any longer, and the log has said so once."""
        assert (kind, subject) not in self.troubles()
        self.check_log(kind, subject, is_over=True)

    def check_log(self, kind: str, subject: str, *, is_over: bool) -> None:
        """Each time that it began the log has one line, and one each time that it was over."""
        lines = self.log(kind, subject)
        assert [("remedy" in line, "lasted_s" in line) for line in lines] == [
            (number % 2 == 0, number % 2 == 1) for number in range(len(lines))
        ]
        assert len(lines) % 2 == (0 if is_over else 1)
        assert {line["level"] for line in lines} == {"warning"}


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    flags = {"gateway": ["--expect=decode=2"]}
    with FaultCluster(prefill=1, decode=2, kv_pages=64, flags=flags) as cluster:
        watched = Watched(cluster)
        watched.until(lambda: [one["state"] for one in watched.shown()["workers"]] == ["ready"] * 3, "not ready")
        yield watched


def test_nothing_is_wrong_where_nothing_is(watched: Watched) -> None:
    watched.until_troubles()
    shown = watched.shown()
    assert (shown["expected"], shown["gone"], shown["troubles"]) == ({"decode": 2}, [], [])
    code, text = watched.run("doctor")
    assert code == 0, text
    assert text.endswith("nothing is wrong\n")
    assert 'tandem_workers{role="decode",state="gone"} 0.0' in watched.get("/metrics")


def test_a_worker_that_vanished_is_gone_and_missing_until_it_is_back(watched: Watched) -> None:
    watched.until_troubles()
    watched.cluster.kill("decode-1")
    watched.until_troubles(("gone", "decode-1"), ("missing", "decode"))
    (gone,) = watched.shown()["gone"]
    assert (gone["id"], gone["role"]) == ("decode-1", "decode")
    assert json.loads(watched.get("/ready"))["status"] == "ready"
    metrics = watched.get("/metrics")
    assert 'tandem_workers{role="decode",state="gone"} 1.0' in metrics
    assert 'tandem_workers{role="decode",state="ready"} 1.0' in metrics
    assert 'tandem_expected_workers{role="decode"} 2.0' in metrics
    assert 'tandem_vanished_workers_total{role="decode"} 1.0' in metrics
    assert re.search(r"decode-1 +decode +gone", watched.run("status")[1])
    watched.check_views("gone", "decode-1", words="vanished without a word", remedy="look at its machine")
    watched.check_views("missing", "decode", words="1 of 2 decode workers are ready", remedy="start workers")
    watched.cluster.start("decode-1")
    watched.until_troubles()
    watched.check_over("gone", "decode-1")
    watched.check_over("missing", "decode")


def test_a_worker_that_left_in_order_is_not_missed(watched: Watched) -> None:
    watched.until_troubles()
    watched.cluster.kill("prefill-0", signal.SIGTERM)
    watched.until(lambda: len(watched.shown()["workers"]) == 2, "it does not leave")
    time.sleep(3 * 1.0)  # looks; what must not come has no condition to wait for
    assert (watched.shown()["gone"], watched.troubles()) == ([], {})
    watched.until(lambda: not watched.cluster["prefill-0"].is_alive, "it does not end")
    watched.cluster.start("prefill-0")
    watched.until(lambda: len(watched.shown()["workers"]) == 3, "it does not come back")


def test_a_worker_that_cannot_be_dialled_is_named_with_its_address(watched: Watched) -> None:
    watched.until_troubles()
    add_decode(watched.cluster, 2, "--advertise-host=127.0.0.2")
    watched.until_troubles(("unreachable", "decode-2"))
    (worker,) = (one for one in watched.shown()["workers"] if one["id"] == "decode-2")
    assert (worker["state"], worker["unreachable"]) == ("lost", "the connection is refused: nothing listens there")
    watched.check_views("unreachable", "decode-2", words=f"at {worker['address']}: ", remedy="--advertise-host")
    ended = [line for line in watched.cluster.lines("gateway-0") if "session ended" in line and "decode-2" in line]
    assert len(ended) == 1
    watched.cluster.kill("decode-2")
    watched.until_troubles()
    watched.check_over("unreachable", "decode-2")


def test_redis_that_refuses_is_told_from_redis_that_is_dead(watched: Watched) -> None:
    watched.until_troubles()
    with redis.Redis.from_url(watched.cluster.redis.url) as client:
        client.config_set("requirepass", "secret")
        try:
            client.client_kill_filter(_type="normal", skipme=True)
            watched.until(lambda: "password" in str(watched.troubles()), "Redis does not refuse")
            watched.check_views("redis", "redis", words="uthenticat", remedy="password")
        finally:
            client.config_set("requirepass", "")
    watched.until_troubles()
    watched.check_over("redis", "redis")
    before = len(watched.log("redis", "redis"))
    watched.cluster.redis.kill()
    watched.until_troubles(("redis", "redis"))
    assert "password" not in watched.troubles()["redis", "redis"]["remedy"]
    assert "tandem_redis_up 0.0" in watched.get("/metrics")
    watched.cluster.redis.start()
    watched.until_troubles()
    assert [line["message"] for line in watched.log("redis", "redis")[before:]] == [
        "Redis does not answer or denies commands; no worker can join",
        "Redis answers again",
    ]


def test_redis_that_throws_keys_away(watched: Watched) -> None:
    watched.until_troubles()
    with redis.Redis.from_url(watched.cluster.redis.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            watched.until_troubles(("storage", "maxmemory-policy"))
            watched.check_views("storage", "maxmemory-policy", words="allkeys-lru", remedy="noeviction")
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    watched.until_troubles()
    watched.check_over("storage", "maxmemory-policy")


def test_certificates_near_their_end_and_a_worker_without_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    short = authority.issue("short", roles=["gateway"], days=(-1, 5))
    long = authority.issue("long", roles=["prefill"])
    flags = {"gateway": tls_flags(short), "prefill": tls_flags(long)}
    with FaultCluster(prefill=1, decode=1, kv_pages=64, flags=flags) as cluster:
        watched = Watched(cluster, authority.path)
        watched.until_troubles(("certificate", "gateway"), ("unreachable", "decode-0"))
        watched.check_views("unreachable", "decode-0", words="does not speak TLS", remedy="--tls-cert")
        watched.check_views("certificate", "gateway", words="it expires in 5.0 days", remedy="renew it")
        for name in ("gateway-0", "decode-0"):
            assert not [line for line in cluster.lines(name) if RAW_LINE.match(line)]
        authority.issue("short", roles=["gateway"])
        watched.until_troubles(("unreachable", "decode-0"))
        authority.issue("long", roles=["prefill"], days=(-1, 2))
        watched.until_troubles(("certificate", "prefill-0"), ("unreachable", "decode-0"))


def test_a_certificate_for_another_name_ends_a_worker_at_its_start(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("other", roles=["decode"], hosts=["worker.example"])
    command = [sys.executable, "-m", "decode_worker", "--id=decode-0", f"--model={ROOT / 'demo' / 'model'}"]
    ended = subprocess.run(
        [*command, *tls_flags(files)], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 2
    assert "it is not for 127.0.0.1, which others connect to" in ended.stderr
    assert not [line for line in ended.stderr.splitlines() if RAW_LINE.match(line)]


def tls_flags(files: TlsFiles) -> list[str]:
    return [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]


def add_decode(cluster: FaultCluster, index: int, *flags: str) -> Program:
    """Starts one more decode worker."""
    own = [f"--id=decode-{index}", "--threads=1", "--kv-pages=64", f"--redis={cluster.redis.url}"]
    program = cluster._add("decode", index, [*own, f"--model={cluster.model}", *flags])
    cluster.start(program.name)
    return program
