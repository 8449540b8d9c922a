"""Two doctors try the way between them with the channels of workers; one of the ways is a slow line."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli import preflight
from cli.findings import Level
from cli.main import main
from cli.preflight import PreflightSettings
from protos import link_pb2, link_pb2_grpc
from tests.free_ports import free_port
from tests.waiting import HANG_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


class SlowLine:
    """Passes what comes to its port on to another one, at a given rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.target = 0
        self._bytes_per_s = bytes_per_s
        self._open = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self._open += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(16 * 1024):
                time.sleep(len(data) / self._bytes_per_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for one in self._open:
            one.close()


class Doctor:
    """A process that answers other doctors."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "cli.main", "doctor", "--serve", "0", *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def __enter__(self) -> "Doctor":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        code = self.process.wait(HANG_LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert code == 0


def link(peer: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[Any]]:
    code = main(["doctor", "--preflight", "--peer", peer, "--json", *flags])
    found = json.loads(capsys.readouterr().out)
    return code, [finding for finding in found if finding["subject"] == "link"]


def test_pages_travel_between_doctors_and_a_line_that_is_slow_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = SlowLine(5e6)
    line.target = free_port()
    with Doctor("--transfer-port", str(line.target), "--advertise-transfer-port", str(line.port)) as doctor:
        code, (finding,) = link(doctor.address, capsys, "--transport", "tcp")
        assert (code, finding["level"]) == (1, "bad")
        assert "0.1 GB/s are needed" in finding["what"]
        for transport, floor in (("tcp", 100_000), ("shm", preflight.LINK_FLOOR_BYTES_PER_S)):
            fast = PreflightSettings(peer=doctor.address, transport=transport, link_floor=floor)
            findings = list(preflight.way_to(fast))
            assert [finding.level for finding in findings] == [Level.OK], (transport, findings)
        with grpc.insecure_channel(doctor.address) as channel, pytest.raises(grpc.RpcError, match="takes no pages"):
            next(link_pb2_grpc.LinkStub(channel).Connect(iter([link_pb2.LinkMessage()]), timeout=HANG_LIMIT_S))
    line.close()


def test_a_peer_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    code, (finding,) = link(address, capsys)
    assert (code, "nothing listens there" in finding["what"]) == (1, True)


def test_a_doctor_says_where_it_can_be_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--serve", "0", "--host", "0.0.0.0"]) == 2
    assert "--advertise-host" in capsys.readouterr().err
