"""Clients of both APIs that keep when each token came, and that can be slow, leave, and come back.

Written on bare sockets: the load must not cost more than what it loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec

from protos import inference_pb2, inference_pb2_grpc

MAX_HEAD_BYTES = 64 * 1024
KEEP_ALIVE_S = 1
"""How long a client's connection is silent before its kernel shows every firewall on the way that it still stands."""
_authorities: dict[str, Path] = {}
"""Files of the CA of addresses that speak TLS."""


BROKEN_CONNECTION = ("socket closed", "reset", "goaway", "stream removed")
"""What gRPC says where a connection ends, in words that no refusal has."""


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int | str, body: str) -> None:
        super().__init__(f"{status}: {body[:300]}")
        self.status = status
        self.body = body


class Broken(Exception):
    """The connection ended before the answer did."""


class NotConnected(Broken):
    """Nobody listens there: what makes a client behind a load balancer go elsewhere."""


@dataclass
class Choice:
    """One answer so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class Answer:
    """What a client has of one request."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    request_id: str = ""
    sent_at: float = 0.0
    arrivals: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, choice, tokens) of every piece that had tokens."""
    ended_at: float = 0.0
    last_event_id: str = ""

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    def outcome(self) -> tuple[Any, ...]:
        """All that must be the same whatever happened meanwhile."""
        choices = [
            (index, tuple(choice.token_ids), choice.text, choice.finish_reason, repr(choice.logprobs))
            for index, choice in sorted(self.choices.items())
        ]
        return (tuple(choices), self.prompt_tokens, self.completion_tokens)

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.sent_at

    def forget(self) -> None:
        """Drops what came so far: the server is going to send it again."""
        self.choices.clear()


def speak_tls(address: str, ca: Path) -> None:
    """Clients of this process reach `address` by TLS from now on, and believe only this CA."""
    _authorities[address] = ca


def grpc_channel(address: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
    if address not in _authorities:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(_authorities[address].read_bytes())
    return grpc.aio.secure_channel(address, credentials, options=options)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    ca = _authorities.get(address)
    context = ssl.create_default_context(cafile=ca) if ca else None
    try:
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**20, ssl=context)
    except OSError as error:
        raise NotConnected(f"{address}: {error}") from error
    # An answer that takes its time is silent until then, and a firewall would lose it without a word to either side.
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, KEEP_ALIVE_S)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def http_request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(body)}"]
    if body:
        lines.append("content-type: application/json")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join((*lines, "", "")).encode() + body


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers


async def read_pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The pieces of a body. Raises Broken when it does not end as it should."""
    try:
        if headers.get("transfer-encoding") != "chunked":
            yield await reader.readexactly(int(headers.get("content-length", "0")))
            return
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            piece = await reader.readexactly(size + 2)
            if size == 0:
                return
            yield piece[:-2]
    except (asyncio.IncompleteReadError, OSError, ValueError) as error:
        raise Broken(f"the body broke off: {error!r}") from error


async def http_json(address: str, path: str, body: Any = None, *, timeout_s: float = 10.0) -> Any:
    """GET, or POST where there is a body, of a JSON document. Raises Refused, Broken, TimeoutError."""
    async with asyncio.timeout(timeout_s), connected(address) as (reader, writer):
        data = b"" if body is None else msgspec.json.encode(body)
        writer.write(http_request("GET" if body is None else "POST", path, data))
        try:
            status, headers = await read_head(reader)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Broken(f"no answer: {error!r}") from error
        text = b"".join([piece async for piece in read_pieces(reader, headers)])
        if status != 200:
            raise Refused(status, text.decode(errors="replace"))
        return msgspec.json.decode(text) if path != "/metrics" else text.decode()


