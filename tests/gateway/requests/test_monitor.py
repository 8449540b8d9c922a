"""A worker kept from work is named with the cause, and tried by the gateway: no client's request is spent on that."""

import asyncio
import contextlib
import gc

import pytest

from gateway.requests.attempt import Attempt
from protos import worker_pb2
from services.runtime.errors import ChannelUnreachable, InternalError, Overloaded
from tests.waiting import HANG_LIMIT_S, settle


def is_trial(attempt):
    return attempt.key[0].startswith("trial-")


def lines(caplog, worker_id):
    found = [record for record in caplog.records if record.name == "gateway.topology.watch"]
    return [(record.levelname, record.message, record.cause) for record in found if record.worker == worker_id]


async def circuits(system):
    """The circuits by worker, as /cluster shows them."""
    return {worker["id"]: worker["circuit"] for worker in (await system.http.get("/cluster")).json()["workers"]}


async def until_circuit(system, worker_id, *states):
    await system.until(lambda: system.gateway.metrics.circuit(worker_id) in states)


@contextlib.contextmanager
def collecting_nothing():
    """Gives a list that has what only the garbage collector could free, when it is left."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    garbage = []
    try:
        yield garbage
        gc.collect()
        garbage += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.fixture
async def breakable(make_system, worker_type, pair_type):
    """Two pairs; those whose id is in `broken` answer with errors."""
    system, pair, broken = await make_system(routing="round_robin"), pair_type([5, 6, 7]), set()

    def may_break(script):
        async def run(attempt):
            if attempt.worker.worker_id not in broken:
                await script(attempt)
                return
            if attempt.worker.role == "decode":
                attempt.emit(worker_pb2.Admitted())
            attempt.fail(InternalError("broken"))

        return run

    for number in range(2):
        await system.add(worker_type("prefill", f"prefill-{number}", may_break(pair.prefill)))
        await system.add(worker_type("decode", f"decode-{number}", may_break(pair.decode)))
    return system, broken


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_is_kept_from_work_is_tried_without_clients(breakable, caplog, role):
    caplog.set_level("INFO", logger="gateway.topology.watch")
    system, broken = breakable
    bad = f"{role}-0"
    broken.add(bad)
    async with asyncio.timeout(HANG_LIMIT_S):
        while (await circuits(system))[bad] is None:
            assert (await system.complete(prompt=[5, 6, 7], max_tokens=3)).status_code == 200
    shown = (await circuits(system))[bad]
    assert (shown["cause"], shown["num_openings"]) == ("erring", 1)
    assert f"{shown['figures']['errors']:.0f} of the last" in shown["words"]
    assert lines(caplog, bad) == [("WARNING", "a worker is kept from work", "erring")]
    # While the worker fails, only trials find that out.
    worker = system.workers[bad]
    num_clients = sum(not is_trial(attempt) for attempt in worker.attempts)
    with collecting_nothing() as garbage:
        await system.until(lambda: sum(map(is_trial, worker.attempts)) >= 2)
        await settle()  # the trial's task ends
    assert not [one for one in garbage if isinstance(one, Attempt)], "a failed trial waits for the collector"
    assert (await circuits(system))[bad] is not None
    for _ in range(4):
        assert (await system.complete(prompt=[5, 6, 7], max_tokens=3)).status_code == 200
    broken.clear()
    await until_circuit(system, bad, "closed")
    assert sum(not is_trial(attempt) for attempt in worker.attempts) == num_clients
    assert lines(caplog, bad)[1:] == [("INFO", "a worker is well again", "erring")]
    assert (await system.complete(prompt=[5, 6, 7], max_tokens=3)).status_code == 200
    text = (await system.http.get("/metrics")).text
    assert 'tandem_circuit_openings{cause="erring"} 1.0' in text
    assert f'tandem_worker_circuit{{role="{role}",state="closed",worker="{bad}"}} 1.0' in text


async def test_who_should_get_no_work_and_does_is_not_shown_as_open(breakable, caplog):
    caplog.set_level("INFO", logger="gateway.topology.watch")
    system, _ = breakable
    watch = system.gateway.requests._dispatcher.watch
    for worker_id in ("decode-0", "decode-1"):
        for _ in range(3):
            watch.failed(worker_id, [])
    await system.until(lambda: len(watch.circuits()) == 2)
    states = sorted(circuit["state"] for worker_id, circuit in (await circuits(system)).items() if circuit)
    assert states[1] == "suspected"
    assert states[0] in ("open", "half_open")
    shown = (await system.http.get("/metrics")).text
    assert "tandem_open_breakers 1.0" in shown.splitlines()
    assert (await system.complete(prompt=[5, 6, 7], max_tokens=3)).status_code == 200
    found = {message for worker_id in ("decode-0", "decode-1") for _, message, _ in lines(caplog, worker_id)}
    assert found >= {
        "a worker is kept from work",
        "a worker should get no work, and does: no more of its role can be spared",
    }
    for worker_id in ("decode-0", "decode-1"):
        await until_circuit(system, worker_id, "closed")


async def test_what_workers_count_is_shown_at_the_gateway(make_system, worker_type, pair_type):
    system = await make_system()
    worker = worker_type("decode", "decode-0", pair_type([5, 6, 7]).decode)
    worker.counts.proposed_tokens["ngram"] = 9
    worker.counts.accepted_tokens["ngram"] = 6
    worker.counts.preemptions.update({"place": 2, 'bad"name': 1})
    worker.counts.host_tier.total_pages = 8
    await system.add(worker)
    (member,) = system.gateway.topology.members()
    await system.until(lambda: member.session.counts is not None)
    (shown,) = (await system.http.get("/cluster")).json()["workers"]
    assert shown["counts"]["speculation"] == {"ngram": {"proposed": 9, "accepted": 6}}
    assert shown["counts"]["preemptions"] == {"place": 2}, "a worker's words become labels, so not all of them count"
    assert shown["counts"]["host_tier"]["total"] == 8
    text = (await system.http.get("/metrics")).text
    assert 'tandem_worker_speculative_accepted_tokens_total{role="decode",source="ngram",worker="decode-0"} 6.0' in text
    worker.counts.preemptions["place"] = 3
    await system.until(lambda: member.session.counts.preemptions == {"place": 3})


async def test_a_trial_that_finds_no_room_or_no_path_says_nothing_and_raises_nothing(
    make_system, worker_type, pair_type
):
    system, pair = await make_system(), pair_type([5, 6, 7])

    errors = []

    async def fails(attempt):
        attempt.fail(errors[-1])

    await system.add(worker_type("prefill", "prefill-0", fails))
    for number in range(2):
        await system.add(worker_type("decode", f"decode-{number}", pair.decode))
    requests = system.gateway.requests
    for error in (Overloaded("no pages"), ChannelUnreachable("no channel")):
        errors.append(error)
        for worker in system.workers.values():
            worker.attempts.clear()
        await requests.monitor._try("prefill", "tiny", "prefill-0")
        tried = [bool(system.workers[f"decode-{number}"].attempts) for number in range(2)]
        assert tried == [True, True], "another decode worker may have room, and another path"
    assert not requests._dispatcher.pairs.has_blocked
    assert not requests._dispatcher.watch.circuits()
