"""A short run of the fuzzer, and that it sees trouble."""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.openapi.operations import OPERATIONS
from protos import cluster_pb2, inference_pb2
from tests.fuzz.inputs import HttpInput, Inputs
from tests.fuzz.plausible import Plausible
from tests.fuzz.run import Fuzzer, Outcome, errors_in, main
from tests.fuzz.words import MAX_TOKENS


def test_one_seed_draws_the_same_inputs() -> None:
    one, other = Inputs(7), Inputs(7)
    assert [one.http() for _ in range(200)] == [other.http() for _ in range(200)]
    assert [one.grpc() for _ in range(200)] == [other.grpc() for _ in range(200)]
    assert len({Inputs(seed).http().data for seed in range(50)}) > 40


GENERATING: dict[str, Any] = {
    "Inference/Generate": inference_pb2.GenerateRequest,
    "Inference/GenerateUnary": inference_pb2.GenerateRequest,
    "Inference/Chat": inference_pb2.ChatRequest,
    "Inference/ChatUnary": inference_pb2.ChatRequest,
}


def test_no_call_asks_for_a_long_answer() -> None:
    inputs = Inputs(8)
    for _ in range(3000):
        given = inputs.grpc()
        kind = GENERATING.get(given.method)
        if kind is not None:
            try:
                message = kind.FromString(given.message)
            except Exception:  # noqa: BLE001 - bytes that are no message are refused, whatever the library calls it
                continue
            assert message.sampling.HasField("max_tokens")
            assert not MAX_TOKENS < message.sampling.max_tokens <= 2048


def test_every_route_and_method_is_among_the_inputs() -> None:
    inputs = Inputs(9)
    asked = {
        given.data.split(b" ", 2)[1].split(b"?")[0] for _ in range(12_000) if (given := inputs.http()).data.count(b" ")
    }
    for operation in OPERATIONS:
        path = re.compile(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(operation.path)).encode())
        assert any(path.fullmatch(one) for one in asked), operation.path
    called = {inputs.grpc().method for _ in range(1000)}
    for file in (inference_pb2, cluster_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            assert {f"{service.name}/{method.name}" for method in service.methods} <= called


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _outcome(answer: bytes | None, given: HttpInput) -> Outcome:
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
            if answer is None:
                await reader.read(-1)  # until the client has gone
            else:
                writer.write(answer)
            writer.close()
            await writer.wait_closed()
        is_over.set()

    outcome = Outcome()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        await Fuzzer(server.sockets[0].getsockname(), hang_s=0.5).http(given, outcome)
    finally:
        await is_over.wait()
        server.close()
        await server.wait_closed()
    return outcome


def _http(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (_http(200, b"{}"), None),
        (_http(400, b'{"error":{"message":"m","type":"t","code":"c"}}'), None),
        (_http(400, b"no"), "no error object"),
        (_http(400, b'{"error":{"message":"","type":"t","code":"c"}}'), "no error object"),
        (_http(500, b'{"error":{"message":"m","type":"t","code":"c"}}'), "status 500"),
        (_http(503, b'{"error":{"message":"m","type":"t","code":"worker_unavailable"}}'), "status 503"),
        (_http(503, b'{"error":{"message":"m","type":"overloaded_error","code":"c"}}'), None),
        (_http(307, b""), "status 307"),
        (_http(400, b'{"error":{"message":"Traceback","type":"t","code":"c"}}'), "internals shown"),
        (_http(503, b'{"error":{"message":"internal error","type":"overloaded_error","code":"c"}}'), "internal error"),
        (b"", "no answer"),
        (None, "hangs"),
    ],
)
async def test_trouble_is_seen(answer: bytes | None, trouble: str | None) -> None:
    given = HttpInput("member n", b"POST /v1/completions HTTP/1.1\r\n\r\n")
    outcome = await _outcome(answer, given)
    assert list(outcome.troubles) == ([trouble] if trouble else [])


def test_errors_in_logs_are_found(tmp_path: Path) -> None:
    lines = [{"level": level, "message": "m"} for level in ("info", "warning", "error", "error")]
    (tmp_path / "gateway.log").write_text("\n".join(["no JSON", "1", *map(json.dumps, lines)]))
    assert errors_in(tmp_path) == {"gateway: m ": 2}


def test_plausible_requests_use_the_ids_of_earlier_responses() -> None:
    plausible = Plausible(random.Random(5))
    plausible.learn(b'{"id": "resp_abc", "output": [{"id":"msg_def"}]}')
    paths = {plausible.draw().path for _ in range(2000)}
    assert "/v1/responses/resp_abc/cancel" in paths
    assert any("/items/msg_def" in path for path in paths)


def test_a_cluster_bears_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    # The limit for hanging is a whole cluster's on two busy cores.
    assert main(["--requests", "400", "--seed", "11", "--hang", "10"]) == 0, capsys.readouterr().out
