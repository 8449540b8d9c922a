"""The machines' network: a process that makes a namespace and a device for each and carries packets between them.

`python -m tests.machines.network NAME …` prints the namespaces as JSON, then takes lines of JSON that change links.
Everything ends with it, and it ends with the process that started it: namespaces have no names that could stay behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from services.runtime import process
from tests.machines.link import Conditions, Firewall, Link

SUBNET, SPACING = "10.77.0", 16
MTU = 9000
"""Large packets: this process carries each by hand, and is not to be what limits a link of 1 Gbit/s."""
START_TIMEOUT_S = 20.0
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MAX_READ = 256


class NotPermitted(Exception):
    """Namespaces or their devices cannot be made here; the text says which."""


@dataclass
class Machine:
    """One namespace. `path` is what `setns` opens."""

    name: str
    address: str
    path: str

    @property
    def silent_address(self) -> str:
        """The next address, which no machine has.

        Addresses are spaced so that `getaddrinfo`, which prefers the longest prefix in common, keeps the order of both.
        """
        head, _, number = self.address.rpartition(".")
        return f"{head}.{int(number) + 1}"


@dataclass
class Network:
    """The process of the network, as the program that started it sees it."""

    names: Sequence[str]
    machines: dict[str, Machine] = field(default_factory=dict)

    def __enter__(self) -> Network:
        environment = dict(os.environ, **{process.DIE_WITH_PARENT_ENV: str(os.getpid())})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.machines.network", *self.names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            answer = self._answer()
            if "error" in answer:
                raise NotPermitted(answer["error"])
            self.machines = {name: Machine(name, address, path) for name, address, path in answer["machines"]}
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def set(self, sources: Sequence[str], targets: Sequence[str], conditions: Conditions, *, both: bool = True) -> None:
        """Changes the links from each source to each target, and the way back unless `both` is False."""
        self._order(sources=list(sources), targets=list(targets), both=both, conditions=asdict(conditions))

    def isolate(self, name: str, conditions: Conditions, *, inwards: bool = True, outwards: bool = True) -> None:
        """Changes all links of a machine."""
        others = [other for other in self.names if other != name]
        if outwards:
            self.set([name], others, conditions, both=False)
        if inwards:
            self.set(others, [name], conditions, both=False)

    def reset(self) -> None:
        """All links are plain again."""
        self.set(self.names, self.names, Conditions())

    def counts(self) -> dict[str, tuple[int, int]]:
        """Packets passed and dropped, by 'source>target'."""
        return {key: (passed, dropped) for key, passed, dropped in self._order(count=True)["counts"]}

    def _order(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_TIMEOUT_S)[0]:
            raise RuntimeError("the network does not answer")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the network ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def enter(path: str) -> None:
    """Moves this thread into a namespace, and with it what it starts and the sockets that it opens."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns failed")
    finally:
        os.close(fd)


class _Relay:
    """Carries packets. One thread, one loop; orders come on standard input."""

    def __init__(self, machines: Mapping[str, tuple[str, int]]) -> None:
        self._fds = {name: fd for name, (_, fd) in machines.items()}
        self._by_address = {socket.inet_aton(address): name for name, (address, _) in machines.items()}
        self._links = {(a, b): Link(random.Random(f"{a} {b}")) for a in machines for b in machines if a != b}
        self._firewall = Firewall()
        self._buffer = b""

    def run(self) -> None:
        poll = select.poll()
        by_fd = {fd: name for name, fd in self._fds.items()}
        for fd in (0, *by_fd):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll(self._wait_ms()):
                if fd == 0:
                    if not self._obey():
                        return
                else:
                    self._take(by_fd[fd])
            now_s = time.monotonic()
            for (_, target), link in self._links.items():
                if link.next_s is not None:
                    for packet in link.due(now_s):
                        self._give(target, packet)

    def _wait_ms(self) -> float | None:
        due = [link.next_s for link in self._links.values() if link.next_s is not None]
        return max(0.0, (min(due) - time.monotonic()) * 1000) if due else None

    def _take(self, source: str) -> None:
        now_s = time.monotonic()
        for _ in range(_MAX_READ):
            try:
                packet = os.read(self._fds[source], 65536)
            except BlockingIOError:
                return
            target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is None or target == source:
                continue
            link = self._links[source, target]
            memory_s = link.conditions.forgets_after_s
            if memory_s and not self._firewall.lets_through(packet, memory_s, now_s):
                link.num_dropped += 1
            elif link.conditions.is_plain and link.next_s is None:
                link.num_passed += 1
                self._give(target, packet)
            else:
                link.put(packet, now_s)

    def _give(self, target: str, packet: bytes) -> None:
        try:
            os.write(self._fds[target], packet)
        except (BlockingIOError, OSError):  # its queue is full, or the device is down: a router drops it too
            return

    def _obey(self) -> bool:
        piece = os.read(0, 65536)
        if not piece:
            return False
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order.get("count"):
                counts = [(f"{a}>{b}", link.num_passed, link.num_dropped) for (a, b), link in self._links.items()]
                _say({"counts": counts})
                continue
            for source in order["sources"]:
                for target in order["targets"]:
                    for pair in ((source, target), (target, source)) if order["both"] else ((source, target),):
                        if pair in self._links:
                            self._links[pair].change(Conditions(**order["conditions"]), time.monotonic())
            _say({})
        return True


def _make_machine(number: int) -> tuple[str, int, int]:
    """A process that holds a namespace with one device; its address, the device, and the process's id."""
    address = f"{SUBNET}.{SPACING * number}"
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.environ[process.DIE_WITH_PARENT_ENV] = str(parent)
            process.die_with_parent()
            ours.close()
            _hold_namespace(theirs, address)
            status = 0
        except BaseException as error:  # noqa: BLE001 - the root of a process
            theirs.sendall(f"{error}".encode())
        finally:
            os._exit(status)
    theirs.close()
    message, fds, _, _ = socket.recv_fds(ours, 4096, 1)
    if not fds:
        raise NotPermitted(message.decode() or "a namespace could not be made")
    os.set_blocking(fds[0], False)
    return address, fds[0], pid


def _hold_namespace(theirs: socket.socket, address: str) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET) failed")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"net0", _IFF_TUN | _IFF_NO_PI))
    for command in (
        "link set lo up",
        f"addr add {address}/24 dev net0",
        f"link set net0 mtu {MTU} txqueuelen 5000 up",
    ):
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=10)
    socket.send_fds(theirs, [b"made"], [tun])
    os.close(tun)
    while True:
        signal.pause()


def _say(answer: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> None:
    """The program."""
    process.die_with_parent()
    machines: dict[str, tuple[str, int]] = {}
    paths = []
    try:
        for number, name in enumerate(sys.argv[1:], 1):
            address, fd, pid = _make_machine(number)
            machines[name] = (address, fd)
            paths.append((name, address, f"/proc/{pid}/ns/net"))
    except (NotPermitted, OSError) as error:
        _say({"error": str(error)})
        return
    _say({"machines": paths})
    _Relay(machines).run()


if __name__ == "__main__":
    main()
