"""Holders of shared memory, those that are given it, and processes that end, hang, lie or come at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.engine.weights import sharing
from services.engine.weights.sharing import Piece, Sharing, SharingFailed
from tests.waiting import HANG_LIMIT_S, wait_until

CHILD = """
import os, sys
from services.engine.weights.sharing import Piece, Sharing
share = Sharing(sys.argv[1])
pieces = share.join()
if pieces is None and sys.argv[2] != "hang":
    fd = os.memfd_create("test")
    os.write(fd, b"of " + str(os.getpid()).encode())
    share.offer([Piece(b"one", fd)])
print("first" if pieces is None else os.pread(pieces[0].fd, 100, 0).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> str:
    return f"tandem-test-{secrets.token_hex(8)}"


@pytest.fixture
def make(name: str) -> Iterator[Callable[[], Sharing]]:
    made = []

    def make_one() -> Sharing:
        made.append(Sharing(name))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def memory(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def contents(pieces: tuple[Piece, ...] | None) -> dict[bytes, bytes]:
    assert pieces is not None
    assert not any(os.get_inheritable(piece.fd) for piece in pieces)
    return {piece.description: os.pread(piece.fd, 100, 0) for piece in pieces}


class Child:
    """Another process with the name; it says whether it was the first, or what it was given."""

    def __init__(self, name: str, mode: str = "offer") -> None:
        command = [sys.executable, "-c", CHILD, name, mode]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()
        self.pid = self._process.pid

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.communicate()


@pytest.fixture
def start(name: str) -> Iterator[Callable[..., Child]]:
    children = []

    def start_one(mode: str = "offer") -> Child:
        children.append(Child(name, mode))
        return children[-1]

    yield start_one
    for child in children:
        child.end()


def await_heir(name: str) -> None:
    """Waits until a process has the name again. One that came before that would be the first of its own memory."""
    deadline_s = time.monotonic() + HANG_LIMIT_S
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            if sock.connect_ex(b"\0" + name.encode()) == 0:
                return
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_second_is_given_what_the_first_offers(make: Callable[[], Sharing]) -> None:
    first = make()
    assert first.join() is None
    first.offer([Piece(b"a", memory(b"one")), Piece(b"b" * 60_000, memory(b"two"))])
    for _ in range(3):
        assert contents(make().join()) == {b"a": b"one", b"b" * 60_000: b"two"}


def test_who_comes_while_it_is_made_waits(make: Callable[[], Sharing], monkeypatch: pytest.MonkeyPatch) -> None:
    told = 0
    give = sharing._give

    def count(peer: socket.socket, pieces: tuple[Piece, ...] | None) -> bool:
        nonlocal told
        told += 1
        return give(peer, pieces)

    monkeypatch.setattr(sharing, "SILENCE_S", HANG_LIMIT_S)
    monkeypatch.setattr(sharing, "WAIT_EVERY_S", 0.02)
    monkeypatch.setattr(sharing, "_give", count)
    first = make()
    assert first.join() is None
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(make().join) for _ in range(3)]
        wait_until(lambda: told > 20, "that the first process tells the others to wait, again and again")
        assert not any(one.done() for one in waiting)
        first.offer([Piece(b"a", memory(b"late"))])
        assert [contents(one.result(HANG_LIMIT_S)) for one in waiting] == [{b"a": b"late"}] * 3


def test_all_at_once_have_one_first(make: Callable[[], Sharing]) -> None:
    barrier = threading.Barrier(8)
    firsts = []

    def join() -> dict[bytes, bytes]:
        one = make()
        barrier.wait()
        pieces = one.join()
        if pieces is None:
            firsts.append(one)
            one.offer([Piece(b"a", memory(b"same"))])
            return {b"a": b"same"}
        return contents(pieces)

    with ThreadPoolExecutor(8) as pool:
        found = [one.result(HANG_LIMIT_S) for one in [pool.submit(join) for _ in range(8)]]
    assert found == [{b"a": b"same"}] * 8
    assert len(firsts) == 1


def test_where_the_first_gives_up_the_next_is_the_first(make: Callable[[], Sharing]) -> None:
    first, second = make(), make()
    assert first.join() is None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(second.join)
        time.sleep(0.2)
        first.close()
        assert waiting.result(HANG_LIMIT_S) is None
    second.offer([Piece(b"a", memory(b"mine"))])
    assert contents(make().join()) == {b"a": b"mine"}


def test_memory_outlives_the_process_that_made_it(
    make: Callable[[], Sharing], start: Callable[..., Child], name: str
) -> None:
    """Killed, and killed again: the last one hands it on, and none makes it a second time."""
    child = start()
    assert child.said == "first"
    expected = {b"one": f"of {child.pid}".encode()}
    held = [make() for _ in range(3)]
    assert [contents(one.join()) for one in held] == [expected] * 3
    child.end()
    for one in held[:2]:
        await_heir(name)
        assert start().said == f"of {child.pid}"
        one.close()
    await_heir(name)
    heir = start()
    assert heir.said == f"of {child.pid}"
    held[2].close()
    await_heir(name)
    assert contents(make().join()) == expected


def test_a_process_that_hangs_is_not_waited_for(
    make: Callable[[], Sharing], start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start("hang")
    assert child.said == "first"
    child.end(signal.SIGSTOP)
    monkeypatch.setattr(sharing, "SILENCE_S", 0.3)
    with pytest.raises(SharingFailed, match=r"said nothing for 0\.3 s"):
        make().join()


def test_another_users_process_is_neither_served_nor_believed(
    make: Callable[[], Sharing], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    assert first.join() is None
    first.offer([Piece(b"a", memory(b"mine"))])
    uid = os.getuid()
    monkeypatch.setattr(sharing, "_peer_uid", lambda sock: uid + 1)
    with pytest.raises(SharingFailed, match="another user"):
        make().join()
    # Only the one that serves thinks so:
    monkeypatch.setattr(sharing, "_peer_uid", lambda sock: uid + (threading.current_thread().name == "tandem-sharing"))
    monkeypatch.setattr(sharing, "_MAX_RETRIES", 3)
    with pytest.raises(SharingFailed, match="come and go"):
        make().join()


@pytest.mark.parametrize("reply", [b"nonsense", b"pieces", sharing._PIECES.pack(b"others", 1)])
def test_nonsense_is_not_taken_for_memory(
    make: Callable[[], Sharing], name: str, reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_MAX_RETRIES", 3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + name.encode())
        listener.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):  # the listener's end
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        peer.recv(100)
                        peer.send(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(SharingFailed):
            make().join()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_strangers_who_say_nothing_or_nonsense_disturb_nobody(make: Callable[[], Sharing], name: str) -> None:
    first = make()
    assert first.join() is None
    strangers = []
    for message in (None, b"x", b"y" * 4000, b"want"):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(b"\0" + name.encode())
        if message:
            stranger.send(message)
        strangers.append(stranger)
    strangers.pop().close()
    first.offer([Piece(b"a", memory(b"one"))])
    assert contents(make().join()) == {b"a": b"one"}
    for stranger in strangers:
        stranger.close()


def test_nothing_is_left_open(name: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    first, second, third = Sharing(name), Sharing(name), Sharing(name)
    first.join()
    first.offer([Piece(b"a", memory(b"one"))])
    second.join()
    first.close()
    await_heir(name)
    third.join()
    third.close()
    second.close()
    second.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [one for one in threading.enumerate() if one.name == "tandem-sharing"]


def test_who_cannot_take_the_name_now_tries_again(
    make: Callable[[], Sharing], name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make(), make()
    assert first.join() is None
    first.offer([Piece(b"a", memory(b"one"))])
    assert contents(second.join()) == {b"a": b"one"}
    monkeypatch.setattr(sharing, "WAIT_EVERY_S", 0.05)
    new_socket, failures = sharing._new_socket, [1] * 4

    def failing() -> socket.socket:
        if threading.current_thread().name == "tandem-sharing" and failures:
            failures.pop()
            raise SharingFailed("too many open files")
        return new_socket()

    monkeypatch.setattr(sharing, "_new_socket", failing)
    first.close()
    await_heir(name)
    assert not failures
    assert caplog.text.count("cannot be handed on now") == 1
    assert contents(make().join()) == {b"a": b"one"}


def test_who_does_not_read_keeps_nobody_waiting(
    make: Callable[[], Sharing], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "WAIT_EVERY_S", 0.001)
    first = make()
    assert first.join() is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stuck:
        stuck.connect(b"\0" + name.encode())
        stuck.send(b"want")
        time.sleep(1.0)  # its queue is full by then
        monkeypatch.setattr(sharing, "WAIT_EVERY_S", 0.1)
        monkeypatch.setattr(sharing, "SILENCE_S", HANG_LIMIT_S)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(make().join)
            time.sleep(0.3)
            first.offer([Piece(b"a", memory(b"one"))])
            assert contents(waiting.result(HANG_LIMIT_S)) == {b"a": b"one"}
