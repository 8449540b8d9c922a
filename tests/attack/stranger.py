"""`python -m tests.attack.stranger`: what another user of the machine tries with a worker's address.

Reads {"uid", "tries", "prefill", "decode", "prompt", "salt"} as JSON from standard input and writes a line of JSON for
each try. Imports first, then becomes that user (which may not even read this folder) and calls the workers as their own
programs do, but without the cluster's secret.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import torch
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kv_transfer.link_end import LinkSetup
from kv_transfer.protocol.messages import TransferId
from kv_transfer.sending import SendLinks
from kv_transfer.wire import LinkIdentity
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout, PagePool
from services.engine.weights.config import load_config
from services.runtime.clock import Deadline
from services.runtime.errors import TandemError
from tests.attack.base import REPOSITORY

LIMIT_S = 8.0
NUM_SESSIONS = 64
REFUSED = "refused"
LOST_REASON = "Internal error from Core"
"""Details of a call whose write failed."""
MAX_LOST_REASONS = 8


class Stranger:
    """Somebody who has found the workers' ports. Each method says what came of it; REFUSED is what should."""

    def __init__(self, facts: dict[str, Any], pool: PagePool) -> None:
        self.prefill, self.decode = facts["prefill"], facts["decode"]
        self.prompt: list[int] = facts["prompt"]
        self.salt: str = facts["salt"]
        self._pool = pool
        self._identity = LinkIdentity("prefill-0", secrets.token_hex(16), self.decode["layout"], True)

    async def wrong_answers(self) -> str:
        """Admits a prompt under the victim's salt and fills the pages with noise."""
        request_id = secrets.token_hex(8)
        async with Session(self.decode, worker_pb2_grpc.DecodeWorkerStub) as session:
            spec = self._sequence(request_id, self.prompt, max_tokens=1)
            await session.send(worker_pb2.DecodeCommand(admit=worker_pb2.Admit(sequence=spec)))
            await session.until("admitted")
            await self._send_noise(request_id)
            return "committed pages of noise"

    async def prompts_of_others(self) -> str:
        """Asks how much of a guessed prompt is cached for the victim."""
        async with Session(self.decode, worker_pb2_grpc.DecodeWorkerStub) as session:
            spec = self._sequence(secrets.token_hex(8), self.prompt, max_tokens=1)
            await session.send(worker_pb2.DecodeCommand(admit=worker_pb2.Admit(sequence=spec, local_prefill=True)))
            started = await session.until("prefill_started")
            return f"told that {started.prefill_started.num_cached_tokens} of {len(self.prompt)} tokens are cached"

    async def computing(self) -> str:
        """Has tokens computed without key, tenant or limit."""
        async with Session(self.decode, worker_pb2_grpc.DecodeWorkerStub) as session:
            spec = self._sequence(secrets.token_hex(8), [1, 2, 3], max_tokens=4)
            await session.send(worker_pb2.DecodeCommand(admit=worker_pb2.Admit(sequence=spec, local_prefill=True)))
            await session.until("finished")
            return "computed"

    async def keeping_gateways_out(self) -> str:
        """Takes all places of a worker for gateways."""
        sessions = [Session(self.decode, worker_pb2_grpc.DecodeWorkerStub) for _ in range(NUM_SESSIONS)]
        try:
            found = await asyncio.gather(*(one.open() for one in sessions), return_exceptions=True)
        finally:
            await asyncio.gather(*(one.close() for one in sessions))
        num_held = sum(not isinstance(each, BaseException) for each in found)
        return f"held {num_held} sessions" if num_held else REFUSED

    async def dialling(self) -> str:
        """Has a prefill worker connect to an address of ours."""
        came = asyncio.Event()

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.set()
            writer.close()

        async with await asyncio.start_server(note, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with Session(self.prefill, worker_pb2_grpc.PrefillWorkerStub) as session:
                spec = self._sequence(secrets.token_hex(8), self.prompt, max_tokens=1)
                order = worker_pb2.Prefill(
                    sequence=spec, decode_address=f"127.0.0.1:{port}", decode_incarnation="0" * 32
                )
                await session.send(worker_pb2.PrefillCommand(prefill=order))
                async with asyncio.timeout(LIMIT_S):
                    await came.wait()
        return "connected where it was told to"

    async def replaying(self) -> str:
        """Shows metadata of the right form that nobody of the cluster has made."""
        metadata = (
            ("tandem-role", "gateway"), ("tandem-nonces-bin", os.urandom(88)), ("tandem-proofs-bin", os.urandom(32)),
        )  # fmt: skip
        async with Session(self.decode, worker_pb2_grpc.DecodeWorkerStub, metadata):
            return "taken for a gateway"

    async def reflection(self) -> str:
        """Asks which services there are."""
        async with grpc.aio.insecure_channel(self.decode["address"]) as channel:
            requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=LIMIT_S)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return REFUSED
                raise
            return "listed"

    async def ending_workers(self) -> str:
        """Drains a worker."""
        async with Session(self.prefill, worker_pb2_grpc.PrefillWorkerStub) as session:
            await session.send(worker_pb2.PrefillCommand(drain=worker_pb2.DrainWorker()))
            await session.until("", is_draining=True)
            return "is leaving"

    async def _send_noise(self, request_id: str) -> None:
        links = SendLinks(LinkSetup(self._identity, self._pool, PageAllocator(self._pool.num_pages)))
        try:
            transfer = await links.reserve(
                self.decode["address"],
                self.decode["incarnation"],
                TransferId(request_id, 1),
                num_tokens=len(self.prompt),
                deadline=Deadline.after(LIMIT_S),
            )
            transfer.send(0, range(self._pool.layout.num_pages_for(len(self.prompt))))
            num_tokens = len(self.prompt)
            await transfer.seal(num_tokens=num_tokens, first_token_id=5, sampling_position=num_tokens + 1)
        finally:
            await links.close()

    def _sequence(self, request_id: str, prompt: list[int], *, max_tokens: int) -> worker_pb2.SequenceSpec:
        return worker_pb2.SequenceSpec(
            id=worker_pb2.AttemptId(request_id=request_id, attempt=1),
            prompt_token_ids=prompt,
            sampling=inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, ignore_eos=True),
            deadline_ms=round(LIMIT_S * 1000),
            cache_salt=self.salt,
        )


