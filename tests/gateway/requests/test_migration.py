"""Answers that move from a decode worker that is leaving to another one, and what may go wrong on the way."""

import asyncio

import pytest

from gateway.requests.move_paths import MovePaths
from protos import cluster_pb2, worker_pb2
from services.runtime.clock import ManualClock
from services.runtime.errors import ChannelUnreachable, Overloaded, TransferFailed, WorkerUnavailable

READY = cluster_pb2.WORKER_STATE_READY
ANSWER_TEXT = "hello world, naïve café 🙂 日本語 end"


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode(ANSWER_TEXT * 6, add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    class Patient(pair_type):
        """Leaves a test time to begin the drain, and until `has_moved`, before the answer is complete."""

        has_moved = staticmethod(lambda: True)

        def step_s_of(self, attempt):
            is_ready = attempt.worker.load.state == READY
            is_early = attempt.worker.worker_id == "decode-0" and (is_ready or not self.has_moved())
            return 0.06 if is_early else 0.005

    return Patient(answer)


@pytest.fixture
async def system(make_system, pair):
    system = await make_system()
    await system.add_pair(pair)
    return system


def decode_of(pair, worker_type, number, **changes):
    return worker_type("decode", f"decode-{number}", pair.decode, on_hand_over=pair.hand_over, **changes)


async def begun(system, num_attempts=1):
    """Waits until the first decode worker generates."""
    leaving = system.workers["decode-0"]
    await system.until(lambda: len(leaving.attempts) >= num_attempts)
    await system.until(lambda: _total(system, "tandem_generated_tokens_total") >= 4 * num_attempts)
    return leaving


def _total(system, name):
    text = system.gateway.metrics.render([]).decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def ask(system, **body):
    return (await system.complete(**{"max_tokens": 400, "return_token_ids": True, **body})).json()


async def test_an_answer_moves_with_its_pages(system, worker_type, pair, answer):
    request = asyncio.create_task(ask(system, seed=3))
    leaving = await begun(system)
    taker = await system.add(decode_of(pair, worker_type, 1))
    pair.has_moved = lambda: taker.attempts
    leaving.drain()
    body = await request
    assert body["choices"][0]["token_ids"] == answer
    assert body["choices"][0]["text"] == ANSWER_TEXT * 6
    assert body["usage"]["completion_tokens"] == len(answer)
    (first,), (second,) = leaving.attempts, taker.attempts
    assert (first.key[1], second.key[1]) == (1, 2)
    assert (second.request.from_decode, second.request.local_prefill) == (True, False)
    assert 4 <= len(second.spec.emitted_token_ids) < len(answer)
    assert list(second.spec.emitted_token_ids) == answer[: len(second.spec.emitted_token_ids)]
    (hand_over,) = first.hand_overs
    assert hand_over.next_attempt == 2
    assert hand_over.decode_incarnation == taker.incarnation
    # Handed over, not computed again; and nothing was cancelled that had ended by itself.
    assert len(system.workers["prefill-0"].attempts) == 1
    assert leaving.cancelled == []


async def test_the_stream_notices_nothing(system, worker_type, pair, answer, read_sse):
    request = asyncio.create_task(
        system.complete(max_tokens=400, stream=True, return_token_ids=True, n=3, logprobs=1, stop=["never there"])
    )
    leaving = await begun(system, 3)
    taker = await system.add(decode_of(pair, worker_type, 1))
    pair.has_moved = lambda: len(taker.attempts) == 3
    leaving.drain()
    *chunks, done = read_sse((await request).text)
    assert done == "[DONE]"
    for index in range(3):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for part in parts for token in part.get("token_ids", [])] == answer
        assert "".join(part["text"] for part in parts) == ANSWER_TEXT * 6
        assert sum(len(part["logprobs"]["tokens"]) for part in parts if part.get("logprobs")) == len(answer)
    assert len(taker.attempts) == 3


async def test_a_refused_answer_goes_on_and_asks_again(system, worker_type, pair, answer, monkeypatch):
    monkeypatch.setattr("gateway.requests.migration.TRY_AGAIN_S", 0.1)
    refused = []

    async def refuses_twice(attempt):
        if len(refused) < 2:
            refused.append(attempt)
            attempt.refuse(Overloaded("full"))
        else:
            await pair.decode(attempt)

    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    taker = await system.add(worker_type("decode", "decode-1", refuses_twice))
    pair.has_moved = lambda: len(taker.attempts) == 3
    leaving.drain()
    assert (await request)["choices"][0]["token_ids"] == answer
    assert [attempt.key[1] for attempt in taker.attempts] == [2, 3, 4]
    lengths = [len(attempt.spec.emitted_token_ids) for attempt in taker.attempts]
    assert lengths == sorted(set(lengths))
    assert leaving.attempts[0].hand_overs[0].next_attempt == 4


