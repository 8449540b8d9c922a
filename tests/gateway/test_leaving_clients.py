"""Clients that leave, in every phase and over both APIs, and clients that do not read: nothing of them stays."""

import asyncio
import dataclasses
import gc
import json
import socket
from collections import Counter

import grpc
import pytest

from gateway.http.bodies import LONG_BODY_BYTES
from gateway.http.exchange import Exchange
from gateway.named.live_journal import Journal
from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import Attempt
from gateway.requests.call import AnswerSpec, Call
from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime import rpc
from services.runtime.errors import InternalError, Overloaded, WorkerUnavailable
from tests.waiting import HANG_LIMIT_S

NAMES = {
    "unnamed": {},
    "with an id": {"x-request-id": "mine"},
    "with a key": {"idempotency-key": "the key"},
}
MAX_BUFFER_BYTES = 128 * 1024
"""uvicorn stops at 64 KiB, and the last event comes on top of that."""


async def never_answer(attempt):
    await asyncio.sleep(0)


async def admit_only(attempt):
    attempt.emit(worker_pb2.Admitted())


async def start_prefill(attempt):
    attempt.emit(worker_pb2.PrefillStarted(queue_s=0.0))


async def first_token(attempt):
    attempt.emit(worker_pb2.PrefillStarted(queue_s=0.0))
    attempt.tokens(0, [40])


async def decode_some(attempt):
    attempt.emit(worker_pb2.Admitted())
    attempt.emit(worker_pb2.DecodeStarted())
    attempt.tokens(0, [40, 41, 42])


async def refuse(attempt):
    attempt.refuse(Overloaded("no room"))


PHASES = {
    "asked": (None, never_answer),
    "prefilling": (start_prefill, admit_only),
    "handing off": (first_token, admit_only),
    "decoding": (None, decode_some),
}


class Calls:
    """The ways to ask, each as a coroutine that lasts until it is cancelled."""

    def __init__(self, system, headers):
        self.system, self.headers = system, headers
        self.num_choices = 1
        self.timeout_s = None

    async def http_stream(self):
        await self._post(stream=True)

    async def http_whole(self):
        await self._post(stream=False)

    async def grpc_stream(self):
        async with self._channel() as stub:
            async for _ in stub.Generate(self._request(), metadata=self._metadata(), timeout=self.timeout_s):
                pass

    async def grpc_whole(self):
        async with self._channel() as stub:
            await stub.GenerateUnary(self._request(), metadata=self._metadata(), timeout=self.timeout_s)

    async def _post(self, stream):
        self.num_choices = 2
        body = {"prompt": [5, 6, 7], "n": 2, "stream": stream}
        if self.timeout_s is not None:
            body["request_timeout_ms"] = round(self.timeout_s * 1000)
        await self.system.http.post("/v1/completions", json=body, headers=self.headers)

    def _channel(self):
        system = self.system

        class Opened:
            async def __aenter__(self):
                self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}")
                return inference_pb2_grpc.InferenceStub(self.channel)

            async def __aexit__(self, *exception):
                await self.channel.close()

        return Opened()

    def _request(self):
        return inference_pb2.GenerateRequest(text="x", request_id=self.headers.get("x-request-id", ""))

    def _metadata(self):
        return [(key, value) for key, value in self.headers.items() if key == "idempotency-key"]


APIS = ["http_stream", "http_whole", "grpc_stream", "grpc_whole"]


