"""While a model is replaced under its name, some workers have the old weights and some the new ones."""

import asyncio

import pytest

from protos import worker_pb2
from tests.waiting import HANG_LIMIT_S

ANSWER_TEXT = "hello world, naïve café 🙂 日本語 end"


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    return pair_type(answer)


async def ask(system, prompt=(5, 6, 7)):
    return await system.complete(prompt=list(prompt), max_tokens=100, return_token_ids=True)


def dies_after(pair, num_tokens, may_die):
    """The script of a decode worker."""

    async def script(attempt):
        attempt.emit(worker_pb2.Admitted())
        if num_tokens:
            attempt.emit(worker_pb2.DecodeStarted())
            await pair.generate(attempt, 0, num_tokens)
        await may_die.wait()
        await attempt.worker.die()

    return script


async def begun(system, worker_type, pair, num_tokens, may_die):
    """(the request, a worker with other weights), when a worker that will die has given `num_tokens`."""
    await system.add(worker_type("decode", "decode-0", dies_after(pair, num_tokens, may_die), fingerprint="old"))
    waiting = asyncio.create_task(ask(system))
    await system.until(lambda: len(system.workers["decode-0"].attempts) == 1)
    await system.until(lambda: system.gateway.metrics.generated_tokens.labels("tiny").value == num_tokens)
    return waiting, await system.add(worker_type("decode", "decode-1", pair.decode, fingerprint="new"))


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_an_answer_goes_on_with_the_weights_that_began_it(make_system, worker_type, pair, answer, num_tokens):
    """Halves from two models would be the answer of neither."""
    system, may_die = await make_system(), asyncio.Event()
    waiting, other = await begun(system, worker_type, pair, num_tokens, may_die)
    may_die.set()
    await system.until(lambda: system.gateway.topology.num_ready("decode") == 1)
    assert (await ask(system, [7, 7])).status_code == 200  # requests that wait for the old weights block no others
    prompts = [list(attempt.spec.prompt_token_ids) for attempt in other.attempts]
    assert prompts == ([[7, 7]] if num_tokens else [[5, 6, 7], [7, 7]])
    await system.add(worker_type("decode", "decode-2", pair.decode, fingerprint="old"))
    assert (await waiting).json()["choices"][0]["token_ids"] == answer
    assert bool(system.workers["decode-2"].attempts) == bool(num_tokens)


async def waiting_for_room(system, worker_type, pair, may_die, may_end):
    """(a begun answer whose weights have no room, one that takes the room, the worker), once `may_die` is set."""

    async def waits(attempt):
        await may_end.wait()
        await pair.decode(attempt)

    dying = worker_type("decode", "decode-0", dies_after(pair, 3, may_die), fingerprint="old")
    dying.load.pages.free = 0  # so it has one request at a time
    await system.add(dying)
    begun = asyncio.create_task(ask(system))
    await system.until(lambda: len(dying.attempts) == 1)
    full = worker_type("decode", "decode-1", waits, fingerprint="old")
    full.load.pages.free = 0
    await system.add(full)
    keeps_it_full = asyncio.create_task(ask(system, [6, 6]))
    await system.until(lambda: len(full.attempts) == 1)
    await system.until(lambda: system.gateway.metrics.generated_tokens.labels("tiny").value == 3)
    return begun, keeps_it_full, full


@pytest.mark.parametrize("new_weights_come", ["before", "after"])
async def test_an_answer_that_waits_for_room_where_its_weights_are_holds_up_nobody_else(
    make_system, worker_type, pair, answer, new_weights_come
):
    system, may_die, may_end = await make_system(), asyncio.Event(), asyncio.Event()
    begun, keeps_it_full, full = await waiting_for_room(system, worker_type, pair, may_die, may_end)
    if new_weights_come == "before":
        await system.add(worker_type("decode", "decode-2", pair.decode, fingerprint="new"))
    may_die.set()
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    other = asyncio.create_task(ask(system, [7, 7]))
    if new_weights_come == "after":
        await system.until(lambda: system.gateway.requests.num_queued == 2)
        await system.add(worker_type("decode", "decode-2", pair.decode, fingerprint="new"))
    assert (await asyncio.wait_for(other, HANG_LIMIT_S)).json()["choices"][0]["token_ids"] == answer
    assert len(full.attempts) == 1
    assert not begun.done()
    may_end.set()
    for one in (keeps_it_full, begun):
        assert (await one).json()["choices"][0]["token_ids"] == answer
    assert len(full.attempts) == 2


