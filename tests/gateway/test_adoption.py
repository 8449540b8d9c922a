"""Calls that continue where another gateway left them: stored, adopted, and their seeds."""

import contextlib

import msgspec
import pytest

from gateway.requests.call import Call, StoredCall
from gateway.types import AskedSampling
from services.runtime.errors import AlreadyExists, DeadlineExceeded, InvalidRequest

ANSWER_TEXT = "hello world, naïve café 🙂 日本語 end"


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    return pair_type(answer)


def call(**sampling):
    asked = AskedSampling(**{"max_tokens": 100, **sampling})
    return Call(operation="text_completion", request_id="named", prompts=[[5, 6, 7]], sampling=asked)


async def stored_of(system, **sampling):
    """The call as its gateway stores it."""
    with await system.gateway.requests.accept(call(**sampling)) as accepted:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(accepted.to_stored()), type=StoredCall)


def emitted(stored, token_ids):
    choice = msgspec.structs.replace(stored.choices[0], emitted_token_ids=token_ids)
    return msgspec.structs.replace(stored, choices=[choice])


async def run(system, stored):
    requests = system.gateway.requests
    with requests.adopt(stored) as accepted:
        async with contextlib.aclosing(requests.run(accepted.specs[0])) as deltas:
            return [delta async for delta in deltas]


@pytest.mark.parametrize("num_before", [1, 2, 5, 9, 12])
async def test_an_adopted_answer_goes_on_after_its_last_token(make_system, pair, answer, tokenizer, num_before):
    system = await make_system()
    await system.add_pair(pair)
    stored = await stored_of(system)
    before, after = [await run(system, emitted(stored, answer[:count])) for count in (0, num_before)]
    assert [token for delta in before for token in delta.token_ids] == answer
    assert [token for delta in after for token in delta.token_ids] == answer[num_before:]
    assert after[0].first_index == num_before
    assert (after[-1].finish_reason, after[-1].usage.completion_tokens) == ("stop", len(answer))
    assert (after[-1].usage.prompt_tokens, after[-1].usage.decode_s < 5.0) == (3, True)
    skipped = system.gateway.requests.new_text(_generation(system, stored)).push(answer[:num_before]).text
    assert skipped + "".join(delta.text for delta in after) == ANSWER_TEXT
    spec = system.workers["decode-0"].attempts[-1].spec
    assert list(spec.emitted_token_ids) == answer[:num_before]
    assert spec.sampling.seed == stored.choices[0].sampling.seed


async def test_each_adoption_has_its_own_name_towards_workers(make_system, pair):
    system = await make_system()
    await system.add_pair(pair)
    stored = await stored_of(system)
    for _ in range(2):
        await run(system, stored)
    names = {attempt.spec.id.request_id for attempt in system.workers["decode-0"].attempts}
    assert len(names) == 2
    assert all(name.startswith("named.") for name in names)


@pytest.mark.parametrize(
    ("sampling", "num_emitted", "reason"),
    [({}, None, "stop"), ({"max_tokens": 4}, 4, "length"), ({"stop": ["wor"]}, None, "stop")],
    ids=["stop token", "length", "stop text"],
)
async def test_an_answer_that_has_its_end_needs_no_worker(
    make_system, answer, tokenizer, sampling, num_emitted, reason
):
    system = await make_system()
    stored = await stored_of(system, **sampling)
    if "stop" in sampling:
        num_emitted = next(n for n in range(len(answer)) if "wor" in tokenizer.decode(answer[:n]))
    token_ids = answer[:num_emitted]
    (last,) = await run(system, emitted(stored, token_ids))
    assert (last.first_index, last.token_ids, last.text, last.finish_reason) == (len(token_ids), [], "", reason)
    assert last.usage.completion_tokens == len(token_ids)


async def test_text_that_was_held_back_comes_with_the_end(make_system, answer, tokenizer):
    system = await make_system()
    end = tokenizer.decode(answer[:4])[-1]
    stored = await stored_of(system, max_tokens=4, stop=[end + "never"])
    (last,) = await run(system, emitted(stored, answer[:4]))
    assert (last.text, last.finish_reason) == (end, "length")


async def test_what_cannot_be_gone_on_with_is_refused(make_system, answer):
    system = await make_system()
    stored = await stored_of(system, max_tokens=4)
    requests = system.gateway.requests
    for wrong in (
        emitted(stored, answer[:5]),
        emitted(stored, [10**6]),
        msgspec.structs.replace(stored, request_id="no name\n"),
        msgspec.structs.replace(stored, facts=msgspec.structs.replace(stored.facts, service_class="soon")),
        msgspec.structs.replace(stored, choices=[msgspec.structs.replace(stored.choices[0], prompt_token_ids=[])]),
        msgspec.structs.replace(
            stored, choices=[msgspec.structs.replace(stored.choices[0], prompt_token_ids=[5] * 510)]
        ),
        msgspec.structs.replace(stored, choices=[]),
        *(
            msgspec.structs.replace(
                stored,
                choices=[
                    msgspec.structs.replace(
                        stored.choices[0], sampling=msgspec.structs.replace(stored.choices[0].sampling, **changes)
                    )
                ],
            )
            for changes in (
                {"min_tokens": -1},
                {"min_tokens": 2**62},
                {"top_k": 2**62},
                {"stop_token_ids": (-1,)},
                {"logprobs": -5},
                {"temperature": float("nan")},
                {"top_p": 0.0},
                {"repetition_penalty": 1e308},
                {"seed": 2**64},
            )
        ),
    ):
        with pytest.raises(InvalidRequest):
            requests.adopt(wrong)
    with pytest.raises(DeadlineExceeded):
        requests.adopt(msgspec.structs.replace(stored, remaining_s=0.0))
    with requests.adopt(stored), pytest.raises(AlreadyExists):
        requests.adopt(stored)
    with requests.adopt(stored):
        pass


async def test_an_idempotency_key_stands_in_for_a_seed(make_system):
    seeds = []
    for seed in (1, 2):
        system = await make_system(seed=seed)
        for key, tenant in (("a", ""), ("a", "t"), ("b", ""), ("", "")):
            keyed = msgspec.structs.replace(call(), idempotency_key=key, tenant=tenant)
            with await system.gateway.requests.accept(keyed) as accepted:
                seeds.append(accepted.specs[0].sampling.seed)
        given = msgspec.structs.replace(call(seed=5), idempotency_key="a")
        with await system.gateway.requests.accept(given) as accepted:
            assert accepted.specs[0].sampling.seed == 5
    assert seeds[:3] == seeds[4:7]
    assert seeds[3] != seeds[7]
    assert len(set(seeds)) == 5


def _generation(system, stored):
    with system.gateway.requests.adopt(stored) as accepted:
        return accepted.specs[0]
