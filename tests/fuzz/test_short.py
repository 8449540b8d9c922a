"""A short run of the fuzzer, and that it sees trouble."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from protos import inference_pb2
from tests.fuzz.inputs import MAX_TOKENS, HttpInput, Inputs
from tests.fuzz.run import Fuzzer, Outcome, main


def test_one_seed_draws_the_same_inputs() -> None:
    one, other = Inputs(7), Inputs(7)
    assert [one.http() for _ in range(200)] == [other.http() for _ in range(200)]
    assert [one.grpc() for _ in range(200)] == [other.grpc() for _ in range(200)]
    assert len({Inputs(seed).http().data for seed in range(50)}) > 40


def test_no_call_asks_for_a_long_answer() -> None:
    inputs = Inputs(8)
    for _ in range(3000):
        given = inputs.grpc()
        if given.method in ("Inference/Generate", "Inference/GenerateUnary"):
            try:
                message = inference_pb2.GenerateRequest.FromString(given.message)
            except Exception:  # noqa: BLE001 - bytes that are no message are refused, whatever the library calls it
                continue
            assert message.sampling.HasField("max_tokens")
            assert not MAX_TOKENS < message.sampling.max_tokens <= 2048


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
        (_http(307, b""), "status 307"),
        (_http(400, b'{"error":{"message":"Traceback","type":"t","code":"c"}}'), "internals shown"),
        (_http(503, b'{"error":{"message":"internal error","type":"t","code":"c"}}'), "internal error"),
        (b"", "no answer"),
        (None, "hangs"),
    ],
)
async def test_trouble_is_seen(answer: bytes | None, trouble: str | None) -> None:
    given = HttpInput("member n", b"POST /v1/completions HTTP/1.1\r\n\r\n")
    outcome = await _outcome(answer, given)
    assert list(outcome.troubles) == ([trouble] if trouble else [])


def test_a_cluster_bears_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    # The limit for hanging is a whole cluster's on two busy cores.
    assert main(["--requests", "400", "--seed", "11", "--hang", "10"]) == 0, capsys.readouterr().out
