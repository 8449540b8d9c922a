"""What it costs that processes prove their cluster's secret, and that pages are encrypted.

    python -m benchmarks.membership [--rounds 200] [--frames 256]

A session is opened up to the worker's first message, on a connection that exists, with and without the proof in
turn; a Link's opening does the same. Signing and checking are the functions alone. A channel carries frames of 1 MiB
from one thread to another of this process over 127.0.0.1, plain and encrypted in turn. Medians, and the best rate; the
processor's time is that of both ends, which a busy machine changes least.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kv_transfer.transports.base import ChannelKey, ReceiveChannel, RingSpec, SendChannel, Transport
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tls import TlsTransport
from protos import worker_pb2, worker_pb2_grpc
from services.runtime import rpc
from services.runtime.membership import Guard, Member, is_signed, sign_record
from services.runtime.tls import Identity
from tests.certificates import Authority
from worker.sessions import Reports, SessionServer

METHOD = "/tandem.v1.DecodeWorker/Session"
INCARNATION = "a" * 32
RING = RingSpec(8, 1 << 20)
RECORD_BYTES = 1000


class _Worker(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self) -> None:
        self.sessions = SessionServer(
            incarnation=INCARNATION,
            handlers={},
            reports=Reports(worker_pb2.WorkerLoad),
            on_session_closed=lambda _: None,
        )

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepEvents]:
        async for events in self.sessions.serve(request_iterator):
            yield events


async def sessions(rounds: int) -> dict[str, float]:
    """Median seconds of opening a session, without and with a proof."""
    taken: dict[str, list[float]] = {"without a proof": [], "with a proof": []}
    held = (secrets.token_bytes(32),)
    servers: dict[str, rpc.RpcServer] = {}
    channels: dict[str, grpc.aio.Channel] = {}
    for name, member in (("without a proof", None), ("with a proof", Member(lambda: held, "gateway"))):
        rpc.set_member(member)
        servers[name] = rpc.make_server(["tandem.v1.DecodeWorker"], incarnation=INCARNATION)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(_Worker(), servers[name].server)
        channels[name] = rpc.make_channel(f"127.0.0.1:{await servers[name].start('127.0.0.1', 0)}")
    for number in range(rounds):
        for name, channel in channels.items():
            rpc.set_member(Member(lambda: held, "gateway") if name == "with a proof" else None)
            started_s = time.perf_counter()
            call = await _open(channel, f"{number:032x}")
            taken[name].append(time.perf_counter() - started_s)
            call.cancel()
    for name in servers:
        await channels[name].close()
        await servers[name].stop(0)
    return {name: statistics.median(each) for name, each in taken.items()}


async def _open(channel: grpc.aio.Channel, gateway: str) -> Any:
    proof = await rpc.prove(channel, METHOD, incarnation=INCARNATION)
    call: Any = worker_pb2_grpc.DecodeWorkerStub(channel).Session(metadata=rpc.metadata_of(proof))
    await rpc.check_answer(proof, call)
    hello = worker_pb2.SessionHello(gateway_incarnation=gateway, worker_incarnation=INCARNATION)
    await call.write(worker_pb2.DecodeCommands(commands=[worker_pb2.DecodeCommand(hello=hello)]))
    await call.read()
    return call


def functions(rounds: int) -> dict[str, float]:
    """Median seconds of the cryptography alone."""
    held = (secrets.token_bytes(32),)
    guard, member = Guard(lambda: held, incarnation=INCARNATION), Member(lambda: held, "gateway")
    record = secrets.token_bytes(RECORD_BYTES)
    signature = sign_record(held, "c", record)

    def prove() -> None:
        proof = member.proof_for(METHOD, INCARNATION, guard.challenge())
        proof.check(guard.check(METHOD, dict(proof.metadata)))

    return {
        "both sides of a proof": _median(prove, rounds),
        "signing a record": _median(lambda: sign_record(held, "c", record), rounds),
        "checking a record": _median(lambda: is_signed(held, "c", record, signature), rounds),
    }


def _median(call: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started_s)
    return statistics.median(taken)


def channels(num_frames: int) -> dict[str, tuple[float, float, float]]:
    """Median seconds of opening a channel, its best rate in bytes per second, and the least processor time per byte."""
    with tempfile.TemporaryDirectory() as folder:
        identity = Identity(Authority(Path(folder)).issue("worker", roles=["decode"]))
        kinds: list[Transport] = [TcpTransport(), TlsTransport(identity)]
        found: dict[str, list[tuple[float, float, float]]] = {kind.name: [] for kind in kinds}
        for _ in range(5):
            for kind in kinds:
                found[kind.name].append(_measure(kind, num_frames))
    return {
        name: (statistics.median(row[0] for row in each), max(row[1] for row in each), min(row[2] for row in each))
        for name, each in found.items()
    }


def _measure(kind: Transport, num_frames: int) -> tuple[float, float, float]:
    listener = kind.listen("127.0.0.1", 0)
    key = ChannelKey(secrets.token_bytes(16), secrets.token_bytes(32), b"")
    opening = listener.expect(key, RING)
    started_s = time.perf_counter()
    sender, receiver = kind.open(listener.address, key, RING, timeout_s=5), opening.result(5)
    opening_s = time.perf_counter() - started_s
    assert isinstance(sender, SendChannel)
    assert isinstance(receiver, ReceiveChannel)
    page = np.random.default_rng(1).integers(0, 256, RING.slot_bytes, dtype=np.uint8)

    def post() -> None:
        for seq in range(num_frames):
            sender.post(seq, bytes(16), [page], timeout_s=10)

    with ThreadPoolExecutor(1) as threads:
        started_s, computed_s = time.perf_counter(), time.process_time()
        posting = threads.submit(post)
        for _ in range(num_frames):
            frame = receiver.poll(timeout_s=10)
            assert frame is not None
            receiver.release(frame.slot)
        posting.result()
        num_bytes = num_frames * RING.slot_bytes
        rate = num_bytes / (time.perf_counter() - started_s)
        computed_s = (time.process_time() - computed_s) / num_bytes
    for end in (sender, receiver):
        end.shutdown()
        end.close()
    listener.close()
    return opening_s, rate, computed_s


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.membership", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="sessions of each kind")
    parser.add_argument("--frames", type=int, default=256, help="frames of 1 MiB that a channel carries each time")
    arguments = parser.parse_args()
    write = sys.stdout.write
    for name, taken_s in asyncio.run(sessions(arguments.rounds)).items():
        write(f"session {name:24} {taken_s * 1e3:8.2f} ms\n")
    for name, taken_s in functions(10 * arguments.rounds).items():
        write(f"{name:32} {taken_s * 1e6:8.1f} us\n")
    for name, (opening_s, rate, computed_s) in channels(arguments.frames).items():
        write(
            f"channel {name:8} opened in {opening_s * 1e3:6.2f} ms, {rate / 1e6:8.0f} MB/s, "
            f"{computed_s * 1e9:.2f} s of a core per GB\n"
        )


if __name__ == "__main__":
    main()
