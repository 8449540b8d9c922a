"""Runs the gateway with a probe in its event loop and sessions of simulated workers, for `gateway_soak`.

The probe measures the longest pauses of the loop, in its own CPU time. The sessions lead to the workers' real session
server, in this process and without gRPC; messages are serialized as with it.
"""

import asyncio
import json
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn, Self

import grpc

from benchmarks.fake_worker import FakeWorkers
from benchmarks.soak_workers import SIMULATED
from gateway import __main__ as program
from gateway.assembly import Gateway
from protos import worker_pb2
from services.runtime import process, rpc
from services.runtime.errors import TandemError
from worker.sessions import Reports, SessionServer

STEP_S, TOKENS_PER_STEP = 0.02, 4
TICK_S = 0.005
WRITE_S = 1.0
LONG_S = 0.03
"""CPU time after which a pause is long enough for its stack to be sampled."""
MAX_STACKS = 20


class Probe:
    """Measures the CPU time of the loop's thread between ticks. A callback that takes long delays the next tick."""

    def __init__(self, file: Path, *, explains: bool) -> None:
        self._file = file
        self._clock_id = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.get_ident()
        self._last_s = self._written_s = time.thread_time()
        self._written_at_s = time.monotonic()
        self._max_s = 0.0
        self._stacks: list[str] = []
        if explains:
            threading.Thread(target=self._sample, daemon=True).start()

    def tick(self) -> None:
        """Notes the time since the last tick, and comes back."""
        now_s = time.thread_time()
        self._max_s = max(self._max_s, now_s - self._last_s)
        if time.monotonic() - self._written_at_s >= WRITE_S:
            row = {"max_ms": 1e3 * self._max_s, "cpu_s": now_s - self._written_s, "stacks": self._stacks}
            with self._file.open("a") as opened:
                opened.write(json.dumps(row) + "\n")
            self._max_s, self._stacks = 0.0, []
            self._written_at_s, self._written_s = time.monotonic(), now_s
        self._last_s = time.thread_time()
        asyncio.get_running_loop().call_later(TICK_S, self.tick)

    def _sample(self) -> None:
        while True:
            time.sleep(0.01)
            if time.clock_gettime(self._clock_id) - self._last_s < LONG_S or len(self._stacks) >= MAX_STACKS:
                continue
            frames = traceback.extract_stack(sys._current_frames()[self._thread])
            ours = [f"{Path(frame.filename).stem}.{frame.name}:{frame.lineno}" for frame in frames[-8:]]
            self._stacks.append(" > ".join(ours))


class _LocalChannel:
    """Leads to the session server of a simulated worker, as a gRPC channel does."""

    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Returns what opens a stream."""
        kind: Any = worker_pb2.PrefillCommands if "Prefill" in path else worker_pb2.DecodeCommands

        def copy(message: Any) -> Any:
            return kind.FromString(request_serializer(message))

        return lambda **_: _LocalStream(self._sessions, copy, response_deserializer)


class _LocalStream:
    """A stream to a session server. Implements what sessions use of gRPC's."""

    def __init__(self, sessions: SessionServer, copy: Any, deserialize: Any) -> None:
        self._commands: asyncio.Queue[Any] = asyncio.Queue()
        self._events = sessions.serve(self._iterate())
        self._copy, self._deserialize = copy, deserialize

    async def write(self, message: Any) -> None:
        """Sends commands."""
        self._commands.put_nowait(self._copy(message))

    async def read(self) -> Any:
        """Returns the next events, or EOF."""
        try:
            return self._deserialize((await anext(self._events)).SerializeToString())
        except (StopAsyncIteration, TandemError):
            return grpc.aio.EOF

    def cancel(self) -> None:
        """Ends the commands, which ends the session."""
        self._commands.put_nowait(None)

    async def _iterate(self) -> AsyncIterator[Any]:
        while (command := await self._commands.get()) is not None:
            yield command


class SimulatedWorkers:
    """The session servers of all simulated workers, each made when it is first connected to."""

    def __init__(self) -> None:
        self._swarm = FakeWorkers(STEP_S, TOKENS_PER_STEP)
        self._servers: dict[str, SessionServer] = {}
        self._steps: asyncio.Task[None] | None = None
        self._make_channel, self._prove = rpc.make_channel, rpc.prove

    def install(self) -> None:
        """Makes sessions to simulated workers lead here."""
        rpc.make_channel = self._channel  # type: ignore[assignment]
        rpc.prove = self._proof

    def _channel(self, address: str, **options: Any) -> Any:
        if not address.endswith(SIMULATED):
            return self._make_channel(address, **options)
        server = self._servers.get(address)
        if server is None:
            swarm = self._swarm
            server = self._servers[address] = SessionServer(
                incarnation=address.removesuffix(SIMULATED),
                handlers={"prefill": swarm.compute, "admit": swarm.admit, "cancel": swarm.cancel},
                reports=Reports(swarm.load, counts=lambda: worker_pb2.WorkerCounts(step_s=0.0)),
                on_session_closed=swarm.close,
            )
            swarm.prefill = swarm.decode = server  # sends the events of all
        if self._steps is None:
            self._steps = asyncio.create_task(self._swarm.step_forever())
        return _LocalChannel(server)

    async def _proof(self, channel: Any, method: str, *, incarnation: str) -> Any:
        if isinstance(channel, _LocalChannel):
            return None
        return await self._prove(channel, method, incarnation=incarnation)


class ProbedGateway(Gateway):
    """A gateway whose event loop runs a probe."""

    file = Path()
    explains = False

    async def start(self) -> None:
        """Starts the probe, and then the gateway."""
        SimulatedWorkers().install()
        Probe(self.file, explains=self.explains).tick()
        await super().start()


def main() -> NoReturn:
    """The program: FILE, `explain` or `measure`, and then the flags of `python -m gateway`."""
    ProbedGateway.file, ProbedGateway.explains = Path(sys.argv[1]), sys.argv[2] == "explain"
    ProbedGateway.file.touch()
    program.Gateway = ProbedGateway  # type: ignore[misc]
    sys.argv[1:] = sys.argv[3:]
    process.run(program.main)


if __name__ == "__main__":
    main()
