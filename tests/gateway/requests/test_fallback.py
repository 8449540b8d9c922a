"""Which model answers a call: random models that refuse, wait, begin late or die, against the rules written down."""

import asyncio
import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.observability.tracing import NO_TRACE
from gateway.requests.call import AcceptedCall, AnswerSpec, RequestFacts, Totals
from gateway.requests.fallback import begun
from gateway.requests.fan_out import merged
from gateway.types import Delta
from services.runtime.clock import Deadline
from services.runtime.errors import (
    DeadlineExceeded,
    InternalError,
    Overloaded,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)
from tests.examples import examples
from tests.waiting import HANG_LIMIT_S

REFUSALS = {"full": Overloaded, "absent": WorkerUnavailable, "torn": TransferFailed}
ENDS = {"late": DeadlineExceeded, "broken": InternalError}
NUM_TOKENS = 3


class FakeModels:
    """`behaviours[model][choice]` says what becomes of an answer. Time passes only while no answer can move.

    full, absent, torn: another model may answer. late, broken: fails otherwise. silent: no worker ever takes it.
    begins: a worker takes it and it is answered. dies: a worker takes it and dies of it before the first token.
    """

    def __init__(self, behaviours, unable=()):
        self.behaviours = behaviours
        self.unable = set(unable)
        self.open = set()
        self.silent = set()
        self.failed = set()
        self.can_fall_back = True
        self.current = "m0"
        self.is_stuck = asyncio.Event()
        """Set when every open answer would wait for ever."""
        self.now_s = 100.0
        self.begun_by = []
        self.started = []
        self.fallbacks = []

    def monotonic(self):
        return self.now_s

    def look(self):
        """Lets time pass if nothing else can happen."""
        if self.open and self.open == self.silent:
            self.now_s += 1.0
            has_no_choice = self.begun_by or not self.can_fall_back
            if (
                has_no_choice
                and self.current not in self.failed
                and {model for model, _ in self.open} == {self.current}
            ):
                self.is_stuck.set()

    def is_served(self, model):
        return True

    def fallback_after_s(self, model):
        return 0.001

    async def run(self, spec, fast_path=None):
        key = (spec.model, spec.choice)
        self.open.add(key)
        self.started.append(key)
        behaviour = self.behaviours[spec.model][spec.choice]
        try:
            await asyncio.sleep(0)
            if behaviour in REFUSALS:
                raise REFUSALS[behaviour](behaviour)
            if behaviour in ENDS:
                raise ENDS[behaviour](behaviour)
            if behaviour == "silent":
                self.silent.add(key)
                self.look()
                await asyncio.Event().wait()
            spec.totals.placed.add(spec.choice)
            await asyncio.sleep(0)
            if behaviour == "dies":
                spec.totals.placed.discard(spec.choice)
                raise WorkerUnavailable("died")
            for index in range(NUM_TOKENS):
                self.begun_by.append(spec.model)
                yield Delta(index, [index], spec.model)
                await asyncio.sleep(0)
        except TandemError:
            self.failed.add(spec.model)
            raise
        finally:
            spec.totals.placed.discard(spec.choice)
            self.open.discard(key)
            self.silent.discard(key)
            self.look()

    async def prepare_fallback(self, accepted):
        await asyncio.sleep(0)
        while accepted.fallbacks:
            name, *others = accepted.fallbacks
            accepted.fallbacks = tuple(others)
            self.can_fall_back = bool(others)
            if name not in self.unable:
                self.current = name
                return generations_of(name, len(accepted.specs), self.now_s)
        self.look()
        return None

    def note_fallback(self, asked, answering, reason):
        self.fallbacks.append((asked, answering, reason))


def generations_of(model, num_choices, now_s=100.0):
    totals = Totals(waiting_since_s=now_s)
    return [
        AnswerSpec(
            request_id=f"{model}.{choice}",
            choice=choice,
            model=model,
            eos_token_ids=(),
            prompt_token_ids=(1,),
            sampling=None,
            facts=RequestFacts(operation="text_completion"),
            deadline=Deadline.after(60.0),
            span=NO_TRACE,
            totals=totals,
            arrived_s=100.0,
            arrived_unix_ns=0,
        )
        for choice in range(num_choices)
    ]


def accepted_call(num_choices, fallbacks):
    accepted = AcceptedCall(
        generations_of("m0", num_choices),
        request_id="r",
        span=NO_TRACE,
        close=lambda: None,
    )
    accepted.fallbacks = tuple(fallbacks)
    return accepted


async def answer(models, accepted):
    """The models that the deltas came from, in order."""
    models.can_fall_back = bool(accepted.fallbacks)
    async with begun(models, accepted, accepted.specs, clock=models) as streams:
        async with contextlib.aclosing(merged(streams)) as parts:
            return [delta.text async for _, delta in parts]


async def answer_or_wait(models, accepted):
    """What `answer` gave or raised; None where it would wait for ever."""
    task = asyncio.create_task(answer(models, accepted))
    stuck = asyncio.create_task(models.is_stuck.wait())
    async with asyncio.timeout(HANG_LIMIT_S):
        await asyncio.wait((task, stuck), return_when=asyncio.FIRST_COMPLETED)
    is_done = task.done()
    stuck.cancel()
    task.cancel()
    (came, _) = await asyncio.gather(task, stuck, return_exceptions=True)
    return came if is_done else None


BEHAVIOURS = st.sampled_from([*REFUSALS, *ENDS, "silent", "begins", "dies"])