class Session:
    """A session with a worker, as a gateway opens one."""

    def __init__(self, worker: dict[str, str], stub: Any, metadata: Any = None) -> None:
        self._channel = grpc.aio.insecure_channel(worker["address"], options=[("grpc.use_local_subchannel_pool", 1)])
        self._is_prefill = stub is worker_pb2_grpc.PrefillWorkerStub
        self._call = stub(self._channel).Session(metadata=metadata, timeout=LIMIT_S)

    async def open(self) -> None:
        """Says hello and waits for the first answer."""
        hello = worker_pb2.SessionHello(gateway_incarnation=secrets.token_hex(16))
        command = worker_pb2.PrefillCommand if self._is_prefill else worker_pb2.DecodeCommand
        await self.send(command(hello=hello))
        if await self._call.read() is grpc.aio.EOF:
            raise EOFError("the session ended")

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def send(self, command: Any) -> None:
        several = worker_pb2.PrefillCommands if self._is_prefill else worker_pb2.DecodeCommands
        await self._call.write(several(commands=[command]))

    async def until(self, kind: str, *, is_draining: bool = False) -> Any:
        """Waits for an event of this kind, or for the worker's word that it leaves."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            for event in message.events:
                if event.WhichOneof("event") == kind:
                    return event
                if event.WhichOneof("event") in ("failed", "refused"):
                    raise EOFError(str(event)[:200])
            if is_draining and message.load.state == 3:
                return message
        raise EOFError("the session ended")

    async def __aenter__(self) -> Session:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


async def _with_its_reason(attempt: Callable[[], Awaitable[str]]) -> str:
    """Tries again where gRPC lost the worker's reason: a write that meets the end of its call replaces the status."""
    for _ in range(MAX_LOST_REASONS):
        try:
            return await attempt()
        except grpc.aio.AioRpcError as error:
            if error.details() != LOST_REASON:
                raise
    return await attempt()


async def outcomes(stranger: Stranger, names: list[str]) -> AsyncIterator[tuple[str, str]]:
    """What came of each try."""
    for name in names:
        attempt: Callable[[], Awaitable[str]] = getattr(stranger, name)
        try:
            async with asyncio.timeout(2 * LIMIT_S):
                yield name, await _with_its_reason(attempt)
        except grpc.aio.AioRpcError as error:
            is_refusal = error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            yield name, REFUSED if is_refusal else f"failed otherwise: {error.code().name} {error.details()}"
        except (TandemError, EOFError, TimeoutError, asyncio.InvalidStateError) as error:
            yield name, f"failed otherwise: {type(error).__name__} {error}"


async def main() -> None:
    """Becomes the other user, then tries everything that is asked for."""
    facts = json.loads(sys.stdin.readline())
    config = load_config(REPOSITORY / "demo" / "model")
    layout = PageLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.bfloat16)
    pool = PagePool(layout, 64)
    pool.data.copy_(torch.randn(pool.data.shape).to(pool.data.dtype))
    stranger = Stranger(facts, pool)
    "".encode("idna")  # what the other user may not be able to import
    os.setgroups([])
    os.setgid(facts["uid"])
    os.setuid(facts["uid"])
    async for name, happened in outcomes(stranger, facts["tries"]):
        sys.stdout.write(json.dumps([name, happened]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
