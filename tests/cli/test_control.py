import asyncio
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from cli.control import Fence, taking_orders
from services.runtime.clock import ManualClock
from services.runtime.errors import ConfigError, TandemError
from services.runtime.orders import NoLocalCluster, Refused, order, socket_path

URL = "http://127.0.0.1:4711"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


async def echo(asked: Any) -> Any:
    return {"said": asked["word"]}


async def refuse(asked: Any) -> Any:
    raise TandemError("not today")


def test_orders_of_an_autoscaler_that_acts_no_longer_are_refused() -> None:
    clock = ManualClock()
    now_s, fence = clock.monotonic(), Fence(clock)
    first = {"holder": "first", "since_s": now_s - 50.0, "until_s": now_s + 12.0}
    second = {"holder": "second", "since_s": now_s - 1.0, "until_s": now_s + 11.0}
    fence.check(None)
    fence.check(first)
    fence.check({**first, "until_s": now_s + 12.5})
    fence.check(second)
    with pytest.raises(TandemError, match=r"^second acts in place of this copy"):
        fence.check(first)
    fence.check(second)
    clock.advance(11.0)
    with pytest.raises(TandemError, match="its lease had ended"):
        fence.check(second)
    fence.check(None)
    fence.check({**first, "since_s": clock.monotonic(), "until_s": clock.monotonic() + 12.0})


async def test_an_order_comes_back_with_its_answer_or_its_refusal() -> None:
    path = socket_path(4711)
    async with taking_orders(path, {"echo": echo, "refuse": refuse}):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert await asyncio.to_thread(order, URL, "echo", word="é\n") == {"said": "é\n"}
        with pytest.raises(Refused, match="not today"):
            await asyncio.to_thread(order, URL, "refuse")
        for unknown in ("fly", "echo"):  # an order that is not known, and one without what it needs
            with pytest.raises(Refused, match="of another version"):
                await asyncio.to_thread(order, URL, unknown)
    assert not path.exists()


@pytest.mark.parametrize("line", [b"", b"nonsense\n", b"[]\n", b"3\n", b'"do"\n', b"x" * 3_000_000, b"\xff\n"])
async def test_nonsense_on_the_socket_harms_nobody(line: bytes) -> None:
    path = socket_path(4711)
    async with taking_orders(path, {"echo": echo}):

        def send() -> None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(path))
                try:
                    connection.sendall(line)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1000):
                        pass
                except ConnectionError:
                    pass

        await asyncio.to_thread(send)
        assert await asyncio.to_thread(order, URL, "echo", word="still here") == {"said": "still here"}


async def test_a_socket_that_a_killed_cluster_left_is_taken_over() -> None:
    path = socket_path(4711)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with taking_orders(path, {"echo": echo}):
        assert await asyncio.to_thread(order, URL, "echo", word=1) == {"said": 1}


@pytest.mark.parametrize(("url", "port"), [(URL, 4711), ("https://h", 443), ("http://h", 80)])
def test_without_a_cluster_the_error_names_the_port(url: str, port: int) -> None:
    with pytest.raises(NoLocalCluster, match=f"HTTP port {port} answers"):
        order(url, "echo")


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tandem").mkdir(mode=0o777)
    os.chmod(tmp_path / "tandem", 0o777)
    with pytest.raises(ConfigError, match="mode 0700"):
        socket_path(1)
    (tmp_path / "tandem").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "tandem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="mode 0700"):
        socket_path(1)
