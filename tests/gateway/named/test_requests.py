"""Named requests without workers: many readers on two gateways that share a Redis."""

import asyncio
import contextlib
import itertools
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.named.ask import ask_to_resume
from gateway.named.journal import (
    digest_of,
)
from gateway.named.memory import MemoryBounds
from gateway.named.requests import Journals
from gateway.observability.tracing import NO_TRACE
from gateway.requests.call import AcceptedCall, AnswerSpec, RequestFacts, StoredChoice, Totals
from gateway.types import AskedSampling, Delta, TokenLogprobs, Usage
from services.cluster.journal_room import JournalRoom
from services.cluster.journals import JournalStore
from services.cluster.redis_store import Store
from services.runtime.clock import SYSTEM_CLOCK, Deadline
from services.runtime.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    RequestCancelled,
    StoreUnavailable,
    WorkerUnavailable,
)
from tests.examples import examples
from tests.gateway.named.calls import keyed, named, sampling, text_of
from tests.waiting import HANG_LIMIT_S, settle, until


class FakeRequests:
    """Generates answers that are a function of the seed; `speed` says how many tokens come at once."""

    def __init__(self, tokenizer, answer_ids, *, source=None):
        self.tokenizer = tokenizer
        self.answer_ids = list(answer_ids)
        self.source = source or random.Random(1)
        self.active = set()
        self.runs = []
        self.num_running = 0
        self.held_at = None
        self.released = asyncio.Event()
        self.failure = None

    def answer_of(self, how):
        start = how.seed % 7
        return [*self.answer_ids[start:], *self.answer_ids[:start], 1][: how.max_tokens]

    async def accept(self, call):
        await asyncio.sleep(0)
        first = call.sampling.seed
        if first is None:
            first = (
                int(digest_of(call.idempotency_key)[:8], 16) if call.idempotency_key else self.source.getrandbits(20)
            )
        how = [
            sampling(
                seed=first + choice,
                max_tokens=call.sampling.max_tokens or 1000,
                stop=tuple(call.sampling.stop),
                logprobs=call.sampling.logprobs,
            )
            for choice in range(call.num_choices)
        ]
        prompt = list(call.prompts[0])
        return self._begin(call.request_id, [StoredChoice(prompt, each) for each in how], call.tenant)

    def only_identity(self, model):
        return "weights"

    def adopt(self, stored, call=None):
        return self._begin(stored.request_id, stored.choices, stored.facts.tenant)

    def _begin(self, request_id, choices, tenant):
        if (tenant, request_id) in self.active:
            raise AlreadyExists("running")
        self.active.add((tenant, request_id))
        totals = Totals()
        specs = [
            AnswerSpec(
                request_id=f"{request_id}.{number}",
                choice=number,
                model="tiny",
                eos_token_ids=(1,),
                prompt_token_ids=choice.prompt_token_ids,
                sampling=choice.sampling,
                facts=RequestFacts(operation="text_completion", tenant=tenant),
                deadline=Deadline.after(60.0),
                span=NO_TRACE,
                totals=totals,
                arrived_s=0.0,
                arrived_unix_ns=0,
                emitted_token_ids=choice.emitted_token_ids,
            )
            for number, choice in enumerate(choices)
        ]
        return AcceptedCall(
            specs,
            request_id=request_id,
            span=NO_TRACE,
            close=lambda: self.active.discard((tenant, request_id)),
        )

    def new_text(self, spec):
        return text_of(self.tokenizer, spec.sampling)

    async def run(self, spec, fast_path=None):
        """Begins after the emitted tokens, which must be the right ones."""
        how = spec.sampling
        answer = self.answer_of(how)
        emitted = list(spec.emitted_token_ids)
        assert answer[: len(emitted)] == emitted
        text = text_of(self.tokenizer, how)
        taken = text.push(emitted)
        self.runs.append(spec)
        self.num_running += 1
        try:
            index, reason = len(emitted), "stop" if taken.is_stopped else None
            while reason is None:
                if self.held_at is not None and index >= self.held_at:
                    await self.released.wait()
                if self.failure is not None and index >= 3:
                    raise self.failure
                await asyncio.sleep(self.source.choice((0, 0, 0.002)))
                taken = text.push(answer[index : index + self.source.randint(1, 3)])
                part = answer[index : index + taken.num_tokens]
                index += len(part)
                reason = "stop" if taken.is_stopped else "length" if index == len(answer) else None
                logprobs = None if how.logprobs is None else [TokenLogprobs(-float(each), []) for each in part]
                usage = None if reason is None else usage_of(len(spec.prompt_token_ids), index)
                yield Delta(index - len(part), part, taken.text, logprobs, reason, usage)
            if index == len(emitted):
                usage = usage_of(len(spec.prompt_token_ids), index)
                yield Delta(index, [], "", None, reason, usage)
        finally:
            self.num_running -= 1


