"""Gateways on one Redis with one worker that answers rows of batches."""

import asyncio

import pytest

from protos import worker_pb2
from tests.gateway.batches.clients import ANSWER


class Script:
    """A decode worker's script: answers at once, but rows whose first prompt token is in `held` only when let go."""

    def __init__(self):
        self.held = set()
        self.gate = asyncio.Event()
        self.running = set()
        self.most_at_once = 0
        self.asked = []
        self.on_asked = lambda: None

    async def decode(self, attempt):
        self.asked.append(attempt.spec.prompt_token_ids[0])
        self.on_asked()
        self.running.add(attempt.key)
        self.most_at_once = max(self.most_at_once, len(self.running))
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        if attempt.spec.prompt_token_ids[0] in self.held:
            await self.gate.wait()
        await asyncio.sleep(0.005)  # a step
        attempt.tokens(0, ANSWER[: attempt.spec.sampling.max_tokens])
        self.running.discard(attempt.key)
        attempt.finish()


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def make(make_system, worker_type, script):
    """Makes gateways on one Redis, with one worker."""

    async def make_them(num_gateways=1, *, has_worker=True, **settings):
        systems = [await make_system(**settings) for _ in range(num_gateways)]
        for system in systems:
            system.gateway.batches._poll_s = 0.1
        if has_worker:
            await systems[0].add(worker_type("decode", "decode-0", script.decode))
            for system in systems:
                await system.until(lambda system=system: system.gateway.topology.num_ready("decode") == 1)
        return systems[0] if num_gateways == 1 else systems

    return make_them
