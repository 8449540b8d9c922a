"""Workers that are slow, silent or erring get no new work, and are back soon after they have recovered."""

import asyncio
import itertools

import pytest

from gateway.topology.pacing import Pace
from gateway.topology.watch import TOKENS_PER_STAGE, AttemptWatch, WorkerWatch
from protos import worker_pb2
from services.scheduling.gpu_judgement import GpuJudgement, GpuState

GROUP = ("a", "b")


@pytest.fixture
def patience():
    """Silent and slow workers are kept from work as soon as in production."""


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    def unix_ns(self):
        return int(self.now_s * 1e9)


class Answers:
    """Answers of two workers, one after the other; each takes what `seconds` says for its worker."""

    def __init__(self):
        self.clock, self.pace = Clock(), Pace()
        self.watch = WorkerWatch(self.clock, self.pace)
        self.seconds = {"a": 0.1, "b": 0.1}
        self.sent = {"a": [], "b": []}

    def one(self, turn):
        usable = list(self.watch.usable(GROUP))
        due = self.watch.due_for_probe(GROUP)
        worker_id = due[0] if due else usable[turn % len(usable)]
        self.sent[worker_id].append(self.clock.now_s)
        attempt = AttemptWatch(self.watch, worker_id, token_s=0.1 / TOKENS_PER_STAGE)
        attempt.sent(worker_id, 0.1)
        attempt.note_answer(0, is_finished=False)
        self.clock.now_s += self.seconds[worker_id]
        attempt.note_answer(TOKENS_PER_STAGE, is_finished=True)
        attempt.end()

    def until(self, when_s):
        turn = 0
        while self.clock.now_s < when_s:
            self.one(turn)
            self.clock.now_s += 0.02
            turn += 1


def test_a_slow_worker_is_left_alone_and_comes_back():
    answers = Answers()
    answers.until(110)
    assert len(answers.sent["b"]) > 20
    answers.seconds["b"] = 1.0
    answers.until(115)
    slow_since = len(answers.sent["b"])
    answers.until(130)
    assert len(answers.sent["b"]) - slow_since <= 5  # probes
    answers.seconds["b"] = 0.1
    answers.until(140)
    back = len(answers.sent["b"])
    answers.until(141)
    assert len(answers.sent["b"]) > back + 2
    assert answers.watch.num_ejected == 0


def test_what_is_slow_everywhere_accuses_nobody():
    answers = Answers()
    answers.until(105)
    answers.seconds = {"a": 1.0, "b": 1.0}
    answers.until(140)
    assert answers.watch.num_ejected == 0


def test_a_probe_is_not_late_because_tokens_wait_here():
    answers = Answers()
    answers.until(110)
    answers.seconds["b"] = 1.0
    answers.until(115)
    assert answers.watch.num_ejected == 1
    # Both are as fast as before, but what they send waits for `hold_s` in this process.
    answers.pace.hold_s = 0.2
    answers.seconds = {"a": 0.1, "b": 0.3}
    answers.until(125)
    assert answers.watch.num_ejected == 0


@pytest.mark.parametrize(("took_s", "is_good"), [(0.06, True), (0.2, False)])
def test_a_probe_of_some_milliseconds_may_take_some_more(took_s, is_good):
    clock = Clock()
    watch = WorkerWatch(clock)
    for _ in range(3):
        watch.failed("a", [])
    clock.now_s += 1.0
    for _ in range(4):
        attempt = AttemptWatch(watch, "decode", token_s=0.01)
        attempt.sent("a", 0.01)
        attempt.prompt_sent("a", 0.01)
        clock.now_s += took_s
        attempt.note_prompt_done()
        attempt.note_handed_off()
        attempt.end()
        clock.now_s += 1.0
    watch.usable(GROUP)
    assert (watch.circuit("a") == "closed") == is_good


def test_stages_that_end_otherwise_are_not_waited_for():
    clock = Clock()
    watch = WorkerWatch(clock)
    attempt = AttemptWatch(watch, "a", token_s=0.01)
    attempt.sent("a", 0.1)
    attempt.asked()
    attempt.prompt_sent("b", 0.1)
    attempt.note_answer(0, is_finished=False)
    attempt.end()
    attempt.end()
    clock.now_s += 60
    assert list(watch.usable(GROUP)) == ["a", "b"]
    assert watch.num_ejected == 0


def test_a_silent_worker_is_left_alone():
    clock = Clock()
    watch = WorkerWatch(clock)
    attempt = AttemptWatch(watch, "a", token_s=0.01)
    attempt.prompt_sent("a", 0.1)
    clock.now_s += 1.0
    assert list(watch.usable(GROUP)) == ["b"]
    attempt.note_prompt_done()
    attempt.end()


def test_who_refuses_a_prompt_is_not_waited_for():
    clock = Clock()
    watch = WorkerWatch(clock)
    attempt = AttemptWatch(watch, "decode", token_s=0.01)
    attempt.prompt_sent("a", 0.1)
    attempt.prompt_refused("b")
    clock.now_s += 1.0
    assert list(watch.usable(GROUP)) == ["a"], "the silent worker is the one that has the prompt now"
    attempt.note_prompt_done()
    attempt.end()