def usage_of(num_prompt, num_tokens):
    return Usage(num_prompt, 0, num_tokens, 0.0, 0.0, 0.0, 0.0)


class World:
    """Two gateways on one Redis."""

    def __init__(self, url, tokenizer, answer_ids, seed=1, **settings):
        cluster = f"journal-{next(_WORLDS)}-{os.getpid()}"
        source = random.Random(seed)
        self.stores = [Store(url, cluster=cluster, timeout_s=2.0, breaker_open_s=0.05) for _ in range(2)]
        self.requests = [FakeRequests(tokenizer, answer_ids, source=source) for _ in range(2)]
        self.journals = [
            Journals(requests, JournalStore(store), gateway_incarnation=f"{number}" * 32, **settings)
            for number, (requests, store) in enumerate(zip(self.requests, self.stores, strict=True))
        ]

    async def __aenter__(self):
        for journals in self.journals:
            journals.start()
        return self

    async def __aexit__(self, *exception):
        for journals, store in zip(self.journals, self.stores, strict=True):
            await journals.close()
            await store.close()
        assert all(requests.num_running == 0 and not requests.active for requests in self.requests)


_WORLDS = itertools.count()


class Client:
    """What one client has read of one request, over all its connections."""

    def __init__(self, make_ask):
        self.make_ask = make_ask
        self.last_id = None
        self.texts, self.tokens, self.reasons = {}, {}, {}

    @property
    def is_done(self):
        return bool(self.reasons) and all(self.reasons.values())

    async def read(self, journals, num_parts=10**9):
        """Reads some parts, or to the end."""
        async with journals.attach(self.make_ask(self.last_id)) as reader:
            for choice in range(len(reader.answers)):
                self.reasons.setdefault(choice, None)
            async with contextlib.aclosing(reader.parts()) as parts:
                async for part in parts:
                    self.take(part)
                    num_parts -= 1
                    if num_parts <= 0:
                        return

    def take(self, part):
        tokens = self.tokens.setdefault(part.choice, [])
        assert part.is_first == (not tokens) == bool(part.opening_id)
        assert part.delta.first_index == len(tokens)
        assert self.reasons[part.choice] is None
        tokens += part.delta.token_ids
        self.texts[part.choice] = self.texts.get(part.choice, "") + part.delta.text
        self.reasons[part.choice] = part.delta.finish_reason
        self.last_id = part.event_id

    async def read_through(self, journals, tries=200):
        for _ in range(tries):
            try:
                return await self.read(journals)
            except (WorkerUnavailable, Overloaded, RequestCancelled):
                await asyncio.sleep(0.01)
        raise AssertionError("never came to an end")

    def check(self, requests, seed, num_choices, **how):
        for choice in range(num_choices):
            expected = sampling(seed=seed + choice, max_tokens=how.get("max_tokens") or 1000, stop=how.get("stop", ()))
            token_ids = requests.answer_of(expected)
            text = text_of(requests.tokenizer, expected)
            taken = text.push(token_ids)
            assert self.tokens[choice] == token_ids[: taken.num_tokens]
            assert self.texts[choice] == taken.text + ("" if taken.is_stopped else text.finish())
            assert self.reasons[choice] == ("stop" if taken.is_stopped else "length")


