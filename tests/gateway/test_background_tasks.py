"""Each background task of a gateway is restarted after an error, and /cluster shows one that keeps failing."""

import ast
from types import SimpleNamespace

import pytest

from gateway.access import keys
from gateway.access.keys import ApiKey, digest_of_key, toml_entry
from gateway.dashboard import feed
from gateway.observability import storage_watch
from gateway.topology.session import WorkerSession
from services.cluster import rate_limits
from services.cluster.decision_board import DecisionBoard
from services.cluster.wakeups import _Subscription
from services.runtime import background_tasks, idle_connections, service_manager
from services.runtime.background_tasks import FAILING_AFTER, PROCESS_TASKS
from tests.test_house import sources

ANSWER = [11, 12, 13, 1]
KEY = "tandem-tester"


class Fault:
    """Breaks one function: it raises while `num_left` is above 0, and works after that."""

    def __init__(self, monkeypatch, owner, name, *, num_left=1):
        self.num_left, self.num_raised, self.num_later_calls = num_left, 0, 0
        function = getattr(owner, name)

        def call(*args, **kwargs):
            if self.num_left:
                self.num_left -= 1
                self.num_raised += 1
                raise KeyError("an error that nobody expects")
            self.num_later_calls += bool(self.num_raised)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


def shares_workers(system):
    turns = system.gateway.requests.turns
    turns._shares = {"tiny": "a share"}
    turns.start()
    return turns, "look"


LOOPS = {
    "api-keys": lambda system: (system.gateway.door.key_file, "check"),
    "claim": lambda system: (system.gateway.stored.answers, "renew"),
    "claims of batches": lambda system: (system.gateway.batches, "_claim"),
    "claims of responses": lambda system: (system.gateway.stored.background, "_claim"),
    "dashboard": lambda system: (system.gateway._feed, "tick"),
    "decisions": lambda system: (DecisionBoard, "read"),
    "health-monitor": lambda system: (system.gateway.requests.monitor, "_look"),
    "idle-connections": lambda system: (idle_connections, "_num_files"),
    "journal-writer": lambda system: (system.gateway._journals._writer, "_write_batch"),
    "journals": lambda system: (system.gateway._journals._memory, "forget_older"),
    "limits": lambda system: (system.gateway.limiter, "_write"),
    "pace": lambda system: (system.gateway.topology.pace, "adjust"),
    "placement-writer": lambda system: (system.gateway._placements, "_write_batch"),
    "prefix-view": lambda system: (system.gateway._prefixes, "refresh"),
    "quarantine": lambda system: (system.gateway._quarantine, "exchange"),
    "readiness": lambda system: (system.gateway._grpc, "set_serving"),
    "rebalancing": lambda system: (system.gateway.requests.rebalancer, "pieces"),
    "session": lambda system: (WorkerSession, "_take"),
    "silence-check": lambda system: (WorkerSession, "check_silence"),
    "storage": lambda system: (system.gateway._storage, "look"),
    "troubles": lambda system: (system.gateway._trouble_watch, "pieces"),
    "turns": shares_workers,
    "workers": lambda system: (system.gateway.topology, "take_membership"),
    "workers-changed": lambda system: (_Subscription, "is_alive_after_message"),
}
"""Task → (object, name) of a function that each round of its loop calls."""
ELSEWHERE = {
    "leadership": "tests/services/cluster/test_leadership.py",
    "memory-watch": "tests/services/runtime/test_process.py",
    "watchdog": "tests/services/runtime/test_process.py",
}
"""Loops that no gateway of these tests runs → where they are tested."""


def test_each_supervised_loop_has_a_test():
    names = set()
    for path, text in sources():
        if path.startswith(("gateway/", "services/")):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "supervise":
                    names |= {ast.literal_eval(each.value) for each in node.keywords if each.arg == "name"}
    assert names == {name.split(" of ")[0] for name in LOOPS} | ELSEWHERE.keys()


@pytest.fixture
async def system(make_system, monkeypatch, tmp_path):
    """A gateway whose loops look often, with a key that may do everything."""
    for owner, name in (
        (keys, "CHECK_INTERVAL_S"),
        (feed, "BOARD_S"),
        (feed, "TICK_S"),
        (storage_watch, "INTERVAL_S"),
        (rate_limits, "RENEW_INTERVAL_S"),
    ):
        monkeypatch.setattr(owner, name, 0.05)
    file = tmp_path / "keys.toml"
    file.write_text(toml_entry(ApiKey(digest_of_key(KEY), "acme", is_admin=True)))
    system = await make_system(api_keys=file)
    system.http.headers["authorization"] = f"Bearer {KEY}"
    return system


