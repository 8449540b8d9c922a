import math
from typing import Any

import pytest

from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import StepItem
from services.runtime.errors import InvalidRequest


def sequence(prompt: list[int], emitted: list[int] | None = None, **sampling: Any) -> Sequence:
    return Sequence(
        ("r", 1), prompt, sampling=Sampling(**{"max_tokens": 4, **sampling}), emitted_token_ids=emitted or []
    )


class TestSampling:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_tokens", 0),
            ("min_tokens", -1),
            ("min_tokens", 5),
            ("temperature", -0.1),
            ("temperature", math.inf),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("top_k", -1),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("seed", 2**64),
            ("seed", -(2**63) - 1),
            ("presence_penalty", math.inf),
            ("frequency_penalty", -math.inf),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", math.inf),
            ("logit_bias", {1: math.inf}),
            ("logprobs", -1),
        ],
    )
    def test_out_of_range_names_the_field(self, name: str, value: Any) -> None:
        with pytest.raises(InvalidRequest, match=name) as caught:
            Sampling(**{"max_tokens": 4, name: value})
        assert caught.value.field == name

    @pytest.mark.parametrize(
        "name",
        ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"],
    )
    def test_nan_is_out_of_range(self, name: str) -> None:
        with pytest.raises(InvalidRequest, match=name):
            Sampling(**{"max_tokens": 4, name: math.nan})
        with pytest.raises(InvalidRequest, match="logit_bias"):
            Sampling(max_tokens=4, logit_bias={3: math.nan})

    def test_zero_and_nearly_zero_temperature_are_greedy(self) -> None:
        assert Sampling(max_tokens=1, temperature=0).is_greedy
        assert Sampling(max_tokens=1, temperature=1e-9).is_greedy
        assert not Sampling(max_tokens=1, temperature=0.01).is_greedy


class TestSequence:
    def test_counts(self) -> None:
        seq = sequence([5, 6, 7], [8, 9])
        assert seq.token_ids == [5, 6, 7, 8, 9]
        assert seq.prompt_token_ids == [5, 6, 7]
        assert (seq.num_prompt_tokens, seq.num_emitted_tokens, seq.num_generated_tokens) == (3, 2, 2)
        assert (seq.num_tokens, seq.num_uncomputed_tokens, seq.max_num_tokens) == (5, 5, 7)
        seq.num_computed_tokens = 5
        seq.append_token(1)
        assert (seq.num_emitted_tokens, seq.num_generated_tokens, seq.num_uncomputed_tokens) == (2, 3, 1)

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="no tokens"):
            sequence([], [1])

    def test_length_counts_emitted_tokens(self) -> None:
        seq = sequence([1], [2, 3, 4], max_tokens=4)
        assert seq.finish_reason() is None
        seq.append_token(5)
        assert seq.finish_reason() == "length"

    def test_a_stop_token_ends_it_and_wins_over_length(self) -> None:
        seq = sequence([9], max_tokens=2, stop_token_ids=frozenset({9}))
        assert seq.finish_reason() is None  # a stop token in the prompt does not end it
        seq.append_token(3)
        assert seq.finish_reason() is None
        seq.append_token(9)
        assert seq.finish_reason() == "stop"

    def test_no_stop_before_min_tokens(self) -> None:
        seq = sequence([1], [9, 9], max_tokens=8, min_tokens=2, stop_token_ids=frozenset({9}))
        assert seq.finish_reason() is None
        seq.append_token(9)
        assert seq.finish_reason() == "stop"

    def test_generated_counts_follow_however_tokens_come(self) -> None:
        seq = sequence([1, 1, 2], [2, 3])
        assert seq.generated_counts() == {2: 1, 3: 1}
        seq.append_token(3)
        seq.token_ids.append(1)
        assert seq.generated_counts() == {2: 1, 3: 2, 1: 1}
        assert seq.prompt_token_set() == {1, 2}


class TestStepItem:
    def test_samples_only_at_the_end_and_if_wanted(self) -> None:
        seq = sequence([1, 2, 3])
        seq.num_computed_tokens = 1
        assert not StepItem(seq, 1).is_sampled
        assert StepItem(seq, 2).is_sampled
        assert not StepItem(seq, 2, wants_token=False).is_sampled


class Recorder:
    """A grammar that keeps what it was given, call by call."""

    def __init__(self, given: list[int]) -> None:
        self.calls: list[list[int]] = [given] if given else []

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.calls))

    def advance(self, token_ids: list[int]) -> None:
        self.calls.append(token_ids)

    def allowed(self) -> bytes:
        return bytes([self.num_tokens])


class TestGrammar:
    def test_none(self) -> None:
        assert Sequence("r", [1], sampling=Sampling(max_tokens=3)).allowed_tokens() is None

    @pytest.mark.parametrize("num_given", range(4))
    def test_it_is_given_what_it_lacks_of_the_answer(self, num_given: int) -> None:
        emitted = [5, 6, 7]
        grammar = Recorder(emitted[:num_given])
        resumed = Sequence("r", [1, 2], sampling=Sampling(max_tokens=9), emitted_token_ids=emitted, grammar=grammar)
        assert resumed.allowed_tokens() == b"\x03"
        resumed.append_token(8)
        assert resumed.allowed_tokens() == b"\x04"
        assert resumed.allowed_tokens() == b"\x04"
        assert [token for call in grammar.calls for token in call] == [5, 6, 7, 8]