steps = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["leave", "leave", "leave", "flush", "redis away", "cancelled"]),
        st.integers(0, 12),
    ),
    max_size=6,
)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    clients=st.lists(steps, min_size=1, max_size=3),
    seed=st.integers(0, 2**20),
    num_choices=st.integers(1, 2),
    max_tokens=st.sampled_from([None, 1, 5]),
    stop=st.sampled_from([(), ("there",)]),
)
def test_whatever_happens_each_client_reads_the_one_answer(
    redis_url, model_tokenizer, answer_ids, clients, seed, num_choices, max_tokens, stop
):
    asked = {"num_choices": num_choices, "sampling": AskedSampling(seed=seed, max_tokens=max_tokens, stop=stop)}

    async def live(world, client, plan):
        for gateway, what, number in plan:
            if client.is_done:
                break
            journals = world.journals[gateway]
            if what == "flush":
                with contextlib.suppress(Exception):
                    await world.stores[0]._client.flushdb()
            elif what == "redis away":
                world.stores[gateway]._breaker.trip(SYSTEM_CLOCK.monotonic())
            elif what == "cancelled":
                task = asyncio.ensure_future(client.read(journals))
                await asyncio.sleep(number / 1000)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, WorkerUnavailable):
                    await task
            else:
                with contextlib.suppress(WorkerUnavailable):
                    await client.read(journals, number + 1)
        if not client.is_done:
            await client.read_through(world.journals[len(plan) % 2])
        client.check(world.requests[0], seed, num_choices, max_tokens=max_tokens, stop=stop)

    async def play():
        async with World(redis_url, model_tokenizer, answer_ids, seed) as world, asyncio.timeout(HANG_LIMIT_S):
            made = [Client(lambda last: keyed(last=last, **asked)) for _ in clients]
            await asyncio.gather(*(live(world, *each) for each in zip(made, clients, strict=True)))

    asyncio.run(play())


@pytest.fixture
async def world(redis_url, model_tokenizer, answer_ids):
    async with World(redis_url, model_tokenizer, answer_ids) as made:
        yield made


async def test_one_generation_serves_all_who_come_with_the_key(world):
    requests = world.requests[0]
    clients = [Client(lambda last: keyed(last=last, sampling=AskedSampling(seed=3))) for _ in range(5)]
    await asyncio.gather(*(client.read(world.journals[0]) for client in clients))
    await clients[0].read(world.journals[0])
    late = Client(lambda last: keyed(last=last, sampling=AskedSampling(seed=3)))
    await late.read(world.journals[0])
    for client in (*clients, late):
        client.check(requests, 3, 1)
    assert len(requests.runs) == 1


async def test_a_finished_answer_is_read_on_another_gateway_without_generating_it(world):
    first = Client(lambda last: keyed(last=last))
    await first.read(world.journals[0])
    await world.journals[0]._writer.flush()
    second = Client(lambda last: keyed(last=last))
    await second.read(world.journals[1])
    assert (second.tokens, second.texts, second.reasons) == (first.tokens, first.texts, first.reasons)
    assert world.requests[1].runs == []


async def test_generation_ends_with_its_last_reader_and_goes_on_from_its_tokens(world):
    requests = world.requests[0]
    requests.held_at = 6
    client = Client(lambda last: named(last=last, sampling=AskedSampling(seed=2)))
    other = Client(lambda last: named(last="mine/-", sampling=AskedSampling(seed=2)))
    reading = asyncio.ensure_future(client.read(world.journals[0]))
    await until(lambda: len(client.tokens.get(0, ())) >= 6)
    watching = asyncio.ensure_future(other.read(world.journals[0]))
    await until(lambda: len(other.tokens.get(0, ())) >= 6)
    reading.cancel()
    await settle()
    assert requests.num_running == 1
    watching.cancel()
    await until(lambda: requests.num_running == 0)
    assert not requests.active
    requests.held_at = None
    await client.read(world.journals[0])
    client.check(requests, 2, 1)
    assert len(requests.runs) == 2
    assert (
        list(requests.runs[1].emitted_token_ids)
        == requests.answer_of(requests.runs[1].sampling)[: len(requests.runs[1].emitted_token_ids)]
    )
    assert len(requests.runs[1].emitted_token_ids) >= 6


async def test_leaving_before_the_generation_has_begun_gives_everything_back(world):
    for _ in range(20):
        reading = asyncio.ensure_future(Client(lambda last: named(last=last)).read(world.journals[0]))
        for _ in range(world.requests[0].source.randint(0, 8)):
            await asyncio.sleep(0)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await until(lambda: not world.requests[0].active and world.requests[0].num_running == 0)


