"""Both ends of the sessions with simulated workers, over one Unix socket, for `gateway_soak`.

The gateway's end replaces gRPC's channel and stream for addresses of simulated workers. The workers' end connects the
socket to real session servers in another process. Messages are serialized as with gRPC.
"""

import asyncio
import contextlib
import itertools
import random
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import grpc

from benchmarks.fake_worker import FakeWorkers
from protos import worker_pb2
from services.runtime import rpc
from services.runtime.errors import TandemError
from worker.sessions import Reports, SessionLimits, SessionServer

SIMULATED = ".simulated:1"
"""Suffix of the address of a simulated worker. The prefix is the worker's incarnation."""
STEP_S, TOKENS_PER_STEP = 0.02, 4
FRAMES_PER_TURN = 64
"""Maximum number of messages per turn of the event loop.

One read from the shared socket may contain messages of 1,000 sessions. Real sessions have a connection each.
"""
_HEADER = struct.Struct(">II")


class _Frames(asyncio.Protocol):
    """A protocol of frames. Each frame has a stream number and a message. An empty message ends the stream."""

    def __init__(self, take: Callable[[int, bytes], None]) -> None:
        self._take = take
        self._data = b""
        self._is_parsing = False
        """Whether `_parse` is scheduled."""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        is_parsing = self._is_parsing
        self._data += data
        if not is_parsing:
            self._parse()

    def _parse(self) -> None:
        data, at, num_frames = self._data, 0, 0
        self._is_parsing = False
        while len(data) - at >= _HEADER.size:
            number, size = _HEADER.unpack_from(data, at)
            end = at + _HEADER.size + size
            if end > len(data):
                break
            if num_frames == FRAMES_PER_TURN:
                self._is_parsing = True
                asyncio.get_running_loop().call_soon(self._parse)
                break
            self._take(number, data[at + _HEADER.size : end])
            at, num_frames = end, num_frames + 1
        self._data = data[at:]

    def send(self, number: int, message: bytes) -> None:
        """Sends a frame."""
        self._transport.write(_HEADER.pack(number, len(message)) + message)


class GatewayEnd:
    """Redirects this process's sessions with simulated workers to the socket."""

    def __init__(self) -> None:
        self.frames: Any = None
        self.streams: dict[int, asyncio.Queue[bytes]] = {}
        self.numbers = itertools.count(1)
        self._make_channel, self._prove = rpc.make_channel, rpc.prove

    async def install(self, socket: Path) -> None:
        """Connects, and replaces `rpc.make_channel` and `rpc.prove`."""
        loop = asyncio.get_running_loop()
        while self.frames is None:
            with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):  # it does not listen yet
                _, self.frames = await loop.create_unix_connection(lambda: _Frames(self._take), str(socket))
            await asyncio.sleep(0.1)
        rpc.make_channel = self._channel  # type: ignore[assignment]
        rpc.prove = self._proof

    def _take(self, number: int, message: bytes) -> None:
        if number in self.streams:
            self.streams[number].put_nowait(message)

    def _channel(self, address: str, **options: Any) -> Any:
        if not address.endswith(SIMULATED):
            return self._make_channel(address, **options)
        return _Channel(self, address.removesuffix(SIMULATED))

    async def _proof(self, channel: Any, method: str, *, incarnation: str) -> Any:
        return None if isinstance(channel, _Channel) else await self._prove(channel, method, incarnation=incarnation)


class _Channel:
    """Implements the part of a gRPC channel that sessions use."""

    def __init__(self, end: GatewayEnd, incarnation: str) -> None:
        self._end, self._incarnation = end, incarnation

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Returns a function that opens a stream."""
        first = f"{'prefill' if 'Prefill' in path else 'decode'} {self._incarnation}".encode()
        return lambda **_: _Stream(self._end, first, request_serializer, response_deserializer)


class _Stream:
    """Implements the part of a gRPC stream that sessions use."""

    def __init__(self, end: GatewayEnd, first: bytes, serialize: Any, deserialize: Any) -> None:
        self._end, self._number = end, next(end.numbers)
        self._serialize, self._deserialize = serialize, deserialize
        self._events = end.streams[self._number] = asyncio.Queue()
        end.frames.send(self._number, first)

    async def write(self, message: Any) -> None:
        """Sends commands."""
        self._end.frames.send(self._number, self._serialize(message))

    async def read(self) -> Any:
        """Returns the next events, or EOF."""
        raw = await self._events.get()
        return self._deserialize(raw) if raw else grpc.aio.EOF

    def cancel(self) -> None:
        """Ends the stream."""
        if self._end.streams.pop(self._number, None) is not None:
            self._end.frames.send(self._number, b"")


class WorkersEnd:
    """Serves the sessions of all simulated workers. The first connection to a worker creates its server."""

    def __init__(self) -> None:
        self._swarm = FakeWorkers(STEP_S, TOKENS_PER_STEP)
        self._servers: dict[bytes, SessionServer] = {}
        self._streams: dict[int, asyncio.Queue[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._frames: Any = None

    async def listen(self, socket: Path) -> None:
        """Starts to listen."""
        self._listening = await asyncio.get_running_loop().create_unix_server(self._connected, str(socket))

    def _connected(self) -> _Frames:
        self._frames = _Frames(self._take)
        return self._frames

    def _take(self, number: int, message: bytes) -> None:
        if number in self._streams:
            self._streams[number].put_nowait(message)
            return
        if not message:
            return
        role, _, incarnation = message.partition(b" ")
        self._streams[number] = asyncio.Queue()
        task = asyncio.create_task(self._serve(number, role, self._server(incarnation)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _server(self, incarnation: bytes) -> SessionServer:
        server, swarm = self._servers.get(incarnation), self._swarm
        if server is None:
            server = self._servers[incarnation] = SessionServer(
                incarnation=incarnation.decode(),
                handlers={"prefill": swarm.compute, "admit": swarm.admit, "cancel": swarm.cancel},
                reports=Reports(swarm.load, counts=lambda: worker_pb2.WorkerCounts(step_s=0.0)),
                on_session_closed=swarm.close,
                limits=SessionLimits(beat_s=random.uniform(0.9, 1.0)),  # so that beats do not come together
            )
            if swarm.decode is None:
                swarm.prefill = swarm.decode = server  # sends the events of all
                self._tasks.add(asyncio.create_task(swarm.step_forever()))
        return server

    async def _serve(self, number: int, role: bytes, server: SessionServer) -> None:
        kind: Any = worker_pb2.PrefillCommands if role == b"prefill" else worker_pb2.DecodeCommands
        with contextlib.suppress(TandemError):
            async for events in server.serve(self._commands(number, kind)):
                self._frames.send(number, events.SerializeToString())
        self._frames.send(number, b"")
        del self._streams[number]

    async def _commands(self, number: int, kind: Any) -> AsyncIterator[Any]:
        while raw := await self._streams[number].get():
            yield kind.FromString(raw)