@given(
    st.integers(1, 3).flatmap(
        lambda num_choices: st.lists(
            st.lists(BEHAVIOURS, min_size=num_choices, max_size=num_choices), min_size=1, max_size=4
        )
    ),
    st.sets(st.sampled_from(["m1", "m2", "m3"])),
)
@example([["full", "silent", "silent"], ["full", "full", "begins"], ["full", "full", "begins"]], set())
@settings(max_examples=examples(300), deadline=None)
async def test_no_answer_mixes_models_and_none_is_left_behind(rows, unable):
    behaviours = {f"m{number}": row for number, row in enumerate(rows)}
    names = list(behaviours)
    models = FakeModels(behaviours, unable)
    accepted = accepted_call(len(rows[0]), names[1:])
    came = await answer_or_wait(models, accepted)
    assert not models.open
    tried = list(dict.fromkeys(model for model, _ in models.started))
    # The chain's order, without those that cannot take the call; no model is asked twice.
    able = [name for name in names if name not in unable]
    assert tried == able[: len(tried)]
    assert len(models.started) == len(set(models.started))
    assert accepted.model == tried[-1]
    assert bool(accepted.fallback) == (len(tried) > 1)
    if accepted.fallback:
        assert accepted.fallback.startswith(f"m0 -> {accepted.model}; reason=")
        assert len(models.fallbacks) == len(tried) - 1
    # What one model has begun is left only where another of the call's answers failed, and before anybody saw it.
    for model in set(models.begun_by) - {tried[-1]}:
        assert {*REFUSALS, "dies"} & set(behaviours[model])
    # A model is left only for a refusal, or because none of its answers was placed.
    for model in tried[:-1]:
        assert {*REFUSALS, "dies"} & set(behaviours[model]) or set(behaviours[model]) == {"silent"}
    last = set(behaviours[tried[-1]])
    if came is None:
        assert "silent" in last
        # Every model that can take the call was asked, unless the answer has begun.
        assert models.begun_by or tried == able
    elif isinstance(came, list):
        assert last == {"begins"}
        assert came == [accepted.model] * NUM_TOKENS * len(rows[0])
    else:
        assert isinstance(came, TandemError)
        assert last != {"begins"}


async def test_without_a_chain_nothing_is_begun_before_it_is_read():
    models = FakeModels({"m0": ["begins"]})
    accepted = accepted_call(1, ())
    async with begun(models, accepted, accepted.specs) as (stream,):
        await asyncio.sleep(0)
        assert not models.started
        assert [delta.text async for delta in stream] == ["m0"] * NUM_TOKENS


async def test_what_the_first_model_said_is_what_the_call_fails_with():
    models = FakeModels({"m0": ["absent"], "m1": ["full"], "m2": ["full"]})
    with pytest.raises(WorkerUnavailable, match="absent"):
        await answer(models, accepted_call(1, ("m1", "m2")))
    assert models.fallbacks == [("m0", "m1", "unavailable"), ("m0", "m2", "unavailable")]


@pytest.mark.parametrize(
    ("failure", "reason"), [("full", "overloaded"), ("absent", "unavailable"), ("torn", "unavailable")]
)
async def test_another_model_answers_if_the_first_has_no_room_no_workers_or_no_working_path(failure, reason):
    models = FakeModels({"m0": [failure], "m1": ["begins"]})
    assert await answer(models, accepted_call(1, ("m1",))) == ["m1"] * NUM_TOKENS
    assert models.fallbacks == [("m0", "m1", reason)]


@pytest.mark.parametrize("end", ENDS)
async def test_other_failures_are_the_request_s_own(end):
    models = FakeModels({"m0": [end], "m1": ["begins"]})
    with pytest.raises(ENDS[end]):
        await answer(models, accepted_call(1, ("m1",)))
    assert not models.fallbacks


async def test_a_call_that_no_other_model_can_take_waits_on():
    models = FakeModels({"m0": ["silent"], "m1": ["begins"]}, unable=("m1",))
    assert await answer_or_wait(models, accepted_call(1, ("m1",))) is None
    assert models.started == [("m0", 0)]
    assert not models.open


async def test_a_call_that_a_worker_has_taken_is_left_there_however_long_its_prompt_takes():
    models = FakeModels({"m0": ["begins", "silent"], "m1": ["begins", "begins"]})
    accepted = accepted_call(2, ("m1",))
    models.can_fall_back = True
    run, prompt_done = models.run, asyncio.Event()

    async def takes_long(spec, fast_path):
        if spec.choice == 0:
            spec.totals.placed.add(0)
            await prompt_done.wait()
        async with contextlib.aclosing(run(spec)) as deltas:
            async for delta in deltas:
                yield delta

    models.run = takes_long
    task = asyncio.create_task(answer(models, accepted))
    while models.now_s < 110.0:  # ten times the patience, and each time it looks
        await asyncio.sleep(0.002)
        models.now_s += 1.0
    prompt_done.set()
    async with asyncio.timeout(HANG_LIMIT_S):
        while len(models.begun_by) < NUM_TOKENS:  # noqa: ASYNC110 - the condition is other tasks' state
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait((task,))
    assert models.begun_by == ["m0"] * NUM_TOKENS
    assert not models.fallbacks


async def test_a_failure_after_the_first_token_is_not_answered_by_another_model():
    models = FakeModels({"m0": ["begins", "begins"], "m1": ["begins", "begins"]})
    run = models.run

    async def breaks(spec, fast_path):
        async with contextlib.aclosing(run(spec)) as deltas:
            async for delta in deltas:
                if delta.first_index == 1 and spec.choice == 1:
                    raise WorkerUnavailable("gone")
                yield delta

    models.run = breaks
    with pytest.raises(WorkerUnavailable, match="gone"):
        await answer(models, accepted_call(2, ("m1",)))
    assert set(models.begun_by) == {"m0"}
    assert not models.open