async def test_leaving_before_its_first_step_gives_the_id_back(world):
    for _ in range(2):
        async with world.journals[0].attach(named()) as reader:
            assert reader.request_id == "mine"
        await until(lambda: not world.requests[0].active)
    assert world.requests[0].runs == []


async def test_another_body_under_the_same_key_is_refused_here_and_elsewhere(world):
    await Client(lambda last: keyed()).read(world.journals[0])
    await world.journals[0]._writer.flush()
    for journals in world.journals:
        with pytest.raises(AlreadyExists) as conflict:
            await Client(lambda last: keyed(body="another")).read(journals)
        assert conflict.value.code == "idempotency_conflict"
        await Client(lambda last: keyed(key="another key", body="another")).read(journals)
    assert all(len(requests.runs) <= 2 for requests in world.requests)


async def test_other_tenants_have_keys_of_their_own(world):
    await Client(lambda last: keyed(tenant="a")).read(world.journals[0])
    await Client(lambda last: keyed(tenant="b", body="another")).read(world.journals[0])
    assert len(world.requests[0].runs) == 2


async def test_an_id_is_refused_while_it_runs_and_free_afterwards(world):
    requests = world.requests[0]
    requests.held_at = 2
    reading = asyncio.ensure_future(Client(lambda last: named()).read(world.journals[0]))
    await until(lambda: requests.num_running == 1)
    with pytest.raises(AlreadyExists) as refusal:
        await Client(lambda last: named()).read(world.journals[0])
    assert refusal.value.code is None
    requests.released.set()
    await reading
    again = Client(lambda last: named(body="another", sampling=AskedSampling(seed=5)))
    await again.read(world.journals[0])
    again.check(requests, 5, 1)


async def test_who_takes_over_ends_the_generation_of_the_gateway_before(world):
    old, new = world.requests
    old.held_at = 8
    client = Client(lambda last: keyed(last=last, sampling=AskedSampling(seed=4)))
    reading = asyncio.ensure_future(client.read(world.journals[0]))
    await until(lambda: len(client.tokens.get(0, ())) >= 8)
    await world.journals[0]._writer.flush()
    other = Client(lambda last: keyed(last=last, sampling=AskedSampling(seed=4)))
    await other.read(world.journals[1])
    with pytest.raises(WorkerUnavailable):
        await reading
    assert old.num_running == 0
    other.check(new, 4, 1)
    assert len(new.runs[0].emitted_token_ids) >= 8
    await client.read(world.journals[0])
    client.check(old, 4, 1)
    assert len(old.runs) == 1


async def test_a_client_that_is_ahead_of_redis_gets_the_rest_only(world):
    client = Client(lambda last: keyed(last=last))
    await client.read(world.journals[0], 5)
    await until(lambda: world.requests[0].num_running == 0)
    await world.journals[0]._writer.flush()
    await world.stores[0]._client.flushdb()
    num_read = len(client.tokens[0])
    await client.read(world.journals[1])
    assert num_read >= 5
    assert world.requests[1].runs[0].emitted_token_ids == ()
    assert client.tokens[0] == world.requests[1].answer_of(world.requests[1].runs[0].sampling)


async def test_what_cannot_be_the_same_again_is_not_made_up(world):
    client = Client(lambda last: named(last=last))
    await client.read(world.journals[0], 2)
    await until(lambda: world.requests[0].num_running == 0)
    await world.journals[0]._writer.flush()
    await world.stores[0]._client.flushdb()
    with pytest.raises(NotFound):
        await client.read(world.journals[1])
    assert world.requests[1].runs == []
    client.make_ask = lambda last: named(last=last, sampling=AskedSampling(temperature=0.0))
    with pytest.raises(NotFound):
        await Client(lambda last: ask_to_resume("mine", "", next_index=1, remaining_s=10)).read(world.journals[1])


