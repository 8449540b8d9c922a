"""Weights of tenants from the key file, in the fair queue of a running gateway whose cluster is full."""

import asyncio
import collections
import itertools

import pytest

from gateway.access.keys import ApiKey, Tenant, digest_of_key, toml_entry, toml_tenant
from protos import inference_pb2, worker_pb2

HEAVY, LIGHT, HOLDER = "heavy", "light", "holder"
PROMPTS = {HEAVY: [5], LIGHT: [6], HOLDER: [7]}
NUM_EACH = 24


class OneAtATime:
    """A decode worker's script: notes each request, and ends it when the gate is open."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.took = []

    async def decode(self, attempt):
        self.took.append((attempt.spec.prompt_token_ids[0], attempt.spec.sampling.max_tokens))
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        await self.gate.wait()
        attempt.tokens(0, [9])
        attempt.finish(inference_pb2.FINISH_REASON_STOP)


@pytest.fixture
def write_keys(tmp_path):
    """Writes the file of keys with these weights; returns its path."""

    def write(**weights):
        path = tmp_path / "keys.toml"
        tables = [toml_entry(ApiKey(digest_of_key(f"tandem-{tenant}"), tenant)) for tenant in PROMPTS]
        tables += [toml_tenant(tenant, Tenant(weight=weight)) for tenant, weight in weights.items()]
        path.write_text("\n".join(tables))
        return path

    return write


async def test_tenants_of_a_full_queue_get_tokens_by_their_weights(make_system, worker_type, write_keys):
    key_file = write_keys(heavy=3)
    system = await make_system(api_keys=key_file, queue_strategy="fair", ttft_target_s=0.0)
    script = OneAtATime()
    worker = worker_type("decode", "decode-0", script.decode)
    # No page is free: a request goes only when the worker has none.
    worker.load.pages.free = 0
    await system.add(worker)

    async def ask(tenant, max_tokens):
        response = await system.http.post(
            "/v1/completions",
            json={"prompt": PROMPTS[tenant], "max_tokens": max_tokens},
            headers={"authorization": f"Bearer tandem-{tenant}"},
        )
        assert response.status_code == 200, response.text

    async def tokens_of_first_half(max_tokens):
        """Fills the queue behind one request, lets all go, and adds up what each got in the first half."""
        script.gate.clear()
        script.took.clear()
        tasks = [asyncio.create_task(ask(HOLDER, 1))]
        await system.until(lambda: len(script.took) == 1)
        for tenant, _ in itertools.product(max_tokens, range(NUM_EACH)):
            tasks.append(asyncio.create_task(ask(tenant, max_tokens[tenant])))
        await system.until(lambda: system.gateway.requests.num_queued == 2 * NUM_EACH)
        script.gate.set()
        await asyncio.gather(*tasks)
        half = script.took[1 : 1 + NUM_EACH]
        return {
            tenant: sum(1 + count for prompt, count in half if [prompt] == PROMPTS[tenant]) for tenant in max_tokens
        }

    # The light one came first, and asks for twice as much each time: tokens count, not requests.
    got = await tokens_of_first_half({LIGHT: 19, HEAVY: 9})
    assert abs(got[HEAVY] - 3 * got[LIGHT]) <= 60, got
    assert collections.Counter(prompt for prompt, _ in script.took) == {5: NUM_EACH, 6: NUM_EACH, 7: 1}
    write_keys(heavy=1, light=3)
    await system.until(lambda: system.gateway.door.tenant_weights.get("light") == 3)
    got = await tokens_of_first_half({LIGHT: 9, HEAVY: 9})
    assert abs(got[LIGHT] - 3 * got[HEAVY]) <= 30, got