def test_a_probe_that_is_refused_says_nothing():
    clock = Clock()
    watch = WorkerWatch(clock)
    for _ in range(3):
        watch.failed("a", [])
    clock.now_s += 1.5
    attempt = AttemptWatch(watch, "decode", token_s=0.01)
    attempt.sent("a", 0.1)
    attempt.prompt_sent("a", 0.1)
    assert list(watch.usable(GROUP)) == ["b"]
    assert watch.circuit("a") == "half_open"
    attempt.prompt_refused("b")
    attempt.note_prompt_done()
    attempt.end()
    assert watch.circuit("a") == "open"
    assert watch.due_for_probe(GROUP) == ["a"]


@pytest.fixture
async def two_by_two(make_system, worker_type, pair_type):
    """Two pairs of workers; `delays` says how long each waits before it does what it is asked."""
    system, pair = await make_system(routing="round_robin"), pair_type([5, 6, 7])
    delays = {}

    def delayed(script):
        async def run(attempt):
            await asyncio.sleep(delays.get(attempt.worker.worker_id, 0.0))
            await script(attempt)

        return run

    for number in range(2):
        await system.add(worker_type("prefill", f"prefill-{number}", delayed(pair.prefill)))
        await system.add(worker_type("decode", f"decode-{number}", delayed(pair.decode)))
    return system, delays


@pytest.mark.parametrize("worker_id", ["prefill-1", "decode-1"])
async def test_a_slow_worker_gets_no_new_work_and_is_back_when_it_has_recovered(two_by_two, worker_id):
    system, delays = two_by_two
    worker = system.workers[worker_id]
    loop = asyncio.get_running_loop()
    prompts = itertools.product(range(5, 400), repeat=2)

    async def ask_until(is_over, limit_s):
        """A request each 40 ms, or as many as the machine can bear."""
        end_s = loop.time() + limit_s
        asking = set()
        while not is_over() and loop.time() < end_s:
            asking.add(asyncio.create_task(system.complete(prompt=[*next(prompts)] * 2, max_tokens=100)))
            await asyncio.sleep(0.04)
            running = [task for task in asking if not task.done()]
            if len(running) >= 40:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 200

    def is_left_alone():
        return system.gateway.metrics.circuit(worker_id) in ("open", "half_open")

    await ask_until(lambda: len(worker.attempts) >= 10 and not is_left_alone(), 60)
    assert not is_left_alone()
    delays[worker_id] = 1.0
    await ask_until(is_left_alone, 60)
    assert is_left_alone()
    num_attempts = len(worker.attempts)
    await ask_until(lambda: False, 1.0)
    assert len(worker.attempts) - num_attempts <= 2
    delays.clear()
    await ask_until(lambda: not is_left_alone(), 60)
    assert not is_left_alone()