async def test_resume_needs_only_the_id_also_on_another_gateway(world):
    for name, ask in (("given", keyed(request_id="given")), ("derived", keyed(key="other")), ("named", named("named"))):
        whole = Client(lambda last, ask=ask: ask)
        await whole.read(world.journals[0])
        await world.journals[0]._writer.flush()
        for journals in world.journals:
            resumed = Client(lambda last, ask=ask: ask_to_resume(ask.request_id, "", next_index=3, remaining_s=10))
            async with journals.attach(resumed.make_ask(None)) as reader:
                async with contextlib.aclosing(reader.parts()) as parts:
                    deltas = [part.delta async for part in parts]
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert (name, deltas[0].first_index, tokens) == (name, 3, whole.tokens[0][3:])
    assert world.requests[1].runs == []
    with pytest.raises(NotFound):
        await Client(lambda last: ask_to_resume("named", "tenant", next_index=0, remaining_s=10)).read(
            world.journals[0]
        )


async def test_logprobs_are_computed_again_elsewhere_and_are_the_same(world):
    asked = AskedSampling(seed=1, logprobs=0)
    seen = []
    for journals in (world.journals[0], world.journals[0], world.journals[1]):
        async with journals.attach(keyed(sampling=asked)) as reader:
            async with contextlib.aclosing(reader.parts()) as parts:
                deltas = [part.delta async for part in parts]
        seen.append([entry.logprob for delta in deltas for entry in delta.logprobs or ()])
        await journals._writer.flush()
    assert seen[0] == seen[1] == seen[2] == [-float(each) for each in world.requests[0].answer_of(sampling(seed=1))]
    assert [len(requests.runs) for requests in world.requests] == [1, 1]


async def test_failure_reaches_every_reader_and_the_next_one_goes_on(world):
    requests = world.requests[0]
    requests.failure, requests.held_at = Overloaded("full"), 3
    clients = [Client(lambda last: keyed(last=last, sampling=AskedSampling(seed=1))) for _ in range(3)]
    reading = [asyncio.ensure_future(each.read(world.journals[0])) for each in clients]
    await until(lambda: all(len(each.tokens.get(0, ())) >= 3 for each in clients))
    requests.released.set()
    results = await asyncio.gather(*reading, return_exceptions=True)
    assert [type(result) for result in results] == [Overloaded] * 3
    assert len(requests.runs) == 1
    requests.failure = None
    for client in clients:
        await client.read(world.journals[0])
        client.check(requests, 1, 1)
    assert len(requests.runs) == 2
    assert len(requests.runs[1].emitted_token_ids) >= 3


async def test_a_reader_that_does_not_read_holds_nobody_back(world):
    slow = Client(lambda last: keyed(last=last, sampling=AskedSampling(seed=1)))
    async with world.journals[0].attach(slow.make_ask(None)) as reader:
        async with contextlib.aclosing(reader.parts()) as parts:
            slow.reasons[0] = None
            slow.take(await anext(parts))
            quick = Client(lambda last: keyed(last=last, sampling=AskedSampling(seed=1)))
            await quick.read(world.journals[0])
            quick.check(world.requests[0], 1, 1)
            async for part in parts:
                slow.take(part)
    slow.check(world.requests[0], 1, 1)
    assert len(world.requests[0].runs) == 1


async def test_redis_away_is_no_reason_to_wait_or_to_fail(redis_url, model_tokenizer, answer_ids):
    async with World("redis://127.0.0.1:1", model_tokenizer, answer_ids) as world:
        for ask in (lambda last: keyed(last=last), lambda last: named("x", last=last)):
            client = Client(ask)
            await client.read(world.journals[0], 3)
            await client.read(world.journals[0])
            assert client.is_done


async def test_what_redis_did_not_take_at_once_is_written_before_any_token(world):
    world.requests[0].held_at = 0
    world.stores[0]._breaker.trip(SYSTEM_CLOCK.monotonic())
    reading = asyncio.ensure_future(Client(lambda last: keyed(last=last)).read(world.journals[0]))
    async with asyncio.timeout(HANG_LIMIT_S):
        while not await world.stores[1]._client.keys(world.stores[1].keys.journal_prefix + "*"):  # noqa: ASYNC110 - across sockets
            await asyncio.sleep(0.01)
    world.requests[0].released.set()
    await reading