async def begin_response(system):
    """Stores a response that is generated in the background once there are workers."""
    asked = {"model": "tiny", "input": "hi", "background": True, "max_output_tokens": 3}
    assert (await system.http.post("/v1/responses", json=asked)).status_code == 200


async def complete_with_name(system):
    """Sends a request that is written to a journal."""
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
    return await system.http.post("/v1/completions", json=body, headers={"idempotency-key": "a-name"})


@pytest.mark.parametrize("name", LOOPS)
async def test_a_loop_goes_on_after_an_unexpected_error(system, monkeypatch, pair_type, name):
    task = name.split(" of ")[0]
    num_failures = PROCESS_TASKS.num_failures[task]
    owner, function = LOOPS[name](system)
    fault = Fault(monkeypatch, owner, function)
    await begin_response(system)
    await system.add_pair(pair_type(ANSWER))
    assert (await complete_with_name(system)).json()["choices"][0]["finish_reason"] == "length"
    await system.until(lambda: fault.num_later_calls > 0)
    assert PROCESS_TASKS.num_failures[task] == num_failures + 1
    assert not PROCESS_TASKS.failing(), "one error is no reason to worry anybody"
    await system.until(system.gateway.is_ready)
    assert (await system.complete(max_tokens=4)).status_code == 200


async def cluster_of(system):
    return (await system.http.get("/cluster")).json()


@pytest.mark.parametrize(("name", "is_vital"), [("workers", True), ("storage", False), ("troubles", False)])
async def test_a_loop_that_keeps_failing_is_shown_until_it_works(system, monkeypatch, pair_type, name, is_vital):
    monkeypatch.setattr(background_tasks, "RECOVERED_S", 0.5)
    states = []
    monkeypatch.setattr(service_manager, "tell_status", states.append)
    await system.add_pair(pair_type(ANSWER))
    await system.until(system.gateway.is_ready)
    fault = Fault(monkeypatch, *LOOPS[name](system), num_left=10**9)
    if name == "workers":  # it reads only what has changed
        await system.workers["decode-0"].stop()
    await system.until(lambda: fault.num_raised > FAILING_AFTER)
    (found,) = (await cluster_of(system))["failing_tasks"]
    assert (found["name"], found["subject"]) == (name, "")
    assert found["failures"] > FAILING_AFTER
    assert found["error"].startswith("KeyError (test_background_tasks.py:")
    assert "nobody expects" not in found["error"], "an unexpected message may hold a part of a request"
    if name != "troubles":
        await system.until(lambda: any(one.kind == "background_task" for one in system.gateway.troubles.all()))
    page = (await system.http.get("/metrics")).text
    assert f'tandem_background_task_failures_total{{task="{name}"}}' in page
    if not is_vital:
        assert (await system.http.get("/ready")).status_code == 200
        assert (await system.complete(max_tokens=4)).status_code == 200
    else:
        assert (await system.http.get("/ready")).status_code == 503
        await system.until(lambda: states[-1:] == ["not ready: too few workers, or a failing task"])
    fault.num_left = 0
    await system.until(lambda: not PROCESS_TASKS.failing())
    await system.until(lambda: not any(one.kind == "background_task" for one in system.gateway.troubles.all()))


async def test_a_worker_whose_session_keeps_failing_is_out_of_rotation_and_another_one_serves(
    system, monkeypatch, pair_type, worker_type
):
    monkeypatch.setattr(background_tasks, "RECOVERED_S", 0.5)
    pair = pair_type(ANSWER)
    await system.add_pair(pair)
    await system.add(worker_type("decode", "decode-1", pair.decode))
    topology, take = system.gateway.topology, WorkerSession._take
    broken = SimpleNamespace(ids={"decode-0"})

    def take_or_fail(session, message):
        if session.peer.worker_id in broken.ids:
            raise ValueError("a report that nobody can read")
        take(session, message)

    monkeypatch.setattr(WorkerSession, "_take", take_or_fail)
    await system.until(lambda: [task.subject for task in PROCESS_TASKS.failing()] == ["decode-0"])
    assert topology.num_ready("decode") == 1
    assert system.gateway.is_ready()
    assert (await system.complete(max_tokens=4)).status_code == 200
    broken.ids = {"decode-0", "decode-1"}
    await system.until(lambda: topology.num_ready("decode") == 0)
    assert (await system.http.get("/ready")).status_code == 503
    broken.ids = set()
    await system.until(lambda: topology.num_ready("decode") == 2)
    await system.until(lambda: not PROCESS_TASKS.failing())
    assert (await system.complete(max_tokens=4)).status_code == 200
