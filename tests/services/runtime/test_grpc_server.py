"""What a server bears from anybody who reaches its port."""

import asyncio
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from services.runtime import rpc
from tests.attack.http2 import Connection, grpc_headers
from tests.waiting import HANG_LIMIT_S

SERVICE = "tandem.v1.Inference"
LIMIT_S = HANG_LIMIT_S


class Servicer(inference_pb2_grpc.InferenceServicer):
    async def Tokenize(self, request: Any, context: Any) -> Any:
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])


@pytest.mark.parametrize("profile", [rpc.INTERNAL, rpc.PUBLIC], ids=["internal", "public"])
@pytest.mark.parametrize(
    "path", [b"/tandem.v1.Inference/\xbd", b"\xff\xfe", b"", b"/", b"/\x00", b"/tandem.v1.Inference/Nothing"]
)
async def test_no_path_ends_a_server(profile: rpc.Profile, path: bytes) -> None:
    server = rpc.make_server([SERVICE], profile=profile)
    inference_pb2_grpc.add_InferenceServicer_to_server(Servicer(), server.server)
    port = await server.start("127.0.0.1", 0)

    def send() -> None:
        for _ in range(3):
            with Connection(("127.0.0.1", port)) as connection:
                block = grpc_headers("PATH").replace(b"\x04PATH", bytes((len(path),)) + path)
                assert connection.wait_until_ended(connection.open(block, ends_stream=True), timeout_s=LIMIT_S)

    try:
        await asyncio.to_thread(send)
        async with rpc.make_channel(f"127.0.0.1:{port}", profile=profile) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            answer = await stub.Tokenize(inference_pb2.TokenizeRequest(text="abc"), timeout=LIMIT_S)
            assert answer.token_ids == [3]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/some.Other/Method")(b"", timeout=LIMIT_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)
