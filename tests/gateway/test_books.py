"""What the gateway notes of its requests: routes of sessions, placements, workers to avoid. Nothing is left of it."""

import asyncio

import msgspec
import pytest

from gateway.topology.members import Topology
from protos import cluster_pb2, worker_pb2
from services.cluster.placements import State
from services.runtime import rpc
from services.runtime.errors import InternalError, Overloaded, TransferFailed
from tests.waiting import HANG_LIMIT_S

READY = cluster_pb2.WORKER_STATE_READY


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode("hello world, naïve café end" * 6, add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    return pair_type(answer)


def open_routes(system):
    return {member.record.id: member.session.num_open_attempts for member in system.gateway.topology.members()}


async def no_routes(system):
    await system.until(lambda: not any(open_routes(system).values()))


async def test_a_prefill_worker_that_refused_is_not_busy_with_it(make_system, worker_type, pair):
    refusals = [Overloaded("full")] * 3

    async def prefill(attempt):
        if refusals:
            attempt.refuse(refusals.pop())
        else:
            await pair.prefill(attempt)

    system = await make_system()
    first = await system.add(worker_type("prefill", "prefill-0", prefill))
    await system.add(worker_type("prefill", "prefill-1", pair.prefill))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    await asyncio.gather(*(system.complete(max_tokens=5) for _ in range(8)))
    await no_routes(system)
    num_before = len(first.attempts)
    for _ in range(20):
        assert (await system.complete(max_tokens=5)).status_code == 200
    assert len(first.attempts) - num_before >= 5, "the load is shared again"


async def test_an_answer_that_moved_leaves_no_route(make_system, worker_type, pair_type, answer):
    class Patient(pair_type):
        def step_s_of(self, attempt):
            is_early = attempt.worker.worker_id == "decode-0" and attempt.worker.load.state == READY
            return 0.06 if is_early else 0.005

    pair = Patient(answer)
    system = await make_system()
    await system.add_pair(pair)
    asking = asyncio.create_task(system.complete(max_tokens=400, return_token_ids=True))
    leaving = system.workers["decode-0"]
    await system.until(lambda: system.total("tandem_generated_tokens_total") >= 3)
    taker = await system.add(worker_type("decode", "decode-1", pair.decode, on_hand_over=pair.hand_over))
    leaving.drain()
    assert (await asking).json()["choices"][0]["token_ids"] == answer
    assert len(taker.attempts) == 1
    await no_routes(system)


@pytest.mark.parametrize("error", [InternalError("broken"), TransferFailed("broken, too")])
async def test_a_decode_worker_that_refuses_for_no_good_reason_is_left_alone(make_system, worker_type, pair, error):
    async def refuse(attempt):
        attempt.refuse(error)

    system = await make_system(routing="least_loaded")
    sick = await system.add(worker_type("decode", "decode-0", refuse))
    busy = worker_type("decode", "decode-1", pair.decode)
    busy.load.waiting_tokens = busy.load.running = 5  # so that the sick one, which never has work, is asked first
    await system.add(busy)
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    for _ in range(6):
        assert (await system.complete(max_tokens=20)).status_code == 200
    assert sick.attempts


async def test_who_leaves_is_told_to_a_worker_whose_commands_pile_up(make_system, worker_type, pair, monkeypatch):
    async def take_and_be_silent(attempt):
        await asyncio.sleep(0)

    system = await make_system()
    prefill = await system.add(worker_type("prefill", "prefill-0", take_and_be_silent))
    decode = await system.add(worker_type("decode", "decode-0", pair.decode))
    asking = asyncio.create_task(system.complete(max_tokens=5))
    await system.until(lambda: len(prefill.attempts) == 1)
    monkeypatch.setattr("gateway.topology.session.MAX_OUTGOING_COMMANDS", 0)
    asking.cancel()
    await system.until(lambda: (len(prefill.cancelled), len(decode.cancelled)) == (1, 1))


async def test_a_worker_that_was_seen_while_it_was_starting_is_connected_at_once(
    worker_type, pair, redis_url, cluster_name, monkeypatch
):
    """While it was starting, the worker had no address yet."""
    addresses = []
    make_channel = rpc.make_channel
    monkeypatch.setattr(rpc, "make_channel", lambda address: (addresses.append(address), make_channel(address))[1])
    worker = worker_type("decode", "decode-0", pair.decode)
    await worker.start(redis_url, cluster_name)
    topology = Topology(gateway_incarnation="0" * 32, on_change=lambda: None)
    try:
        ready = worker.lease._record
        topology.take_membership([msgspec.structs.replace(ready, state="starting", address="")])
        topology.take_membership([ready])
        async with asyncio.timeout(HANG_LIMIT_S):
            async for _ in topology.changes():
                if topology.num_ready("decode") == 1:
                    break
        assert addresses == [ready.address]
    finally:
        await topology.close()
        await worker.stop()


async def test_placements_say_where_a_request_stands(make_system, worker_type, pair, monkeypatch):
    steps = {name: asyncio.Event() for name in ("begin", "token", "hand_off", "decode")}

    async def prefill(attempt):
        await steps["begin"].wait()
        attempt.emit(worker_pb2.PrefillStarted())
        await steps["token"].wait()
        attempt.tokens(0, pair.answer[:1])
        await steps["hand_off"].wait()
        attempt.emit(worker_pb2.HandedOff(num_pages=1, num_bytes=64, exposed_s=0.001, transport="none"))

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        await steps["decode"].wait()
        attempt.emit(worker_pb2.DecodeStarted())
        await pair.generate(attempt, 1)

    system = await make_system()
    await system.add(worker_type("prefill", "prefill-0", prefill))
    await system.add(worker_type("decode", "decode-0", decode))
    posted = []
    post = system.gateway.requests._sinks.placements.post
    monkeypatch.setattr(
        system.gateway.requests._sinks.placements, "post", lambda placement: (posted.append(placement), post(placement))
    )
    asking = asyncio.create_task(system.complete(max_tokens=20))
    expected = [State.ADMITTED]
    await system.until(lambda: [placement.state for placement in posted] == expected)
    for step, state in (("begin", State.PREFILLING), ("token", State.TRANSFERRING), ("decode", State.DECODING)):
        steps[step].set()
        expected.append(state)
        await system.until(lambda: [placement.state for placement in posted] == expected)
    steps["hand_off"].set()
    await asking
    assert [placement.state for placement in posted] == [*expected, State.FINISHED]
    assert len({placement.began_unix_ns for placement in posted}) == 1
    assert posted[0].began_unix_ns > 0
