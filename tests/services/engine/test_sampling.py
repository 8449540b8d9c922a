import math
import random
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, ClassVar

import pytest
import torch

from services.engine import sampling as sampling_module
from services.engine.kernels.library import TOO_CLOSE, Kernels, load_kernels
from services.engine.sampling import draw_of
from services.engine.steps.guesses import Draw
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, NothingAllowed, SampledToken
from services.runtime import status
from services.runtime.errors import InvalidRequest, InvariantViolated
from tests.services.engine.noise import reference_noise


class With:
    """What the test at hand draws with."""

    kernels: Kernels | None = None


@pytest.fixture(autouse=True, params=["torch", "kernels"])
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(With, "kernels", load_kernels() if request.param == "kernels" else None)


def sample(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken | NonFiniteLogits]:
    return sampling_module.sample(logits, sequences, kernels=With.kernels)


def sequence(*, prompt: list[int] | None = None, emitted: list[int] | None = None, **sampling: Any) -> Sequence:
    return Sequence(
        "s", prompt or [1], sampling=Sampling(**{"max_tokens": 1000, **sampling}), emitted_token_ids=emitted or []
    )


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def random_logits(rows: int, vocab: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * scale


def choose(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    tokens = sample(logits, sequences)
    assert all(isinstance(token, SampledToken) for token in tokens)
    return [token.token_id for token in tokens if isinstance(token, SampledToken)]


def draw_many(logits: list[float], count: int, **sampling: Any) -> Counter[int]:
    """Draw `count` times from one distribution: one row per seed."""
    rows = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    return Counter(choose(rows, [sequence(seed=seed, **sampling) for seed in range(count)]))


def assert_follows(counts: Counter[int], probabilities: list[float]) -> None:
    """Chi-square goodness of fit, at 5 sigma of its normal approximation; impossible tokens must not occur."""
    total = sum(counts.values())
    statistic, degrees = 0.0, -1
    for token, probability in enumerate(probabilities):
        if probability == 0:
            assert counts[token] == 0
            continue
        expected = total * probability
        assert expected >= 5, "the test's own distribution is too thin"
        statistic += (counts[token] - expected) ** 2 / expected
        degrees += 1
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 5


def softmax(values: list[float]) -> list[float]:
    highest = max(values)
    weights = [math.exp(value - highest) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


# -- Plain-Python references -------------------------------------------------------------------------------------------


def reference_kept(logits: list[float], sampling: Sampling) -> set[int]:
    """Tokens that min-p, top-k and top-p leave, in this order, as vLLM has it; equal logits: the lower id first."""
    scaled = [value / sampling.temperature for value in logits]
    kept = set(range(len(logits)))
    if sampling.min_p > 0:
        probabilities = softmax(scaled)
        bound = sampling.min_p * max(probabilities) * (1 - 1e-12)
        kept = {i for i in kept if probabilities[i] >= bound}
    order = sorted(kept, key=lambda i: (-scaled[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        total = math.fsum(math.exp(scaled[i] - scaled[order[0]]) for i in order)
        mass = 0.0
        count = 0
        while mass < sampling.top_p * total and count < len(order):
            mass += math.exp(scaled[order[count]] - scaled[order[0]])
            count += 1
        order = order[:count]
    return set(order)


def reference_draw(logits: list[float], seq: Sequence) -> int:
    kept = reference_kept(logits, seq.sampling)
    return max(
        kept,
        key=lambda i: logits[i] / seq.sampling.temperature + reference_noise(seq.sampling.seed, seq.num_tokens, i),
    )


def reference_adjusted(logits: list[float], seq: Sequence) -> list[float]:
    """vLLM's order and formulas; frequency and presence are OpenAI's, repetition is that of CTRL (Keskar 2019)."""
    sampling = seq.sampling
    generated = seq.token_ids[seq.num_prompt_tokens :]
    adjusted = list(logits)
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    if len(generated) < sampling.min_tokens:
        for token in sampling.stop_token_ids:
            adjusted[token] = -math.inf
    for token in set(seq.token_ids):
        factor = 1 / sampling.repetition_penalty if adjusted[token] > 0 else sampling.repetition_penalty
        adjusted[token] *= factor
    for token, count in Counter(generated).items():
        adjusted[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    return adjusted


# -- Tests -------------------------------------------------------------------------------------------------------------


class TestGreedy:
    def test_takes_the_highest_and_of_equals_the_lowest_id(self) -> None:
        logits = logits_of([0, 3, 1, 3], [5, 5, 5, 5], [-3, -2, -1, -1])
        assert choose(logits, [sequence(temperature=0)] * 3) == [1, 0, 2]

    def test_filters_and_seed_do_not_matter(self) -> None:
        logits = random_logits(4, 100)
        greedy = choose(logits, [sequence(temperature=0)] * 4)
        others = [sequence(temperature=0, top_k=3, top_p=0.2, min_p=0.3, seed=i) for i in range(4)]
        assert choose(logits, others) == greedy == logits.argmax(-1).tolist()

    def test_no_noise_is_drawn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(*args: object) -> torch.Tensor:
            raise AssertionError("noise in a greedy step")

        monkeypatch.setattr(sampling_module, "gumbel_noise", forbidden)
        choose(random_logits(4, 100), [sequence(temperature=0)] * 4)

    def test_the_temperature_below_which_it_is_greedy_does_not_jump(self) -> None:
        logits = random_logits(50, 100)
        cold = choose(logits, [sequence(temperature=2e-5, seed=i) for i in range(50)])
        assert cold == logits.argmax(-1).tolist()

    def test_logits_are_left_as_they_were(self) -> None:
        logits = random_logits(3, 50)
        before = logits.clone()
        sample(
            logits,
            [
                sequence(logit_bias={3: 5.0}, logprobs=2),
                sequence(temperature=0, repetition_penalty=1.3),
                sequence(top_k=2, min_tokens=3, stop_token_ids=frozenset({1})),
            ],
        )
        assert torch.equal(logits, before)

    def test_nothing_in_nothing_out(self) -> None:
        assert sample(torch.empty((0, 10)), []) == []


class TestDistribution:
    LOGITS = (2.0, 1.0, 0.5, 0.0, -0.5, 1.5)

    def test_follows_softmax(self) -> None:
        assert_follows(draw_many(list(self.LOGITS), 6000), softmax(list(self.LOGITS)))

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_follows_temperature(self, temperature: float) -> None:
        expected = softmax([value / temperature for value in self.LOGITS])
        assert_follows(draw_many(list(self.LOGITS), 6000, temperature=temperature), expected)

    @pytest.mark.parametrize(
        "filters",
        [
            {"top_k": 3},
            {"top_p": 0.7},
            {"min_p": 0.2},
            {"top_k": 4, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
        ],
    )
    def test_follows_what_filters_leave(self, filters: dict[str, Any]) -> None:
        sampling = Sampling(max_tokens=1, **filters)
        kept = reference_kept(list(self.LOGITS), sampling)
        assert 1 < len(kept) < len(self.LOGITS)
        scaled = [v / sampling.temperature if i in kept else -math.inf for i, v in enumerate(self.LOGITS)]
        assert_follows(draw_many(list(self.LOGITS), 6000, **filters), softmax(scaled))

    def test_successive_positions_of_one_seed_follow_softmax_too(self) -> None:
        rows = torch.tensor(self.LOGITS).expand(6000, -1)
        sequences = [sequence(prompt=[1] * (1 + i), seed=77) for i in range(6000)]
        assert_follows(Counter(choose(rows, sequences)), softmax(list(self.LOGITS)))


class TestFilters:
    """Exact sets: every token that the reference keeps is drawn by the same noise, no other."""

    @pytest.mark.parametrize("vocab", [7, 100, 3000])
    def test_draws_equal_the_reference(self, vocab: int) -> None:
        chance = random.Random(vocab)
        count = 60 if vocab < 1000 else 16
        logits = random_logits(count, vocab, seed=vocab)
        # Coarse logits, as bfloat16 gives them, tie often: the cut must fall the same way.
        logits[::2] = (logits[::2] * 4).round() / 4
        sequences = [
            sequence(
                seed=chance.randrange(-(2**63), 2**63),
                temperature=chance.choice([0.3, 1.0, 2.0]),
                top_k=chance.choice([0, 0, 1, 5, 64, 65, 2000]),
                top_p=chance.choice([1.0, 1e-6, 0.3, 0.9, 0.999999]),
                min_p=chance.choice([0.0, 0.0, 0.01, 0.5, 1.0]),
                prompt=[1] * chance.randrange(1, 50),
                emitted=[1] * chance.randrange(0, 50),
            )
            for _ in range(count)
        ]
        expected = [reference_draw(row, seq) for row, seq in zip(logits.tolist(), sequences, strict=True)]
        assert choose(logits, sequences) == expected

    @pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.59}, {"min_p": 0.999}])
    def test_ties_at_the_cut(self, filters: dict[str, Any]) -> None:
        # Five of ten are equally likely: top-k 3 keeps the three of lowest id, top-p 0.59 of all … likewise.
        logits = [0.0, 9.0, 9.0, 0.0, 9.0, 9.0, 9.0, 0.0, 0.0, 0.0]
        expected = {"top_k": {1, 2, 4}, "top_p": {1, 2, 4}, "min_p": {1, 2, 4, 5, 6}}[next(iter(filters))]
        assert set(draw_many(logits, 300, **filters)) == expected

    def test_flat_distribution_with_more_ties_than_candidates(self) -> None:
        logits = torch.zeros((40, 5000))
        sequences = [sequence(seed=seed, top_k=2000) for seed in range(40)]
        drawn = choose(logits, sequences)
        assert max(drawn) < 2000
        assert drawn == [reference_draw([0.0] * 5000, seq) for seq in sequences]

    def test_top_k_one_and_tiny_top_p_are_greedy(self) -> None:
        logits = random_logits(20, 500)
        best = logits.argmax(-1).tolist()
        assert choose(logits, [sequence(seed=i, top_k=1) for i in range(20)]) == best
        assert choose(logits, [sequence(seed=i, top_p=1e-9) for i in range(20)]) == best
        assert choose(logits, [sequence(seed=i, min_p=1.0) for i in range(20)]) == best

    def test_top_k_beyond_the_vocabulary_keeps_all(self) -> None:
        logits = random_logits(20, 50)
        free = choose(logits, [sequence(seed=i) for i in range(20)])
        assert choose(logits, [sequence(seed=i, top_k=2**31 - 1) for i in range(20)]) == free

    def test_top_p_of_one_keeps_the_unlikeliest(self) -> None:
        # Their probability vanishes beside 1 in the running sum, yet they are possible.
        logits = [0.0] + [-40.0] * 3
        sampling = Sampling(max_tokens=1, top_k=4)
        assert reference_kept(logits, sampling) == {0, 1, 2, 3}
        kept = sampling_module._num_kept(
            torch.tensor([softmax(logits)], dtype=torch.float64), [sequence(top_k=4, top_p=1.0)]
        )
        assert kept.tolist() == [[4]]


class TestAdjustments:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"presence_penalty": 0.7},
            {"presence_penalty": -0.7},
            {"frequency_penalty": 0.4},
            {"repetition_penalty": 1.7},
            {"repetition_penalty": 0.6},
            {"logit_bias": {0: 3.5, 9: -100.0, 4: 0.25}},
            {"min_tokens": 5, "stop_token_ids": frozenset({2, 3, 11})},
            {"min_tokens": 4, "stop_token_ids": frozenset({2, 3, 11})},
            {
                "presence_penalty": 0.5,
                "frequency_penalty": 0.3,
                "repetition_penalty": 1.2,
                "logit_bias": {4: 2.0, 1: -3.0},
                "min_tokens": 9,
                "stop_token_ids": frozenset({8}),
            },
        ],
    )
    def test_formulas(self, arguments: dict[str, Any]) -> None:
        logits = random_logits(6, 12, seed=3)
        sequences = [sequence(prompt=[1, 2, 1, 7], emitted=[4, 4, 2, 9], temperature=0, **arguments) for _ in range(6)]
        adjusted = sampling_module._adjust(logits, sequences)
        expected = torch.tensor(
            [reference_adjusted(row, seq) for row, seq in zip(logits.tolist(), sequences, strict=True)]
        )
        assert torch.allclose(adjusted, expected, rtol=1e-6, atol=1e-6)
        assert choose(logits, sequences) == expected.argmax(-1).tolist()

    def test_penalties_count_emitted_and_generated_alike(self) -> None:
        logits = random_logits(1, 30, seed=4)
        resumed = sequence(prompt=[1, 2], emitted=[5, 5, 6], frequency_penalty=1.0, repetition_penalty=1.5)
        whole = sequence(prompt=[1, 2], frequency_penalty=1.0, repetition_penalty=1.5)
        sampling_module._adjust(logits, [whole])
        for token in (5, 5, 6):
            whole.append_token(token)
        assert torch.equal(sampling_module._adjust(logits, [resumed]), sampling_module._adjust(logits, [whole]))

    def test_a_penalty_next_to_nothing_leaves_something_to_choose(self) -> None:
        logits = torch.tensor([[1.0, 2.0, -3.0, 0.5]])
        for temperature in (0.0, 1.0):
            asked = sequence(prompt=[1, 2], emitted=[0], temperature=temperature, repetition_penalty=5e-39)
            token = sample(logits, [asked])[0]
            assert isinstance(token, SampledToken)
            assert token.token_id in (0, 1)

    def test_prompt_tokens_meet_only_the_repetition_penalty(self) -> None:
        logits = torch.ones((1, 10))
        adjusted = sampling_module._adjust(
            logits, [sequence(prompt=[3], presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=2.0)]
        )
        assert adjusted[0].tolist() == [1, 1, 1, 0.5, 1, 1, 1, 1, 1, 1]

    def test_rows_without_adjustments_keep_their_logits(self) -> None:
        logits = random_logits(3, 20)
        adjusted = sampling_module._adjust(logits, [sequence(), sequence(logit_bias={1: 9.0}), sequence()])
        assert torch.equal(adjusted[[0, 2]], logits[[0, 2]])
        assert sampling_module._adjust(logits, [sequence()] * 3) is logits

    def test_stop_tokens_come_only_after_min_tokens(self) -> None:
        logits = logits_of([0.0, 50.0, 1.0])
        for emitted, expected in ((0, 2), (1, 2), (2, 1)):
            seq = sequence(emitted=[0] * emitted, temperature=0, min_tokens=2, stop_token_ids=frozenset({1}))
            assert choose(logits, [seq]) == [expected]
            seq = sequence(emitted=[0] * emitted, seed=5, min_tokens=2, stop_token_ids=frozenset({1}))
            assert (choose(logits, [seq]) == [1]) == (expected == 1)

    def test_tokens_that_the_model_does_not_have_change_nothing(self) -> None:
        logits = random_logits(1, 10)
        seq = sequence(
            prompt=[99],
            emitted=[50],
            temperature=0,
            logit_bias={10: 100.0, -1: 100.0, 10**12: 100.0},
            min_tokens=5,
            stop_token_ids=frozenset({10, 2**40}),
            presence_penalty=1.0,
            repetition_penalty=2.0,
        )
        assert choose(logits, [seq]) == logits.argmax(-1).tolist()

    def test_bias_decides_a_draw(self) -> None:
        assert set(draw_many([0.0] * 20, 200, logit_bias={7: 100.0})) == {7}
        assert 7 not in draw_many([0.0] * 20, 200, logit_bias={7: -100.0})


class TestLogprobs:
    def test_are_of_the_models_own_distribution(self) -> None:
        logits = random_logits(1, 40)
        seq = sequence(
            temperature=0.3, top_k=5, logit_bias={3: 50.0}, prompt=[1], emitted=[2], presence_penalty=2.0, logprobs=4
        )
        (token,) = sample(logits, [seq])
        assert isinstance(token, SampledToken)
        assert token.token_id == 3
        expected = [math.log(p) for p in softmax(logits[0].tolist())]
        assert token.logprob == pytest.approx(expected[3], rel=1e-9)
        best = sorted(range(40), key=lambda i: (-expected[i], i))[:4]
        assert [id_ for id_, _ in token.top] == best
        assert [value for _, value in token.top] == pytest.approx([expected[i] for i in best], rel=1e-9)

    def test_ties_are_in_order_of_id(self) -> None:
        (token,) = sample(logits_of([1, 2, 2, 0, 2, 2]), [sequence(temperature=0, logprobs=3)])
        assert isinstance(token, SampledToken)
        assert [id_ for id_, _ in token.top] == [1, 2, 4]

    def test_zero_gives_only_the_chosen_and_none_gives_none(self) -> None:
        chosen, silent = sample(random_logits(2, 10), [sequence(temperature=0, logprobs=0), sequence(temperature=0)])
        assert isinstance(chosen, SampledToken)
        assert isinstance(silent, SampledToken)
        assert chosen.logprob is not None
        assert chosen.logprob < 0
        assert chosen.top == ()
        assert silent.logprob is None

    def test_more_than_the_vocabulary_gives_all(self) -> None:
        (token,) = sample(random_logits(1, 6), [sequence(logprobs=20)])
        assert isinstance(token, SampledToken)
        assert len(token.top) == 6
        assert math.fsum(math.exp(value) for _, value in token.top) == pytest.approx(1.0)


class TestFailures:
    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    @pytest.mark.parametrize("sampling", [{"temperature": 0}, {}, {"top_p": 0.5}, {"logit_bias": {0: 1.0}}])
    def test_a_poisoned_row_fails_alone(self, poison: float, sampling: dict[str, Any]) -> None:
        logits = random_logits(4, 200)
        good = choose(logits[[0, 1, 3]], [sequence(seed=i, **sampling) for i in (0, 1, 3)])
        logits[2, 150] = poison
        results = sample(logits, [sequence(seed=i, logprobs=None, **sampling) for i in range(4)])
        assert isinstance(results[2], NonFiniteLogits)
        assert [r.token_id for r in results if isinstance(r, SampledToken)] == good

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_of_no_finite_number_fails(self, value: float, temperature: float) -> None:
        logits = random_logits(2, 200)
        logits[1] = value
        good, bad = sample(logits, [sequence(temperature=temperature)] * 2)
        assert isinstance(good, SampledToken)
        assert isinstance(bad, NonFiniteLogits)

    @pytest.mark.parametrize(
        "sampling",
        [
            {"temperature": 0},
            {"temperature": 1.3},
            {"min_p": 0.01},
            {"top_p": 0.9},
            {"top_k": 500},
            {"repetition_penalty": 1.2, "prompt": [195, 3]},
            {"logit_bias": {190: 100.0}},
            {"logprobs": 3},
        ],
    )
    def test_a_masked_token_is_as_if_the_model_did_not_have_it(self, sampling: dict[str, Any]) -> None:
        logits = random_logits(20, 200)
        logits[:, 190:] = -math.inf
        sequences = [sequence(seed=seed, **sampling) for seed in range(len(logits))]
        assert sample(logits, sequences) == sample(logits[:, :190], sequences)

    def test_a_row_of_nan_with_everything_asked_for(self) -> None:
        logits = torch.full((2, 50), math.nan)
        results = sample(logits, [sequence(top_k=3, logprobs=5, repetition_penalty=2.0), sequence(temperature=0)])
        assert all(isinstance(result, NonFiniteLogits) for result in results)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_without_any_allowed_token_fails(self, temperature: float) -> None:
        everything = frozenset(range(8))
        seq = sequence(temperature=temperature, min_tokens=1, stop_token_ids=everything)
        bad, good = sample(torch.zeros((2, 8)), [seq, sequence(temperature=0)])
        assert isinstance(bad, NonFiniteLogits)
        assert good == SampledToken(0)

    def test_an_overflow_by_a_penalty_makes_its_token_the_likeliest(self) -> None:
        seq = sequence(prompt=[3], temperature=0, repetition_penalty=1e-40)
        (result,) = sample(torch.ones((1, 8)), [seq])
        assert result == SampledToken(3)


class TestIndependence:
    """A row's result is the same, bit by bit, whatever shares the batch."""

    @pytest.mark.parametrize("vocab", [331, 1024, 4097, 40_001])
    def test_alone_and_together(self, vocab: int) -> None:
        chance = random.Random(vocab)
        count = 24 if vocab < 10_000 else 8
        logits = random_logits(count, vocab, seed=vocab)
        sequences = [
            sequence(
                prompt=[chance.randrange(vocab) for _ in range(20)],
                emitted=[chance.randrange(vocab) for _ in range(10)],
                seed=chance.randrange(-(2**63), 2**63),
                temperature=chance.choice([0.0, 0.7, 1.0, 1.5]),
                top_k=chance.choice([0, 0, 3, 50, 500]),
                top_p=chance.choice([1.0, 0.5, 0.95]),
                min_p=chance.choice([0.0, 0.02]),
                repetition_penalty=chance.choice([1.0, 1.2]),
                presence_penalty=chance.choice([0.0, 0.3]),
                logprobs=chance.choice([None, 0, 5]),
            )
            for _ in range(count)
        ]
        together = sample(logits, sequences)
        for row in range(count):
            assert sample(logits[row : row + 1], [sequences[row]]) == [together[row]]
        order = chance.sample(range(count), count)
        shuffled = sample(logits[order], [sequences[row] for row in order])
        assert shuffled == [together[row] for row in order]

    def test_the_number_of_threads_does_not_matter(self) -> None:
        logits = random_logits(9, 30_000, seed=8)
        sequences = [sequence(seed=i, top_p=(1.0, 0.9, 0.99)[i % 3], logprobs=3) for i in range(9)]
        before = torch.get_num_threads()
        try:
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(sample(logits, sequences))
        finally:
            torch.set_num_threads(before)
        assert results[0] == results[1] == results[2]


# -- Grammars ----------------------------------------------------------------------------------------------------------


class Fixed:
    """A grammar that always allows the same tokens, and keeps what it was given."""

    def __init__(self, bits: bytes) -> None:
        self.bits = bits
        self.given: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.given)

    def advance(self, token_ids: SequenceOf[int]) -> None:
        self.given += token_ids

    def allowed(self) -> bytes:
        return self.bits


def bits_of(token_ids: Iterable[int], num_bytes: int) -> bytes:
    return sum(1 << token_id for token_id in set(token_ids)).to_bytes(num_bytes, "little")


def bound(allowed: Iterable[int], vocab: int, **sampling: Any) -> Sequence:
    made = sequence(**sampling)
    made.grammar = Fixed(bits_of(allowed, (vocab + 7) // 8))
    return made


class TestGrammar:
    VOCAB = 203
    HOW: ClassVar[list[dict[str, Any]]] = [
        {"temperature": 0},
        {},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 90, "top_p": 0.9},
        {"min_p": 0.05},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {3: 5.0, 4: -5.0}},
        {"logprobs": 3},
    ]

    @pytest.mark.parametrize("how", HOW, ids=str)
    @pytest.mark.parametrize("num_allowed", [1, 3, 70, 150, 203])
    def test_equals_logits_without_the_other_tokens(self, how: dict[str, Any], num_allowed: int) -> None:
        """Against the same rows without a grammar, whose other logits are so low that nothing chooses them."""
        source = random.Random(num_allowed)
        logits = random_logits(24, self.VOCAB, seed=num_allowed)
        allowed = [set(source.sample(range(self.VOCAB), num_allowed)) for _ in range(24)]
        seeds = [{"seed": seed, "emitted": [3, 4], **how} for seed in range(24)]
        sequences = [bound(tokens, self.VOCAB, **one) for tokens, one in zip(allowed, seeds, strict=True)]
        lowered = logits.clone()
        for row, tokens in enumerate(allowed):
            lowered[row, [token for token in range(self.VOCAB) if token not in tokens]] = -1e30
        chosen = choose(logits, sequences)
        assert all(token in tokens for token, tokens in zip(chosen, allowed, strict=True))
        assert chosen == choose(lowered, [sequence(**one) for one in seeds])

    def test_other_rows_do_not_notice(self) -> None:
        logits = random_logits(40, self.VOCAB)
        plain = [sequence(seed=n, **self.HOW[n % len(self.HOW)]) for n in range(40)]
        alone = sample(logits, plain)
        mixed = [bound([7, 8], self.VOCAB, seed=n) if n % 3 == 1 else one for n, one in enumerate(plain)]
        together = sample(logits, mixed)
        for n, (one, other) in enumerate(zip(alone, together, strict=True)):
            if n % 3 == 1:
                assert isinstance(other, SampledToken)
                assert other.token_id in (7, 8)
            else:
                assert one == other

    def test_the_logits_are_not_changed(self) -> None:
        logits = random_logits(3, self.VOCAB)
        before = logits.clone()
        sample(logits, [sequence(), bound([1], self.VOCAB), bound([2], self.VOCAB, temperature=0)])
        assert torch.equal(logits, before)

    def test_follows_the_probabilities_of_what_is_left(self) -> None:
        logits = [0.0, 1.0, 2.0, 3.0]
        rows = torch.tensor(logits).expand(4000, -1)
        counts = Counter(choose(rows, [bound([1, 3], 4, seed=seed) for seed in range(4000)]))
        first, second = softmax([1.0, 3.0])
        assert_follows(counts, [0.0, first, 0.0, second])

    def test_nothing_is_left(self) -> None:
        logits = random_logits(4, self.VOCAB)
        barred = sequence(temperature=0)
        barred.grammar = Fixed(b"")
        # The only allowed token must not come yet.
        early = bound([9], self.VOCAB, min_tokens=5, stop_token_ids=frozenset({9}))
        results = sample(logits, [sequence(), barred, early, bound([5], self.VOCAB)])
        assert [type(result) for result in results] == [SampledToken, NothingAllowed, NonFiniteLogits, SampledToken]
        # What a client's schema has done is not held against a worker.
        assert isinstance(results[1], InvalidRequest)
        assert isinstance(results[2], NonFiniteLogits)
        assert status.http_status(results[1]) == 400
        assert status.http_status(results[2]) == 500

    def test_a_broken_row_stays_broken(self) -> None:
        logits = random_logits(2, self.VOCAB)
        logits[0, 11] = math.nan
        broken, whole = sample(logits, [bound([5], self.VOCAB), bound([5], self.VOCAB)])
        assert isinstance(broken, NonFiniteLogits)
        assert isinstance(whole, SampledToken)

    @pytest.mark.parametrize("num_bytes", [1, 13, 25, 26, 40])
    def test_the_tokenizer_knows_fewer_tokens_or_more(self, num_bytes: int) -> None:
        logits = random_logits(1, self.VOCAB)
        made = sequence(temperature=0)
        made.grammar = Fixed(b"\xff" * num_bytes)
        (token,) = choose(logits, [made])
        assert token == int(logits[0, : num_bytes * 8].argmax())

    def test_logprobs_are_of_the_model(self) -> None:
        logits = random_logits(1, self.VOCAB)
        (free,), (tied,) = (
            sample(logits, [one]) for one in (sequence(logprobs=2), bound([17], self.VOCAB, logprobs=2))
        )
        assert isinstance(free, SampledToken)
        assert isinstance(tied, SampledToken)
        assert tied.token_id == 17
        assert tied.top == free.top
        assert tied.logprob == pytest.approx(float(logits[0].double().log_softmax(-1)[17]))


# -- The kernels' race -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 129, 2048, 32001])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 3.0, 1e4])
def test_the_kernels_race_ends_as_torch_s(vocab: int, scale: float) -> None:
    logits = random_logits(24, vocab, seed=vocab, scale=scale)
    source = random.Random(vocab)
    sequences = [
        sequence(
            seed=source.getrandbits(63),
            emitted=[0] * source.randrange(4),
            temperature=source.choice([2e-5, 0.01, 0.7, 1.0, 2.0]),
            min_p=source.choice([0.0, 0.0, 0.05, 1.0]),
        )
        for _ in range(24)
    ]
    assert load_kernels().choose(logits, range(24), [*map(draw, sequences)]) != [TOO_CLOSE] * 24
    expected = sampling_module.sample(logits, sequences)
    assert sampling_module.sample(logits, sequences, kernels=load_kernels()) == expected


def draw(seq: Sequence) -> Draw:
    return draw_of(seq.sampling, seq.num_tokens)


def test_the_kernels_noise_is_the_noise() -> None:
    """Two tokens of which one is ahead by a little more, or less, than the difference of their noise."""
    source = random.Random(1)
    for _ in range(300):
        seq = sequence(seed=source.getrandbits(63), temperature=1.0)
        difference = reference_noise(seq.sampling.seed, 1, 1) - reference_noise(seq.sampling.seed, 1, 0)
        if abs(difference) > 8:
            continue  # float32 logits are too coarse beside it
        for ahead in (2e-6, -2e-6, 0.0):
            logits = torch.tensor([[difference + ahead, 0.0]])
            gap = logits[0, 0].item() - difference
            winner = TOO_CLOSE if abs(gap) < 0.8e-7 else 0 if gap > 1.2e-7 else 1 if gap < -1.2e-7 else None
            if winner is not None:
                assert load_kernels().choose(logits, [0], [draw(seq)]) == [winner]


def test_what_the_kernels_leave_open_is_decided_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(9, 50)
    sequences = [sequence(seed=seed, temperature=0.9) for seed in range(9)]
    expected = sampling_module.sample(logits, sequences)
    monkeypatch.setattr(Kernels, "choose", lambda self, logits, rows, draws: [TOO_CLOSE] * len(rows))
    assert sampling_module.sample(logits, sequences, kernels=load_kernels()) == expected


def test_a_choice_of_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvariantViolated):
        load_kernels().choose(random_logits(2, 8), [2], [draw(sequence(seed=1))])