async def test_without_another_worker_it_ends_where_it_is(system, answer):
    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    leaving.drain()
    assert (await request)["choices"][0]["token_ids"] == answer
    assert len(leaving.attempts) == 1


async def test_workers_that_do_not_fit_are_not_asked(system, worker_type, pair, answer):
    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    other = await system.add(decode_of(pair, worker_type, 1, fingerprint="another"))
    leaving.drain()
    assert (await request)["choices"][0]["token_ids"] == answer
    assert other.attempts == []


@pytest.mark.parametrize("when", ["pausing", "asking", "handing over"])
async def test_death_of_the_leaving_worker_is_an_ordinary_failover(system, worker_type, pair, answer, when):
    async def dies(attempt):
        await leaving.die()

    async def waits_for_the_death(attempt):
        if attempt.request.from_decode:
            await leaving.die()
        else:
            await pair.decode(attempt)

    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    if when == "pausing":
        first = leaving.attempts[0]
        first.between_steps = lambda num_tokens: asyncio.sleep(3600 if first.pause_asked else 0)
    leaving.on_hand_over = dies
    script = waits_for_the_death if when == "asking" else pair.decode
    taker = await system.add(worker_type("decode", "decode-1", script))
    leaving.drain()
    if when == "pausing":
        await system.until(lambda: leaving.attempts[0].pause_asked)
        await leaving.die()
    assert (await request)["choices"][0]["token_ids"] == answer
    last = taker.attempts[-1]
    assert not last.request.from_decode
    assert len(last.spec.emitted_token_ids) >= 4
    assert len(system.workers["prefill-0"].attempts) == 2


async def test_a_transfer_that_fails_is_an_ordinary_failover(system, worker_type, pair, answer):
    async def fails(attempt):
        attempt.fail(TransferFailed("the way broke"))

    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    leaving.on_hand_over = fails
    taker = await system.add(decode_of(pair, worker_type, 1))
    pair.has_moved = lambda: taker.attempts
    leaving.drain()
    assert (await request)["choices"][0]["token_ids"] == answer
    assert [attempt.request.from_decode for attempt in taker.attempts] == [True, False]
    await system.until(lambda: taker.attempts[0].key in taker.cancelled)


async def test_an_answer_stays_rather_than_use_a_path_that_failed(system, worker_type, pair, answer, monkeypatch):
    monkeypatch.setattr("gateway.requests.migration.TRY_AGAIN_S", 0.01)
    paths = MovePaths(ManualClock())
    monkeypatch.setattr(system.gateway.requests._dispatcher, "move_paths", paths)
    offers = []

    def is_blocked():
        return paths.is_blocked(leaving.incarnation, taker.incarnation)

    async def fails(attempt):
        attempt.fail(ChannelUnreachable("its payload port is closed"))

    async def takes_one(attempt):
        offers.append(attempt.key)
        if attempt.request.from_decode and offers[0] != attempt.key:
            attempt.refuse(Overloaded("full"))
        else:
            await pair.decode(attempt)

    requests = [asyncio.create_task(ask(system, seed=seed)) for seed in range(2)]
    leaving = await begun(system, 2)
    leaving.on_hand_over = fails
    taker = await system.add(worker_type("decode", "decode-1", takes_one))
    moves = system.gateway.requests._moves
    offer = moves._offer

    async def offered(*args):
        assert not is_blocked(), "the answer is offered over a blocked path"
        return await offer(*args)

    monkeypatch.setattr(moves, "_offer", offered)
    pair.has_moved = is_blocked
    leaving.drain()
    for request in requests:
        assert (await request)["choices"][0]["token_ids"] == answer
    assert is_blocked()
    assert [attempt.request.from_decode for attempt in taker.attempts].count(False) == 1, "one of them stayed"
    assert not system.gateway.requests._dispatcher.watch.circuits()


