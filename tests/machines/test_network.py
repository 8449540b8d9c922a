"""Machines with a link between them, as programs on them see it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.faults.harness import REPOSITORY
from tests.machines.link import Conditions
from tests.machines.network import Machine, Network, NotPermitted

SERVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 8000))
print("listens", flush=True)
connection, _ = server.accept()
connection.recv(65536)
time.sleep(float(sys.argv[2]))
connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 4\\r\\n\\r\\ntrue")
connection.recv(1)
"""
CLIENT = """
import asyncio, sys
from tests.faults.client import http_json
print(asyncio.run(http_json(f"{sys.argv[1]}:8000", "/", timeout_s=10.0)))
"""
FORGETS_AFTER_S, ANSWERS_AFTER_S = 1.5, 3.0


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network(["client", "server"]) as made:
            yield made
    except NotPermitted as error:
        pytest.skip(f"machines cannot be made here: {error}")


def on(machine: Machine, program: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a Python program on a machine."""
    command = ["nsenter", f"--net={machine.path}", sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_firewall_that_forgets_loses_no_answer_that_a_client_waits_for(network: Network) -> None:
    network.set(["client"], ["server"], Conditions(forgets_after_s=FORGETS_AFTER_S))
    here, there = network.machines["client"], network.machines["server"]
    with on(there, SERVER, there.address, ANSWERS_AFTER_S) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listens\n"
            began_s = time.monotonic()
            with on(here, CLIENT, there.address) as client:
                told, errors = client.communicate(timeout=30)
            assert (told, client.returncode) == ("True\n", 0), errors
            assert time.monotonic() - began_s > ANSWERS_AFTER_S
        finally:
            server.kill()
