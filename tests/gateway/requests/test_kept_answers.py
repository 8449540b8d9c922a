"""Which answers are kept, and to which requests they are given again."""

import pytest

from gateway.observability.tracing import NO_TRACE
from gateway.requests.call import AnswerSpec, RequestFacts, Totals
from gateway.requests.kept_answers import MAX_ANSWER_TOKENS, KeptAnswers
from gateway.types import Sampling
from services.runtime.clock import Deadline

TOKENS = (7, 8, 9)
FACTS = {"operation": "text_completion", "tenant": "t"}
SAMPLING = {"max_tokens": 8, "temperature": 0.0, "seed": 1}


def spec(*, prompt=(1, 2), model="m", facts=None, sampling=None):
    return AnswerSpec(
        request_id="r.0",
        choice=0,
        model=model,
        eos_token_ids=(1,),
        prompt_token_ids=prompt,
        sampling=Sampling(**(SAMPLING | (sampling or {}))),
        facts=RequestFacts(**(FACTS | (facts or {}))),
        deadline=Deadline.after(60.0),
        span=NO_TRACE,
        totals=Totals(),
        arrived_s=0.0,
        arrived_unix_ns=0,
    )


def found(kept, asked, identities=frozenset({"w"})):
    answer = kept.find(asked, identities)
    return None if answer is None else answer.token_ids


def test_an_answer_is_found_by_its_request_only():
    kept = KeptAnswers({"m", "n"})
    kept.note(spec(), TOKENS, "w")
    assert found(kept, spec()) == TOKENS
    assert found(kept, spec(sampling={"seed": 2})) == TOKENS
    assert found(kept, spec(facts={"operation": "chat", "priority": 3})) == TOKENS
    for other in (
        spec(prompt=(1, 3)),
        spec(model="n"),
        spec(sampling={"max_tokens": 9}),
        spec(sampling={"stop": ("x",)}),
        spec(facts={"tenant": "u"}),
        spec(facts={"cache_salt": "s"}),
        spec(facts={"adapter": "sql"}),
    ):
        assert found(kept, other) is None


@pytest.mark.parametrize("sampling", [{"temperature": 0.1}, {"logprobs": 0}, {"prompt_logprobs": 0}])
def test_what_chance_or_more_than_tokens_is_a_part_of_is_not_kept(sampling):
    kept = KeptAnswers({"m"})
    kept.note(spec(sampling=sampling), TOKENS, "w")
    assert found(kept, spec(sampling=sampling)) is None


def test_nothing_is_kept_for_models_that_do_not_ask_for_it():
    kept = KeptAnswers(set())
    kept.note(spec(), TOKENS, "w")
    assert found(kept, spec()) is None


def test_an_answer_of_other_workers_than_todays_is_not_given():
    kept = KeptAnswers({"m"})
    kept.note(spec(), TOKENS, "w")
    assert found(kept, spec(), {"x"}) is None
    assert found(kept, spec(), {"x", "w"}) == TOKENS
    assert found(kept, spec(), frozenset()) == TOKENS


def test_the_least_recently_used_are_dropped():
    kept = KeptAnswers({"m"}, max_tokens=7)
    one, two, three = (spec(prompt=(number,)) for number in range(3))
    kept.note(one, TOKENS, "w")
    kept.note(one, TOKENS, "w")
    kept.note(two, TOKENS, "w")
    assert found(kept, one) == TOKENS
    kept.note(three, TOKENS, "w")
    assert [found(kept, each) for each in (one, two, three)] == [TOKENS, None, TOKENS]
    kept.note(two, range(MAX_ANSWER_TOKENS + 1), "w")
    assert [found(kept, each) for each in (one, two, three)] == [TOKENS, None, TOKENS]