async def http_generate(
    address: str, body: Mapping[str, Any], answer: Answer, *, headers: Mapping[str, str] | None = None
) -> None:
    """Runs a streamed completion into `answer`. Raises Refused, Broken, NotConnected."""
    answer.sent_at = answer.sent_at or time.monotonic()
    async with connected(address) as (reader, writer):
        writer.write(http_request("POST", "/v1/completions", msgspec.json.encode(body), headers))
        try:
            status, received = await read_head(reader)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Broken(f"no answer: {error!r}") from error
        if status != 200:
            text = b"".join([piece async for piece in read_pieces(reader, received)])
            raise Refused(status, text.decode(errors="replace"))
        answer.request_id = received.get("x-request-id", answer.request_id)
        buffer = b""
        async for piece in read_pieces(reader, received):
            now = time.monotonic()
            *events, buffer = (buffer + piece).split(b"\n\n")
            for event in events:
                if _take_event(answer, event, now):
                    answer.ended_at = time.monotonic()
                    return
        raise Broken("the stream ended without [DONE]")


def _take_event(answer: Answer, event: bytes, now: float) -> bool:
    """Whether it was the last."""
    data = b""
    for line in event.split(b"\n"):
        if line.startswith(b"id: "):
            answer.last_event_id = line[4:].decode()
        elif line.startswith(b"data: "):
            data = line[6:]
    if not data:
        return False
    if data == b"[DONE]":
        return True
    document = msgspec.json.decode(data)
    if "error" in document:
        raise Refused(str(document["error"].get("code")), data.decode())
    for part in document["choices"]:
        choice = answer.choice(part["index"])
        token_ids = part.get("token_ids") or []
        if token_ids:
            answer.arrivals.append((now, part["index"], len(token_ids)))
        choice.token_ids += token_ids
        choice.text += part["text"]
        choice.finish_reason = part["finish_reason"] or choice.finish_reason
        if part["logprobs"]:
            choice.logprobs += part["logprobs"]["token_logprobs"]
    if document.get("usage"):
        answer.prompt_tokens = document["usage"]["prompt_tokens"]
        answer.completion_tokens = document["usage"]["completion_tokens"]
    return False


async def grpc_generate(
    channel: grpc.aio.Channel,
    message: inference_pb2.GenerateRequest,
    answer: Answer,
    *,
    metadata: tuple[tuple[str, str], ...] = (),
    timeout_s: float = 120.0,
) -> None:
    """Runs a Generate call into `answer`. Raises Refused, Broken, NotConnected."""
    answer.sent_at = answer.sent_at or time.monotonic()
    stub = inference_pb2_grpc.InferenceStub(channel)
    await _take_responses(stub.Generate(message, timeout=timeout_s, metadata=metadata), answer)


async def grpc_resume(channel: grpc.aio.Channel, answer: Answer, *, tenant: str, timeout_s: float = 120.0) -> None:
    """Goes on with a stream that broke, on any gateway."""
    message = inference_pb2.ResumeRequest(
        request_id=answer.request_id, next_index=len(answer.choice(0).token_ids), tenant=tenant
    )
    await _take_responses(inference_pb2_grpc.InferenceStub(channel).Resume(message, timeout=timeout_s), answer)


async def _take_responses(call: Any, answer: Answer) -> None:
    choice = answer.choice(0)
    try:
        async for response in call:
            now = time.monotonic()
            answer.request_id = response.request_id
            if response.token_ids:
                if response.first_index != len(choice.token_ids):
                    raise AssertionError(f"index {response.first_index} came after {len(choice.token_ids)} tokens")
                answer.arrivals.append((now, 0, len(response.token_ids)))
            choice.token_ids += response.token_ids
            choice.text += response.text
            choice.logprobs += [(entry.logprob, [top.token_id for top in entry.top]) for entry in response.logprobs]
            if response.finish_reason:
                choice.finish_reason = inference_pb2.FinishReason.Name(response.finish_reason)
            if response.HasField("usage"):
                answer.prompt_tokens = response.usage.prompt_tokens
                answer.completion_tokens = response.usage.completion_tokens
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower():
            raise NotConnected(details) from error
        if error.code() is grpc.StatusCode.UNAVAILABLE and any(words in details.lower() for words in BROKEN_CONNECTION):
            raise Broken(details) from error
        raise Refused(error.code().name, details) from error
    finally:
        call.cancel()
    if not choice.finish_reason:
        raise Broken("the stream ended without a finish reason")
    answer.ended_at = time.monotonic()