@pytest.mark.parametrize("end", ["its client leaves", "its last worker dies", "the new weights leave"])
async def test_a_wait_for_certain_weights_ends_with_its_reason(make_system, worker_type, pair, answer, end):
    system, may_die, may_end = await make_system(failover_wait_s=1.0), asyncio.Event(), asyncio.Event()
    begun, keeps_it_full, full = await waiting_for_room(system, worker_type, pair, may_die, may_end)
    new = await system.add(worker_type("decode", "decode-2", pair.decode, fingerprint="new"))
    may_die.set()
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    if end == "its client leaves":
        begun.cancel()
        await system.until(lambda: system.gateway.requests.num_queued == 0)
    elif end == "its last worker dies":
        await full.die()
        assert "weights" in (await begun).json()["error"]["message"]
    else:
        await new.die()
        await system.until(lambda: system.gateway.topology.num_ready("decode") == 1)
    may_end.set()
    assert (await keeps_it_full).json()["choices"][0]["token_ids"] == answer
    if end == "the new weights leave":
        assert (await begun).json()["choices"][0]["token_ids"] == answer
    assert system.gateway.requests.num_queued == 0
    assert not any(attempt.spec.emitted_token_ids for attempt in new.attempts)


async def test_an_answer_whose_weights_are_gone_is_an_error(make_system, worker_type, pair):
    system, may_die = await make_system(failover_wait_s=0.5), asyncio.Event()
    waiting, other = await begun(system, worker_type, pair, 3, may_die)
    may_die.set()
    response = await waiting
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_overloaded")
    assert "weights" in response.json()["error"]["message"]
    assert not other.attempts


@pytest.mark.parametrize("field", ["engine", "dtype", "arithmetic", "vocabulary", "grammars"])
@pytest.mark.parametrize("allow_inexact", [False, True])
async def test_an_answer_goes_on_only_with_the_same_identity(
    make_system, worker_type, pair, answer, field, allow_inexact
):
    """Equal weights are not enough: with another dtype the next tokens are others."""
    texts = [f"weights=same {field}={value}" for value in ("a", "b")]
    system, may_die = await make_system(failover_wait_s=0.5, allow_inexact=allow_inexact), asyncio.Event()
    await system.add(worker_type("decode", "decode-0", dies_after(pair, 3, may_die), identity=texts[0]))
    waiting = asyncio.create_task(ask(system))
    await system.until(lambda: system.gateway.metrics.generated_tokens.labels("tiny").value == 3)
    other = await system.add(worker_type("decode", "decode-1", pair.decode, identity=texts[1]))
    may_die.set()
    response = await waiting
    assert (response.status_code, bool(other.attempts)) == ((200, True) if allow_inexact else (503, False))
    if not allow_inexact:
        assert "arithmetic" in response.json()["error"]["message"]
    await system.until(lambda: system.gateway.topology.num_ready("decode") == 1)
    assert [worker["exact"] for worker in (await system.http.get("/cluster")).json()["workers"]][-1] != allow_inexact


async def test_a_prompt_is_handed_over_only_with_the_same_identity(make_system, worker_type, pair, answer):
    system = await make_system()
    same = await system.add(worker_type("prefill", "prefill-0", pair.prefill, identity="weights=same dtype=bfloat16"))
    other = await system.add(worker_type("prefill", "prefill-1", pair.prefill, identity="weights=same dtype=float32"))
    await system.add(worker_type("decode", "decode-0", pair.decode, identity="weights=same dtype=bfloat16"))
    for number in range(6):
        assert (await ask(system, [5, 6, number])).json()["choices"][0]["token_ids"] == answer
    assert (len(same.attempts), len(other.attempts)) == (6, 0)
