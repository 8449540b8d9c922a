"""Attacks on the gRPC port, and texts that become tokens."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from tests.attack import http2
from tests.attack.base import ATTACKER, VICTIM, Row, Target, attack
from tests.attack.http2 import Connection, grpc_headers, message_prefix

TOKENIZE = "/tandem.v1.Inference/Tokenize"
MESSAGE_BYTES = 8 * 2**20 - 1024
NUM_CONNECTIONS, NUM_STREAMS = 3, 100
"""Connections, and streams on each of them; their messages have 2.3 GB together."""
SLACK_MIB = 64
"""What resident memory may move beyond a stated bound."""
PLACES_OF_A_TENANT = 4
GIVEN_BACK_S = 5.0
SHORT_TEXT = "The quick brown fox jumps over the lazy dog. " * 120


def _metadata(target: Target, who: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {target.keys[who]}")] if who and target.keys else []


def _address(target: Target) -> tuple[str, int]:
    host, _, port = target.grpc.rpartition(":")
    return host, int(port)


class _Flood:
    """Unfinished messages on several connections; `run` sends until nothing more is taken, at most `limit_s`."""

    def __init__(self, target: Target, who: str) -> None:
        self._connections = [Connection(_address(target)) for _ in range(NUM_CONNECTIONS)]
        self._metadata = _metadata(target, who)
        self.num_sent_bytes = 0

    def run(self, *, limit_s: float) -> None:
        """Sends."""
        body = memoryview(message_prefix(MESSAGE_BYTES) + bytes(MESSAGE_BYTES - 1))
        for connection in self._connections:
            connection.wait_until_closed(timeout_s=0.1)  # the server's settings come
        block = grpc_headers(TOKENIZE, self._metadata)
        sent = {(each, each.open(block)): 0 for each in self._connections for _ in range(NUM_STREAMS)}
        started_s = quiet_since_s = time.monotonic()
        while time.monotonic() - quiet_since_s < 1.0 and time.monotonic() - started_s < limit_s:
            for (connection, stream), num_bytes in sent.items():
                more = connection.send_data(stream, body[num_bytes:])
                if more:
                    sent[connection, stream] += more
                    quiet_since_s = time.monotonic()
            for connection in self._connections:
                connection.read()
        self.num_sent_bytes = sum(sent.values())

    def close(self) -> None:
        """The client leaves."""
        for connection in self._connections:
            connection.socket.close()


async def _rss_after(target: Target, base_mib: float) -> float:
    """What resident memory has moved by GIVEN_BACK_S after the client's end, or as soon as that is little."""
    deadline_s = time.monotonic() + GIVEN_BACK_S
    while (moved := target.rss_mib() - base_mib) > SLACK_MIB / 4 and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return moved


async def _flood(target: Target, who: str, bound_mib: int) -> Row:
    base_mib = target.rss_mib()
    flood = await asyncio.to_thread(_Flood, target, who)
    sending = asyncio.create_task(asyncio.to_thread(flood.run, limit_s=15.0))
    peak_mib = 0.0
    while not sending.done():
        peak_mib = max(peak_mib, target.rss_mib() - base_mib)
        await asyncio.sleep(0.02)
    await sending
    late = await _tokenize_s(target) if who else 0.0
    flood.close()
    after_mib = await _rss_after(target, base_mib)
    offered_mib = NUM_CONNECTIONS * NUM_STREAMS * MESSAGE_BYTES >> 20
    return Row(
        f"{offered_mib} MiB of unfinished messages {'with a key' if who else 'without a key'}",
        f"memory +{bound_mib + SLACK_MIB} MiB at most, back in {GIVEN_BACK_S:g} s; others are served",
        f"{flood.num_sent_bytes >> 20} MiB taken, +{peak_mib:.0f} MiB, then {after_mib:+.0f} MiB"
        + (f"; the victim's call took {late:.2f} s" if who else ""),
        peak_mib <= bound_mib + SLACK_MIB and after_mib <= SLACK_MIB and late < 5.0,
    )