async def test_a_journal_that_redis_forgot_is_written_again(world):
    requests = world.requests[0]
    requests.held_at = 4
    client = Client(lambda last: keyed(last=last))
    reading = asyncio.ensure_future(client.read(world.journals[0]))
    await until(lambda: len(client.tokens.get(0, ())) >= 4)
    await world.journals[0]._writer.flush()
    await world.stores[0]._client.flushdb()
    requests.released.set()
    await reading
    await world.journals[0]._writer.flush()
    elsewhere = Client(lambda last: keyed(last=last))
    await elsewhere.read(world.journals[1])
    assert (elsewhere.tokens, world.requests[1].runs) == (client.tokens, [])


async def test_garbage_in_redis_counts_as_nothing(world, redis_url):
    first = Client(lambda last: keyed(last=last))
    await first.read(world.journals[0])
    await world.journals[0]._writer.flush()
    client, prefix = world.stores[0]._client, world.stores[0].keys.journal_prefix
    for key in await client.keys(prefix + "*"):
        if await client.type(key) == b"hash":
            await client.hset(key, "call", b"\x93garbage")
    again = Client(lambda last: keyed(last=last))
    await again.read(world.journals[1])
    assert (again.tokens, len(world.requests[1].runs)) == (first.tokens, 1)


async def test_positions_of_another_call_are_refused_before_anything_is_generated(world):
    for wrong in ("mine/1,2", "other/1"):
        with pytest.raises(InvalidRequest) as refusal:
            await Client(lambda last, wrong=wrong: named(last=wrong, sampling=AskedSampling(seed=1))).read(
                world.journals[0]
            )
        assert refusal.value.code == "invalid_event_id"
    assert world.requests[0].runs == []
    await Client(lambda last: named(sampling=AskedSampling(seed=1))).read(world.journals[0])
    with pytest.raises(InvalidRequest):
        await Client(lambda last: named(last="mine/9999", sampling=AskedSampling(seed=1))).read(world.journals[0])


@pytest.mark.parametrize("position", ["9999f", "9999", "9999t", "3f", "3t"])
async def test_position_that_a_finished_answer_does_not_have_is_refused(world, position):
    await Client(lambda last: keyed()).read(world.journals[0])
    await world.journals[0]._writer.flush()
    ask = keyed()
    for journals in world.journals:
        with pytest.raises(InvalidRequest) as refusal:
            await Client(lambda last: keyed(last=f"{ask.request_id}/{position}")).read(journals)
        assert refusal.value.code == "invalid_event_id"


async def reading_until(world, make_ask, num_tokens=10):
    """A client of the first gateway that has `num_tokens`; the generation stops there until it is released."""
    world.requests[0].held_at = num_tokens
    client = Client(make_ask)
    reading = asyncio.ensure_future(client.read(world.journals[0]))
    await until(lambda: len(client.tokens.get(0, ())) >= num_tokens)
    return client, reading


async def written_as_owner(world):
    """Has the first gateway write, which tells it whether another one has continued its request."""
    for journal in world.journals[0]._tasks.values():
        world.journals[0]._writer.post(journal.record)
    await world.journals[0]._writer.flush()


async def test_who_leaves_at_its_deadline_takes_nothing_from_the_others(world):
    requests = world.requests[0]
    requests.held_at = 6
    hurried = Client(lambda last: keyed(last=last, sampling=AskedSampling(seed=1), deadline=Deadline.after(1.0)))
    patient = Client(lambda last: keyed(last=last, sampling=AskedSampling(seed=1)))
    readings = [asyncio.ensure_future(each.read(world.journals[0])) for each in (hurried, patient)]
    with pytest.raises(DeadlineExceeded):
        await readings[0]
    assert requests.num_running == 1
    requests.released.set()
    await readings[1]
    patient.check(requests, 1, 1)
    assert len(requests.runs) == 1


async def test_deadline_of_the_last_reader_ends_the_generation(world):
    requests = world.requests[0]
    requests.held_at = 6
    with pytest.raises(DeadlineExceeded):
        await Client(lambda last: keyed(deadline=Deadline.after(1.0))).read(world.journals[0])
    await until(lambda: requests.num_running == 0 and not requests.active)
    with pytest.raises(DeadlineExceeded):
        await Client(lambda last: keyed(deadline=Deadline.after(0.0))).read(world.journals[0])
    assert len(requests.runs) == 1


