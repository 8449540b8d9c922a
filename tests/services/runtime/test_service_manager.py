"""What a service manager is told, over a real socket."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.runtime import service_manager
from tests.waiting import HANG_LIMIT_S


class Manager:
    """The manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(10)

    def heard(self) -> list[str]:
        return self.socket.recv(4096).decode().splitlines()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@tandem-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    manager = Manager(address)
    with manager.socket:
        yield manager


def test_what_is_told(manager: Manager) -> None:
    service_manager.tell_status("loading\nREADY=1")
    assert manager.heard() == ["STATUS=loading READY=1"]
    service_manager.tell_ready("listening")
    assert manager.heard() == ["READY=1", "STATUS=listening"]
    service_manager.ask_for_time(90.5)
    assert manager.heard() == ["EXTEND_TIMEOUT_USEC=90500000"]
    service_manager.tell_stopping("draining")
    assert manager.heard() == ["STOPPING=1", "STATUS=draining"]


async def test_the_watchdog_hears_the_loop_and_not_a_loop_that_hangs(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    beat = asyncio.create_task(service_manager.keep_watchdog())
    for _ in range(3):
        assert await asyncio.to_thread(manager.heard) == ["WATCHDOG=1"]
    beat.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beat


@pytest.mark.parametrize(("usec", "pid"), [("", ""), ("0", ""), ("x", ""), ("1000", "1")])
async def test_no_watchdog_or_anothers_is_not_fed(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, usec: str, pid: str
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid)
    await asyncio.wait_for(service_manager.keep_watchdog(), HANG_LIMIT_S)
    manager.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.heard()


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1", "/nowhere/at/all"])
def test_without_a_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    service_manager.tell_ready("listening")


def test_a_manager_that_does_not_read_holds_nothing_up_for_long(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_manager, "SEND_TIMEOUT_S", 0.01)
    for _ in range(10_000):
        service_manager.tell_status("x")
        if caplog.records:
            break
    assert "cannot be told" in caplog.text


def test_children_do_not_speak_for_their_parent() -> None:
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "HOME": "/"}
    service_manager.hide_from_children(environment)
    assert environment == {"HOME": "/"}