async def _tokenize_s(target: Target, who: str = VICTIM) -> float:
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        started_s = time.monotonic()
        request = inference_pb2.TokenizeRequest(text="abc")
        await inference_pb2_grpc.InferenceStub(channel).Tokenize(
            request, metadata=_metadata(target, who), timeout=30, wait_for_ready=True
        )
        return time.monotonic() - started_s


@attack(2)
async def unfinished_grpc_messages(target: Target) -> Sequence[Row]:
    """All of a message but its last byte, on many streams."""
    bound_mib = PLACES_OF_A_TENANT * MESSAGE_BYTES >> 20
    return [await _flood(target, "", 0), await _flood(target, ATTACKER, bound_mib)]


@attack(15)
async def idle_grpc_connections(target: Target) -> Sequence[Row]:
    """Connections that have sent a preface and nothing else."""

    def open_and_wait() -> tuple[int, float]:
        connections = [Connection(_address(target)) for _ in range(300)]
        started_s = time.monotonic()
        while any(each.is_open for each in connections) and time.monotonic() - started_s < 75:
            for each in connections:
                each.read()
            time.sleep(0.2)
        num_open = sum(each.is_open for each in connections)
        for each in connections:
            each.socket.close()
        return num_open, time.monotonic() - started_s

    num_open, took_s = await asyncio.to_thread(open_and_wait)
    happened = f"{num_open} open after {took_s:.0f} s"
    return [Row("300 connections with a preface only", "closed within 75 s", happened, num_open == 0)]


_BLOCKS = {
    "fields of one letter": http2.literal("a", "b") * 20,
    "fields of 100 bytes": http2.literal("x-a", "b" * 100),
    "fields of 4 KB": http2.literal("x-a", "b" * 4000),
    "an indexed field": b"\x90" * 126,
    "one value without end": b"z" * 16_000,
}


@attack(20)
async def continuation_frames_without_end(target: Target) -> Sequence[Row]:
    """A header block that never ends."""
    return [await asyncio.to_thread(_continue, target, what, block) for what, block in _BLOCKS.items()]


def _continue(target: Target, what: str, block: bytes) -> Row:
    base_mib = target.rss_mib()
    with Connection(_address(target)) as connection:
        first = grpc_headers(TOKENIZE)
        if block[:1] == b"z":
            first += b"\0\x01a" + b"\x7f\x80\xff\xff\xff\x07"  # a length of about 2 GiB
        connection.send(http2.frame(http2.HEADERS, 0, 1, first))
        frames = http2.frame(http2.CONTINUATION, 0, 1, block) * max(1, 64_000 // len(block))
        peak_mib, deadline_s = 0.0, time.monotonic() + 4
        while connection.is_open and time.monotonic() < deadline_s:
            connection.send(frames)
            connection.read()
            peak_mib = max(peak_mib, target.rss_mib() - base_mib)
        num_mib, is_open = connection.num_sent_bytes >> 20, connection.is_open
    return Row(
        f"CONTINUATION without end: {what}",
        f"the connection is closed; memory +{SLACK_MIB} MiB at most",
        f"{'open' if is_open else 'closed'} after {num_mib} MiB, +{peak_mib:.0f} MiB",
        not is_open and peak_mib <= SLACK_MIB,
    )


@attack(21)
async def unary_calls_without_their_one_message(target: Target) -> Sequence[Row]:
    """Two messages, and none."""
    rows = []
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        for what, messages in [("two messages", [b"\n\x01a"] * 2), ("no message", [])]:
            call = channel.stream_unary(TOKENIZE)(iter(messages), metadata=_metadata(target, VICTIM), timeout=5)
            started_s = time.monotonic()
            code = await call.code()
            happened = f"{code.name} after {time.monotonic() - started_s:.2f} s"
            rows.append(
                Row(f"a unary call with {what}", "INVALID_ARGUMENT", happened, code is grpc.StatusCode.INVALID_ARGUMENT)
            )
    return rows


@attack(24)
async def reflection_without_a_key(target: Target) -> Sequence[Row]:
    """Which services there are."""
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=5)
        try:
            names = [each.name async for answer in call for each in answer.list_services_response.service]
        except grpc.aio.AioRpcError as error:
            return [Row("reflection without a key", "UNAUTHENTICATED", error.code().name, True)]
    return [Row("reflection without a key", "UNAUTHENTICATED", f"lists {', '.join(names)}", False)]