async def test_deadline_ends_also_the_wait_for_who_begins(world):
    requests = world.requests[0]
    accept, may_accept = requests.accept, asyncio.Event()

    async def accept_late(call):
        await may_accept.wait()
        return await accept(call)

    requests.accept = accept_late
    hurried = [
        asyncio.ensure_future(
            Client(lambda last, at_s=at_s: keyed(deadline=Deadline.after(at_s))).read(world.journals[0])
        )
        for at_s in (0.1, 0.05)
    ]
    patient = Client(lambda last: keyed(last=last))
    reading = asyncio.ensure_future(patient.read(world.journals[0]))
    results = await asyncio.gather(*hurried, return_exceptions=True)
    assert [type(result) for result in results] == [DeadlineExceeded] * 2
    assert not reading.done()
    may_accept.set()
    await reading
    assert len(requests.runs) == 1


async def test_own_claim_whose_answer_was_lost_ends_nothing(world):
    requests, store = world.requests[0], world.journals[0]._store
    client = Client(lambda last: keyed(last=last))
    await client.read(world.journals[0], 3)
    await until(lambda: not requests.active)
    await world.journals[0]._writer.flush()
    claim, claimed = store.claim, []

    async def claim_and_lose(mode, record, **checks):
        store.claim = claim
        claimed.append(await claim(mode, record, **checks))
        raise StoreUnavailable("no answer in time")

    store.claim = claim_and_lose
    requests.held_at = 20
    reading = asyncio.ensure_future(client.read(world.journals[0]))
    await until(lambda: len(client.tokens.get(0, ())) >= 20)
    await written_as_owner(world)
    assert [each.held.epoch for each in claimed] == [2]
    requests.released.set()
    await reading
    assert client.is_done


async def test_refused_key_with_the_id_of_a_running_request_leaves_it_alone(world):
    client, reading = await reading_until(world, lambda last: named(last=last))
    with pytest.raises(AlreadyExists):
        await Client(lambda last: keyed(request_id="mine", body="another")).read(world.journals[0])
    for ask in (named(last=client.last_id), ask_to_resume("mine", "", next_index=3, remaining_s=5.0)):
        async with world.journals[0].attach(ask) as reader:
            assert len(reader.answers[0].token_ids) >= 10
    await written_as_owner(world)
    world.requests[0].released.set()
    await reading
    assert client.is_done
    assert len(world.requests[0].runs) == 1


async def test_reusing_the_id_of_a_keyed_request_leaves_its_answer(world):
    def both(last=None):
        return keyed(request_id="mine", last=last, sampling=AskedSampling(seed=1))

    await Client(both).read(world.journals[0])
    await world.journals[0]._writer.flush()
    plain = Client(lambda last: named(body="another", last=last, sampling=AskedSampling(seed=2)))
    await plain.read(world.journals[0])
    await world.journals[0]._writer.flush()
    for journals in reversed(world.journals):
        again = Client(both)
        await again.read(journals)
        again.check(world.requests[0], 1, 1)
    assert [len(requests.runs) for requests in world.requests] == [2, 0]
    async with world.journals[0].attach(ask_to_resume("mine", "", next_index=0, remaining_s=5.0)) as reader:
        assert reader.answers[0].token_ids == plain.tokens[0]


async def test_index_into_several_answers_is_refused_and_takes_nothing_away(world):
    client, reading = await reading_until(world, lambda last: named("two", last=last, num_choices=2))
    await world.journals[0]._writer.flush()
    for journals in world.journals:
        with pytest.raises(InvalidRequest) as refusal:
            await Client(lambda last: ask_to_resume("two", "", next_index=0, remaining_s=5.0)).read(journals)
        assert refusal.value.field == "next_index"
    await written_as_owner(world)
    world.requests[0].released.set()
    await reading
    await world.journals[0]._writer.flush()
    for journals in world.journals:
        with pytest.raises(InvalidRequest):
            await Client(lambda last: ask_to_resume("two", "", next_index=3, remaining_s=5.0)).read(journals)
    assert client.is_done


async def test_position_in_another_request_takes_nothing_away(world):
    client, reading = await reading_until(world, lambda last: keyed(last=last))
    await world.journals[0]._writer.flush()
    for journals in world.journals:
        with pytest.raises(InvalidRequest) as refusal:
            await Client(lambda last: keyed(last="other/3")).read(journals)
        assert refusal.value.code == "invalid_event_id"
    await written_as_owner(world)
    world.requests[0].released.set()
    await reading
    assert client.is_done