async def test_a_silent_worker_that_is_full_holds_up_nobody(make_system, worker_type, pair_type):
    """The worker has no room for a trial, and no client's request goes there meanwhile."""
    system, pair = await make_system(), pair_type([5, 6, 7])
    taken = asyncio.Event()

    async def silent(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.worker.load.pages.free = 0
        taken.set()

    await system.add(worker_type("decode", "decode-0", silent))
    hung = asyncio.create_task(system.complete(prompt=[5, 6, 7], max_tokens=3))
    await taken.wait()
    await system.add(worker_type("decode", "decode-1", pair.decode))
    watch = system.gateway.requests._dispatcher.watch
    await system.until(lambda: watch.usable(["decode-0", "decode-1"]) == ["decode-1"])
    await system.until(lambda: len(system.workers["decode-0"].attempts) > 1)
    for service_class in ("critical", "normal", "batch"):
        answer = await system.complete(prompt=[5, 6, 7], max_tokens=3, service_class=service_class)
        assert answer.status_code == 200
    assert len([one for one in system.workers["decode-0"].attempts if not one.key[0].startswith("trial-")]) == 1
    hung.cancel()


def remote_prompt(watch, prefill_id, decode_id, *, awaits=""):
    """An attempt whose prompt one worker computes for another one; all should take 0.05 s."""
    attempt = AttemptWatch(watch, decode_id, token_s=0.05 / TOKENS_PER_STAGE, handoff_s=0.05)
    attempt.sent(prefill_id, 0.05)
    attempt.prompt_sent(prefill_id, 0.05, awaits=awaits)
    return attempt


def serve_remote(clock, watch, *, link_s=0.0, grant_s=0.0, steps_s=0.05, handoff_s=0.05, answer_s=0.05):
    """One request from `a` to `x`, and a usual one from `b` to `y` before it."""
    usual = {"link_s": 0.0, "grant_s": 0.0, "steps_s": 0.05, "handoff_s": 0.05, "answer_s": 0.05}
    own = {"link_s": link_s, "grant_s": grant_s, "steps_s": steps_s, "handoff_s": handoff_s, "answer_s": answer_s}
    for prefill_id, decode_id, took in (("b", "y", usual), ("a", "x", own)):
        attempt = remote_prompt(watch, prefill_id, decode_id)
        if took["link_s"]:
            attempt.note_opening_link()
        clock.now_s += took["link_s"]
        attempt.note_prompt_started()
        clock.now_s += max(took["grant_s"], took["steps_s"])
        attempt.note_prompt_done()
        clock.now_s += took["handoff_s"]
        attempt.note_handed_off([(0.0, took["steps_s"], 100)])
        clock.now_s += took["answer_s"]
        attempt.note_answer(TOKENS_PER_STAGE, is_finished=True)
        attempt.end()
        watch.usable(("a", "b"))
        watch.usable(("x", "y"))


@pytest.mark.parametrize(
    ("what", "workers", "pairs"),
    [
        ("link_s", [], []),
        ("grant_s", [], [("a", "x")]),
        ("handoff_s", [], [("a", "x")]),
        ("steps_s", ["a"], []),
        ("answer_s", ["x"], []),
    ],
)
def test_a_worker_is_slow_for_its_own_steps_and_a_pair_for_its_handoffs(what, workers, pairs):
    clock = Clock()
    watch = WorkerWatch(clock)
    for _ in range(12):
        serve_remote(clock, watch)
    for _ in range(8):
        serve_remote(clock, watch, **{what: 0.9})
    reports = watch.circuits()
    assert [report.worker_id for report in reports] == workers
    assert all("its own steps" in report.words for report in reports)
    assert [one.pair for one in watch.slow_pairs()] == pairs


def test_a_worker_that_waits_for_one_peer_is_silent_only_after_it_could_report_that():
    clock = Clock()
    watch = WorkerWatch(clock)
    attempts = [remote_prompt(watch, "a", "x") for _ in range(3)]
    for attempt in attempts:
        attempt.note_prompt_started()
    clock.now_s += 5.0
    assert list(watch.usable(GROUP)) == ["a", "b"]
    clock.now_s += 2.0
    assert list(watch.usable(GROUP)) == ["b"]
    for attempt in attempts:
        attempt.end()


@pytest.mark.parametrize("source", ["source", ""], ids=["pull", "link"])
def test_a_worker_that_pulls_or_opens_a_link_first_is_neither_silent_nor_slow_for_its_peer(source):
    clock = Clock()
    watch = WorkerWatch(clock)
    for number in range(20):
        usual = remote_prompt(watch, "b", "y")
        attempt = remote_prompt(watch, "a", "x", awaits=source)
        if not source:
            attempt.note_opening_link()
        clock.now_s += 0.05
        usual.note_prompt_done(is_finished=True)
        usual.end()
        clock.now_s += 0.95
        assert watch.usable(GROUP) == GROUP, number
        attempt.note_prompt_started()
        clock.now_s += 0.05
        attempt.note_prompt_done(is_finished=True)
        attempt.end()
    assert not watch.circuits()


def test_a_worker_that_begins_with_no_prompt_or_answers_no_peer_is_silent_soon():
    for peers, is_started in ((["x"], False), (["x", "y"], True)):
        clock = Clock()
        watch = WorkerWatch(clock)
        attempts = [remote_prompt(watch, "a", peer) for peer in peers]
        for attempt in attempts:
            if is_started:
                attempt.note_prompt_started()
        clock.now_s += 1.0
        assert list(watch.usable(GROUP)) == ["b"]
        for attempt in attempts:
            attempt.end()


def test_a_slow_admission_is_no_slow_worker_and_one_that_never_comes_is_silence():
    clock = Clock()
    watch = WorkerWatch(clock)
    for _ in range(20):
        for worker_id, took_s in (("a", 0.2), ("b", 0.001)):
            attempt = AttemptWatch(watch, worker_id, token_s=0.001)
            asked = attempt.asked()
            clock.now_s += took_s
            attempt.answered(asked)
            attempt.end()
        assert watch.usable(GROUP) == GROUP
    attempt = AttemptWatch(watch, "a", token_s=0.001)
    attempt.asked()
    clock.now_s += 1.0
    assert watch.usable(GROUP) == ["b"]
    attempt.end()


def test_an_answer_of_one_token_is_judged_without_a_handoff():
    clock = Clock()
    watch = WorkerWatch(clock)
    for took_s in [0.05] * 8 + [0.9] * 8:
        for worker_id, own_s in (("b", 0.05), ("a", took_s)):
            attempt = remote_prompt(watch, worker_id, "x")
            attempt.note_prompt_started()
            clock.now_s += own_s
            attempt.note_prompt_done(is_finished=True)
            attempt.end()
            watch.usable(GROUP)
    assert [report.worker_id for report in watch.circuits()] == ["a"]


def test_a_last_resort_is_a_slow_worker_and_no_broken_gpu():
    watch = WorkerWatch(Clock())
    for _ in range(3):
        watch.failed("a", [])
    assert list(watch.usable(("a", "b", "c", "d"))) == ["b", "c", "d"]
    watch.note_gpu("b", GpuJudgement(GpuState.OUT, 0.0, ("lost",)))
    assert list(watch.last_resort(("a", "b", "c", "d"))) == ["a", "c", "d"]