@attack(27)
async def a_path_that_is_no_text(target: Target) -> Sequence[Row]:
    """One frame whose path is not UTF-8."""

    def send() -> None:
        with Connection(_address(target)) as connection:
            block = grpc_headers("PATH").replace(b"\x04PATH", b"\x04/\xbd\xbe\xbf")
            connection.wait_until_ended(connection.open(block, ends_stream=True), timeout_s=2)

    await asyncio.to_thread(send)
    await asyncio.sleep(0.5)
    try:
        await asyncio.to_thread(lambda: Connection(_address(target)).socket.close())
        took_s = await _tokenize_s(target)
    except (OSError, grpc.aio.AioRpcError) as error:
        return [Row("a path that is not UTF-8", "others are served", f"{type(error).__name__}: {error}"[:120], False)]
    return [Row("a path that is not UTF-8", "others are served", f"answered in {took_s:.2f} s", True)]


@attack(6)
async def long_texts_become_tokens(target: Target) -> Sequence[Row]:
    """Eight texts at once, again and again, beside another tenant's short ones."""
    alone_s = await _latencies(target, lambda number: number < 20)
    base_mib, deadline_s = target.rss_mib(), time.monotonic() + 8
    codes: set[int] = set()

    async def attacker(num_chars: int) -> None:
        text = ("x y" * (num_chars // 3 + 1))[:num_chars]
        async with target.client(ATTACKER) as client:
            while time.monotonic() < deadline_s:
                answer = await client.post("/tokenize", json={"prompt": text})
                codes.add(answer.status_code)

    sizes = [2**20] * 8 + [8 * 2**20 - 100] * 2
    attackers = [asyncio.create_task(attacker(size)) for size in sizes]
    watching = asyncio.create_task(_peak(target, base_mib, deadline_s))
    beside_s = await _latencies(target, lambda _: time.monotonic() < deadline_s)
    await asyncio.gather(*attackers)
    peak_mib, after_mib = await watching, await _rss_after(target, base_mib)
    bound_mib = 2 * 8 * 10 + 8 * 36  # bodies as bytes and as texts; the ids that eight answers hold
    return [
        Row(
            "8 texts of 1 MiB and 2 of 8 MiB at once, one tenant, /tokenize",
            f"memory +{bound_mib + SLACK_MIB} MiB at most, back in {GIVEN_BACK_S:g} s",
            f"+{peak_mib:.0f} MiB, then {after_mib:+.0f} MiB; answered {sorted(codes)}",
            peak_mib <= bound_mib + SLACK_MIB and after_mib <= SLACK_MIB,
        ),
        Row(
            "another tenant's 5,400 characters meanwhile",
            "at most 1 s",
            f"median {statistics.median(alone_s) * 1e3:.0f} ms alone, {statistics.median(beside_s) * 1e3:.0f} ms "
            f"beside them, worst {max(beside_s) * 1e3:.0f} ms",
            max(beside_s) <= 1.0,
        ),
    ]


async def _peak(target: Target, base_mib: float, deadline_s: float) -> float:
    peak_mib = 0.0
    while time.monotonic() < deadline_s:
        peak_mib = max(peak_mib, target.rss_mib() - base_mib)
        await asyncio.sleep(0.02)
    return peak_mib


async def _latencies(target: Target, goes_on: Callable[[int], bool]) -> list[float]:
    """Seconds of the victim's requests, one after the other."""
    took = []
    async with target.client(VICTIM) as client:
        for number in itertools.count():
            if took and not goes_on(number):
                return took
            started_s = time.monotonic()
            answer = await client.post("/tokenize", json={"prompt": SHORT_TEXT})
            answer.raise_for_status()
            took.append(time.monotonic() - started_s)
    return took