async def test_what_nobody_reads_is_kept_within_a_bound(redis_url, model_tokenizer, answer_ids):
    bounds = MemoryBounds(kept_bytes=80_000)
    async with World(redis_url, model_tokenizer, answer_ids, bounds=bounds) as world:
        journals = world.journals[0]
        for number in range(20):
            await Client(lambda last, number=number: named(f"r{number}")).read(journals)
            assert journals._memory.num_kept_bytes <= 80_000
            assert sum(journal.cost_bytes for journal in journals._journals.values()) <= 80_000
        assert 0 < len(journals._journals) < 20
        assert "r19" in {journal.request_id for journal in journals._journals.values()}


async def test_a_call_that_cannot_be_kept_whole_is_refused_by_field_and_rule(world):
    journals = world.journals[0]
    for changes, field in (
        ({"prompts": [[2**20] * 900_000]}, "prompt"),
        ({"num_choices": 2, "sampling": AskedSampling(max_tokens=600_000)}, "max_tokens"),
    ):
        with pytest.raises(InvalidRequest, match="request with a name") as refused:
            await Client(lambda last, changes=changes: named(**changes)).read(journals)
        assert (refused.value.field, refused.value.code) == (field, "named_request_too_large")
        assert not journals._journals
        assert journals._memory.num_bytes == 0
        assert not world.requests[0].active


async def test_a_tenant_beyond_its_memory_is_refused_and_nobody_else(redis_url, model_tokenizer, answer_ids):
    async with World(
        redis_url, model_tokenizer, answer_ids, bounds=MemoryBounds(tenant_bytes=20_000), on_refusal=(told := []).append
    ) as world:
        journals, requests = world.journals[0], world.requests[0]
        requests.held_at = 1
        running = [asyncio.create_task(Client(lambda last: named("first", tenant="b")).read(journals))]
        await until(lambda: requests.num_running == 1)
        with pytest.raises(RateLimited) as refused:
            await Client(lambda last: named("second", tenant="b", num_choices=2)).read(journals)
        assert (refused.value.limit, told) == ("named_requests", ["named_requests"])
        running.append(asyncio.create_task(Client(lambda last: named("second", tenant="a")).read(journals)))
        await until(lambda: requests.num_running == 2)
        requests.released.set()
        await asyncio.gather(*running)
        await Client(lambda last: named("second", tenant="b")).read(journals)


async def test_a_tenant_beyond_its_room_in_redis_is_refused_and_nobody_else(redis_url, model_tokenizer, answer_ids):
    async with World(redis_url, model_tokenizer, answer_ids) as world:
        journals, requests = world.journals[0], world.requests[0]
        for each in world.journals:
            each._store.room = JournalRoom(tenant_bytes=6_000)
        for number in range(2):
            await Client(lambda last, number=number: named(f"r{number}", tenant="b")).read(journals)
        with pytest.raises(RateLimited) as refused:
            await Client(lambda last: named("r2", tenant="b")).read(world.journals[1])
        assert 1.0 <= refused.value.retry_after_s <= 60.0
        assert not requests.active
        await Client(lambda last: named("r2", tenant="a")).read(journals)


async def test_one_id_of_two_tenants_is_two_requests(world):
    journals, requests = world.journals[0], world.requests[0]
    requests.held_at = 1
    running = [
        asyncio.create_task(Client(lambda last, tenant=tenant: named("order-1", tenant=tenant)).read(journals))
        for tenant in ("a", "b")
    ]
    await until(lambda: requests.num_running == 2)
    with pytest.raises(AlreadyExists):
        await Client(lambda last: named("order-1", tenant="a")).read(journals)
    requests.released.set()
    await asyncio.gather(*running)


async def test_what_nobody_reads_is_forgotten(redis_url, model_tokenizer, answer_ids):
    async with World(redis_url, model_tokenizer, answer_ids, kept_s=0.0) as world:
        await Client(lambda last: named()).read(world.journals[0])
        await until(lambda: not world.journals[0]._journals)
        assert world.journals[0]._memory.num_bytes == 0
