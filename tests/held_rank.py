"""A rank that stops at its first step until a test releases it: `services.engine.parallel.rank` with a gate."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from services.engine.parallel import group
from services.engine.parallel.processes import RankProcesses
from services.engine.parallel.rank import _serve, run_rank
from tests.waiting import HANG_LIMIT_S

LIMIT_S = HANG_LIMIT_S
"""Longest wait for the other side of the gate, in seconds."""
_SETTING = "TANDEM_TEST_HELD_RANK"


class Gate:
    """The test's side of the gate."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._rank: socket.socket | None = None

    def wait_until_held(self) -> None:
        """Returns once the rank has stopped."""
        self._rank, _ = self._listener.accept()

    def release(self) -> None:
        """Lets the rank continue. May be called again."""
        if self._rank is not None:
            self._rank.close()


@contextlib.contextmanager
def held_rank(rank: int, *, is_after_its_part: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Stops `rank` of the workers that are loaded inside the context, before its first write or after its last one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        monkeypatch.setenv(_SETTING, f"{rank} {int(is_after_its_part)} {listener.getsockname()[1]}")
        monkeypatch.setattr(group, "RankProcesses", lambda num: RankProcesses(num, program="tests.held_rank"))
        gate = Gate(listener)
        try:
            yield gate
        finally:
            gate.release()


def _serve_held(rank: int, commands: socket.socket) -> None:
    from services.engine.parallel.decoder import ShardedDecoder

    held, is_after_its_part, port = map(int, os.environ[_SETTING].split())
    name = "_end" if is_after_its_part else "_begin"
    method = getattr(ShardedDecoder, name)

    def hold(*args: object) -> object:
        setattr(ShardedDecoder, name, method)
        result = method(*args)
        with socket.create_connection(("127.0.0.1", port)) as gate:
            gate.recv(1)
        return result

    if rank == held:
        setattr(ShardedDecoder, name, hold)
    _serve(rank, commands)


if __name__ == "__main__":
    run_rank(sys.argv[1:], _serve_held)