async def test_death_of_the_taker_before_the_handover_leaves_the_answer_where_it_is(system, worker_type, pair, answer):
    async def dies(attempt):
        await attempt.worker.die()

    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    taker = await system.add(worker_type("decode", "decode-1", dies))
    pair.has_moved = lambda: taker.attempts
    leaving.drain()
    assert (await request)["choices"][0]["token_ids"] == answer
    assert len(taker.attempts) == 1
    assert len(leaving.attempts) == 1


async def test_death_of_the_taker_after_the_handover_is_a_failover(system, worker_type, pair, answer):
    async def dies(attempt):
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        await attempt.worker.die()

    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    await system.add(worker_type("decode", "decode-1", dies))
    leaving.drain()
    await system.until(lambda: bool(leaving.attempts[0].hand_overs))
    await system.add(decode_of(pair, worker_type, 2))
    assert (await request)["choices"][0]["token_ids"] == answer
    assert not system.workers["decode-2"].attempts[0].request.from_decode


async def test_an_answer_that_ends_while_it_is_to_pause_is_complete(system, worker_type, pair, answer):
    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    leaving.attempts[0].between_steps = lambda num_tokens: asyncio.sleep(0)
    taker = await system.add(decode_of(pair, worker_type, 1))
    leaving.drain()
    await system.until(lambda: leaving.attempts[0].pause_asked)
    assert (await request)["choices"][0]["token_ids"] == answer
    assert taker.attempts == []


async def test_a_wrong_count_at_the_pause_is_a_failure(system, worker_type, pair, answer):
    async def stops_elsewhere(num_tokens):
        if attempt.pause_asked:
            attempt.emit(worker_pb2.Paused(num_tokens=num_tokens + 1))
            await asyncio.sleep(3600)

    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    attempt = leaving.attempts[0]
    attempt.between_steps = stops_elsewhere
    taker = await system.add(decode_of(pair, worker_type, 1))
    leaving.drain()
    assert (await request)["choices"][0]["token_ids"] == answer
    assert [attempt.request.from_decode for attempt in taker.attempts] == [False]
    await system.until(lambda: attempt.key in leaving.cancelled)


@pytest.mark.parametrize("when", ["asking", "handing over"])
async def test_a_client_that_leaves_during_a_move_frees_both(system, worker_type, pair, when):
    async def never(attempt):
        pass

    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    leaving.on_hand_over = never
    taker = await system.add(worker_type("decode", "decode-1", never if when == "asking" else pair.decode))
    leaving.drain()
    await system.until(lambda: bool(taker.attempts if when == "asking" else leaving.attempts[0].hand_overs))
    request.cancel()
    await system.until(lambda: leaving.cancelled == [leaving.attempts[0].key])
    await system.until(lambda: taker.cancelled == [taker.attempts[0].key])
    await system.until(lambda: not system.gateway.requests.num_running)


async def test_deadline_during_a_move(make_system, worker_type, pair):
    async def never(attempt):
        pass

    system = await make_system(max_request_s=2.0)
    await system.add_pair(pair)
    request = asyncio.create_task(system.complete(max_tokens=400))
    leaving = await begun(system)
    taker = await system.add(worker_type("decode", "decode-1", never))
    leaving.drain()
    await system.until(lambda: bool(taker.attempts))
    assert (await request).status_code == 504
    await system.until(lambda: leaving.cancelled == [leaving.attempts[0].key])


async def test_only_a_few_move_at_a_time(system, worker_type, pair, answer):
    held = []

    async def holds(attempt):
        held.append(attempt)

    requests = [asyncio.create_task(ask(system)) for _ in range(12)]
    leaving = await begun(system, 12)
    leaving.on_hand_over = holds
    taker = await system.add(decode_of(pair, worker_type, 1))
    leaving.drain()
    await system.until(lambda: len(held) == 8)
    await asyncio.sleep(0.1)
    assert len(taker.attempts) == 8
    leaving.on_hand_over = pair.hand_over
    for attempt in held:
        await pair.hand_over(attempt)
    for request in requests:
        assert (await request)["choices"][0]["token_ids"] == answer


async def test_a_worker_that_is_gone_after_its_drain_took_nothing_with_it(system, worker_type, pair, answer):
    """Its session may end while a gateway still has something there: no strike, no lost answer."""

    async def leaves(attempt):
        attempt.worker.sessions.close(WorkerUnavailable("the worker is leaving"))

    request = asyncio.create_task(ask(system))
    leaving = await begun(system)
    leaving.on_hand_over = leaves
    await system.add(decode_of(pair, worker_type, 1))
    leaving.drain()
    assert (await request)["choices"][0]["token_ids"] == answer
