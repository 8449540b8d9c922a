"""Gateways on one Redis with one worker that says its answer token by token, as far as the test lets it."""

import asyncio
import contextlib

import openai
import pytest

from protos import inference_pb2, worker_pb2
from tests.waiting import HANG_LIMIT_S

TEXT = "hello world, naïve 🙂 café, hello there"


class Talker:
    """A decode worker's script: says `ids`, and after the first `allowed` of them waits."""

    def __init__(self, ids):
        self.ids = ids
        self.allowed = len(ids)
        self.continued = []
        """The number of tokens with which each attempt began."""
        self._changed = asyncio.Condition()

    async def allow(self, num_tokens):
        async with self._changed:
            self.allowed = num_tokens
            self._changed.notify_all()

    async def decode(self, attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        first = len(attempt.spec.emitted_token_ids)
        self.continued.append(first)
        for index in range(first, len(self.ids)):
            async with self._changed:
                await self._changed.wait_for(lambda index=index: index < self.allowed)
            attempt.tokens(index, [self.ids[index]])
        attempt.finish(inference_pb2.FINISH_REASON_STOP)


@pytest.fixture
def talker(tokenizer):
    return Talker([*tokenizer.encode(TEXT, add_special_tokens=False).ids, 1])


@pytest.fixture
def make(make_system, worker_type, talker):
    """Makes gateways on one Redis, with one worker."""

    async def make_them(num_gateways=1, **settings):
        systems = [await make_system(**settings) for _ in range(num_gateways)]
        for system in systems:
            quicken(system)
        await systems[0].add(worker_type("decode", "decode-0", talker.decode))
        for system in systems:
            await system.until(lambda system=system: system.gateway.topology.num_ready("decode") == 1)
        return systems[0] if num_gateways == 1 else systems

    return make_them


def quicken(system):
    """Has a gateway look for work more often, and give up a dead one's sooner."""
    system.gateway.stored.background._poll_s = 0.05
    system.gateway.stored.answers.lease_s = 1.0


@pytest.fixture
async def client_of():
    """Makes OpenAI's own client of a gateway."""
    async with contextlib.AsyncExitStack() as stack:

        async def make_client(system, key="none"):
            client = openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key=key, max_retries=0)
            return await stack.enter_async_context(client)

        yield make_client


async def ended(client, response, timeout_s=HANG_LIMIT_S):
    """The response once it is over."""
    async with asyncio.timeout(timeout_s):
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
            response = await client.responses.retrieve(response.id)
    return response