async def until_idle(system):
    requests = system.gateway.requests
    assert await requests.wait_until_idle(timeout_s=HANG_LIMIT_S)
    assert (requests.num_running, requests.num_queued) == (0, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("phase", PHASES)
async def test_workers_are_told_when_the_client_leaves(make_system, worker_type, phase, api, name):
    system = await make_system()
    prefill_script, decode_script = PHASES[phase]
    workers = []
    if prefill_script is not None:
        workers.append(await system.add(worker_type("prefill", "prefill-0", prefill_script)))
    workers.append(await system.add(worker_type("decode", "decode-0", decode_script)))
    calls = Calls(system, NAMES[name])
    asking = asyncio.create_task(getattr(calls, api)())
    await system.until(lambda: all(len(worker.attempts) == calls.num_choices for worker in workers))
    await asyncio.sleep(0.05)
    assert not any(worker.cancelled for worker in workers)
    asking.cancel()
    for worker in workers:
        keys = {attempt.key for attempt in worker.attempts}
        await system.until(lambda worker=worker, keys=keys: set(worker.cancelled) == keys)
    await until_idle(system)
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("api", APIS)
async def test_queue_forgets_who_left(make_system, worker_type, api, name):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", refuse))
    calls = Calls(system, NAMES[name])
    asking = asyncio.create_task(getattr(calls, api)())
    await system.until(lambda: system.gateway.requests.num_queued == calls.num_choices)
    asking.cancel()
    await until_idle(system)
    await asyncio.gather(asking, return_exceptions=True)


async def finish_at_once(attempt):
    attempt.emit(worker_pb2.Admitted())
    attempt.emit(worker_pb2.DecodeStarted())
    attempt.tokens(0, [40, 41])
    attempt.finish()


async def fail_before_a_token(attempt):
    attempt.fail(WorkerUnavailable("a worker's failure"))


async def fail_after_tokens(attempt):
    attempt.emit(worker_pb2.Admitted())
    attempt.emit(worker_pb2.DecodeStarted())
    attempt.tokens(len(attempt.spec.emitted_token_ids), [40])
    attempt.fail(InternalError("a worker's fault"))


ENDS = {
    "finished": (finish_at_once, {}),
    "without a place": (refuse, {"max_queue_wait_s": 0.2}),
    "too late": (decode_some, {"timeout_s": 0.3}),
    "too late in the queue": (refuse, {"timeout_s": 0.3}),
    "failed before a token": (fail_before_a_token, {}),
    "failed after tokens": (fail_after_tokens, {}),
    "left": (decode_some, {"is_left": True}),
    "left at once": (never_answer, {"is_left": True}),
    "left in the queue": (refuse, {"is_left": True}),
}
"""By how a request ends: what its worker does, and what else leads there."""
KEPT = (RunningAnswer, AnswerSpec, Attempt, Call, Journal, Exchange)
"""What holds a prompt, or what it was made of."""


@pytest.mark.parametrize(
    "api",
    [
        "http_whole",
        "grpc_stream",
        *(pytest.param(api, marks=pytest.mark.slow) for api in ("http_stream", "grpc_whole")),
    ],
)
@pytest.mark.parametrize("end", ENDS)
async def test_no_request_waits_for_the_collector(make_system, worker_type, end, api):
    """A prompt may have megabytes, and few objects that would make the collector look."""
    script, led_by = ENDS[end]
    settings = {name: value for name, value in led_by.items() if name == "max_queue_wait_s"}
    system = await make_system(**settings)
    decode = await system.add(worker_type("decode", "decode-0", script))
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for headers in NAMES.values():
            calls, num_before = Calls(system, headers), len(decode.attempts)
            calls.timeout_s = led_by.get("timeout_s")
            asking = asyncio.create_task(getattr(calls, api)())
            if "is_left" in led_by:
                await system.until(lambda before=num_before: len(decode.attempts) > before)
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until_idle(system)
            del asking
        await asyncio.sleep(0.05)  # Tasks that were told to end have ended.
        gc.collect()
        assert not Counter(type(each).__name__ for each in gc.garbage if isinstance(each, KEPT))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_a_long_body_whose_client_left_before_its_turn_is_not_read(make_system, monkeypatch):
    """Each takes a thread for a while; those behind it would keep their memory as long."""
    system, read = await make_system(), []
    bodies = system.gateway.api._bodies
    monkeypatch.setattr("gateway.edge.tokenization._read_tokenize", read.append)
    content = b'{"prompt": "a"}'.ljust(LONG_BODY_BYTES + 1)
    async with bodies._long:
        asking = asyncio.create_task(
            system.http.post("/tokenize", content=content, headers={"content-type": "application/json"})
        )
        await system.until(lambda: bodies.num_bytes == len(content))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await system.until(lambda: not connections(system))
    await system.until(lambda: not bodies.num_bytes)
    assert not read


async def test_client_that_left_before_it_was_heard_costs_nothing(make_system, worker_type, monkeypatch):
    """The connection is lost while the prompt is being tokenized."""
    system = await make_system()
    decode = await system.add(worker_type("decode", "decode-0", decode_some))
    accept, is_entered, is_lost = system.gateway.requests.accept, asyncio.Event(), asyncio.Event()

    async def slow_accept(call):
        is_entered.set()
        await is_lost.wait()
        return await accept(call)

    monkeypatch.setattr(system.gateway.requests, "accept", slow_accept)
    for headers in NAMES.values():
        is_entered.clear()
        is_lost.clear()
        asking = asyncio.create_task(Calls(system, headers).http_stream())
        async with asyncio.timeout(HANG_LIMIT_S):
            await is_entered.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await system.until(lambda: not connections(system))
        is_lost.set()
        await asyncio.sleep(0.3)
        await until_idle(system)
    assert len(decode.attempts) == len(decode.cancelled)


async def flood(attempt):
    """Many tokens, and then nothing more: only a cancel ends it."""
    attempt.emit(worker_pb2.Admitted())
    attempt.emit(worker_pb2.DecodeStarted())
    for index in range(0, 400, 2):
        attempt.tokens(index, [261, 277])
        await asyncio.sleep(0.001)


def deaf_socket():
    """A client's socket that takes next to nothing."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    opened.setblocking(False)
    return opened


async def post_raw(opened, system, body, headers):
    content = json.dumps(body).encode()
    lines = [
        f"{key}: {value}" for key, value in {"host": "localhost", "content-length": len(content), **headers}.items()
    ]
    head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "content-type: application/json", *lines, "", ""])
    loop = asyncio.get_running_loop()
    await loop.sock_connect(opened, ("127.0.0.1", system.gateway.http_port))
    await loop.sock_sendall(opened, head.encode() + content)


def connections(system):
    return system.gateway._http._server.server_state.connections


def buffered_bytes(system):
    transports = [connection.transport for connection in connections(system)]
    return max((transport.get_write_buffer_size() for transport in transports if transport is not None), default=0)


@pytest.mark.parametrize("name", NAMES)
async def test_client_that_reads_nothing_is_dropped_and_disturbs_nobody(make_system, worker_type, monkeypatch, name):
    monkeypatch.setattr("gateway.http.exchange.SLOW_CLIENT_LIMIT_S", 1.5)
    system = await make_system()
    decode = await system.add(worker_type("decode", "decode-0", flood))
    for server in system.gateway._http._server.servers:
        for listener in server.sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "n": 4,
        "max_tokens": 450,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 1,
    }
    highest = 0
    with deaf_socket() as deaf:
        await post_raw(deaf, system, body, NAMES[name])
        await system.until(lambda: len(decode.attempts) == 4)
        headers = {"last-event-id": "mine/-,-,-,-"} if name == "with an id" else {}
        num_tokens = dict.fromkeys(range(4), 0)
        async with (
            asyncio.timeout(HANG_LIMIT_S),
            system.http.stream(
                "POST", "/v1/chat/completions", json=body, headers={**NAMES[name], **headers}
            ) as response,
        ):
            assert response.status_code == 200
            async for line in response.aiter_lines():
                highest = max(highest, buffered_bytes(system))
                if line.startswith("data: "):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        num_tokens[choice["index"]] += len((choice["logprobs"] or {}).get("content", ()))
                if all(count == 400 for count in num_tokens.values()):
                    break
        # The client that reads has everything while the other one still hangs there; now that one is dropped too.
        assert len(decode.attempts) == (8 if name == "unnamed" else 4)
        await system.until(lambda: len(decode.cancelled) == len(decode.attempts))
        await until_idle(system)
    assert 0 < highest <= MAX_BUFFER_BYTES


@pytest.mark.parametrize("name", ["unnamed", "with an id"])
async def test_grpc_client_that_reads_nothing_is_dropped(make_system, worker_type, monkeypatch, name):
    monkeypatch.setattr(rpc, "PUBLIC", dataclasses.replace(rpc.PUBLIC, write_timeout_s=0.5))
    system = await make_system()
    decode = await system.add(worker_type("decode", "decode-0", flood))
    sent = []
    from gateway.edge import grpc_api

    make_response = grpc_api._response

    def counted(request_id, delta):
        response = make_response(request_id, delta)
        sent.append(response.ByteSize())
        return response

    monkeypatch.setattr("gateway.edge.grpc_api._response", counted)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.so_rcvbuf", 1024)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}", options=options) as channel:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[5]),
            request_id=NAMES[name].get("x-request-id", ""),
            sampling=inference_pb2.SamplingParams(max_tokens=450, logprobs=1),
        )
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        await system.until(lambda: len(decode.attempts) == 1)
        await system.until(lambda: len(decode.cancelled) == 1)
        await until_idle(system)
        assert sum(sent) <= 64 * 1024
        call.cancel()
