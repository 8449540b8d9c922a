"""A draft that is the model itself guesses what the model says: its cache, however it is used, changes no guess."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from services.engine.cpu.decoder import KernelDecoder
from services.engine.engine import Engine, EngineParts, load_engine
from services.engine.reference.decoder import RepeatedStep
from services.engine.speculation.draft import DraftModel, load_draft
from services.engine.steps.guesses import LEVELS, Guess, Limit
from services.engine.steps.sequence import Sampling, Sequence
from services.runtime.errors import ConfigError, InvariantViolated

GREEDY = Sampling(max_tokens=40, temperature=0)
CHANCE = Sampling(max_tokens=40, temperature=0.8, seed=5, top_k=20, top_p=0.95)
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def parts(checkpoint: Callable[..., Path]) -> EngineParts:
    return load_engine(checkpoint("llama3-gqa-tied"), dtype="float32", page_size=PAGE_SIZE, num_pages=200, threads=1)


@pytest.fixture(params=["kernels", "one by one"])
def new_draft(
    checkpoint: Callable[..., Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], DraftModel]:
    """Drafts that guess in a loop of the kernels, or token by token as on a GPU."""
    if request.param == "one by one":
        monkeypatch.setattr(KernelDecoder, "repeatable", lambda decoder, step: RepeatedStep(decoder, step))

    def make(num_pages: int) -> DraftModel:
        return DraftModel(
            load_engine(checkpoint("llama3-gqa-tied"), dtype="float32", page_size=PAGE_SIZE, num_pages=num_pages)
        )

    return make


def answer(parts: EngineParts, prompt: list[int], sampling: Sampling) -> list[int]:
    (tokens,) = Engine(parts).generate([prompt], sampling)
    return tokens


def limit(most: int, *, least: float = 0.0) -> Limit:
    return Limit(most, [1.0] * LEVELS, 1.0, least)


def guesses(draft: DraftModel, sequence: Sequence, num: int) -> list[int]:
    (found,) = draft.guess([sequence], [limit(num)])
    assert len(found) == num
    return [token_id for token_id, _ in found]


@pytest.mark.parametrize("sampling", [GREEDY, CHANCE])
def test_right_and_wrong_guesses_leave_it_with_what_the_sequence_has(
    parts: EngineParts,
    new_draft: Callable[[int], DraftModel],
    random_ids: Callable[..., list[int]],
    sampling: Sampling,
) -> None:
    draft, source = new_draft(40), random.Random(3)
    prompt = random_ids(23, seed=1)
    expected = answer(parts, prompt, sampling)
    sequence = Sequence("a", prompt, sampling=sampling)
    assert draft.read(sequence, 10)
    assert draft.num_lacking(sequence) == 13
    while sequence.num_generated_tokens < 30:
        at = sequence.num_generated_tokens
        num = source.randrange(1, 6)
        assert guesses(draft, sequence, num) == expected[at : at + num]
        if source.random() < 0.4:  # somebody else's choice: what follows was guessed for nothing
            for token_id in expected[at : at + source.randrange(num)]:
                sequence.append_token(token_id)
            sequence.append_token((sequence.token_ids[-1] + 1) % 300)
            prompt_now = list(sequence.token_ids)
            expected = expected[: sequence.num_generated_tokens]
            expected += answer(parts, prompt_now, sampling)
        else:
            for token_id in expected[at : at + num + 1]:
                sequence.append_token(token_id)
        assert draft.num_lacking(sequence) <= 2, "what was guessed rightly is not computed again"
    draft.free("a")
    draft.check_integrity()
    assert draft.num_used_pages == 0


def test_sequences_are_guessed_together_as_alone(
    parts: EngineParts, new_draft: Callable[[int], DraftModel], random_ids: Callable[..., list[int]]
) -> None:
    draft = new_draft(100)
    prompts = [random_ids(length, seed=length) for length in (1, 6, 17)]
    sequences = [Sequence(key, prompt, sampling=GREEDY) for key, prompt in enumerate(prompts)]
    guessed = draft.guess(sequences, [limit(3), limit(2), limit(4)])
    expected = [answer(parts, prompt, GREEDY) for prompt in prompts]
    found = [[token_id for token_id, _ in each] for each in guessed]
    assert found == [expected[0][:3], expected[1][:2], expected[2][:4]]
    assert all(0 < probability <= 1 for each in guessed for _, probability in each)


def test_guessing_ends_where_the_next_is_too_unlikely(
    new_draft: Callable[[int], DraftModel], random_ids: Callable[..., list[int]]
) -> None:
    draft = new_draft(100)
    sequence = Sequence("a", random_ids(9, seed=1), sampling=GREEDY)
    (all_guesses,) = draft.guess([sequence], [limit(20)])
    for least in (0.9, 0.6, 0.3, 0.05):
        (some,) = draft.guess([sequence], [Limit(20, [0.8] * LEVELS, 0.9, least)])
        num = next(num for num in range(1, 21) if num == 20 or 0.8**num * 0.9 <= least)
        assert some == all_guesses[:num]
    (some,) = draft.guess([sequence], [Limit(20, [float(level >= 1) for level in range(LEVELS)], 1.0, 0.5)])
    first_doubt = next((place for place, guess in enumerate(all_guesses) if guess.level == 0), 19)
    assert some == all_guesses[: first_doubt + 1]


def test_a_loop_of_the_kernels_guesses_what_is_guessed_token_by_token(
    checkpoint: Callable[..., Path], random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    samplings = [
        GREEDY,
        Sampling(max_tokens=40, temperature=0.05, seed=3),  # of all tokens, of which few can win
        Sampling(max_tokens=40, temperature=1.5, seed=4, top_k=3),
        Sampling(max_tokens=40, temperature=1.0, seed=5, top_p=0.6),
        Sampling(max_tokens=40, temperature=1.2, seed=6, top_p=0.9, min_p=0.2),
    ]
    sequences = [Sequence(n, random_ids(5 + n, seed=n), sampling=sampling) for n, sampling in enumerate(samplings)]
    limits = [limit(4 + n) for n in range(len(samplings))]

    def guessed() -> list[list[Guess]]:
        parts = load_engine(checkpoint("llama3-gqa-tied"), dtype="float32", page_size=PAGE_SIZE, num_pages=100)
        return DraftModel(parts).guess(sequences, limits)

    by_kernels = guessed()
    monkeypatch.setattr(KernelDecoder, "repeatable", lambda decoder, step: RepeatedStep(decoder, step))
    one_by_one = guessed()
    for some, others in zip(by_kernels, one_by_one, strict=True):
        assert [guess.token_id for guess in some] == [guess.token_id for guess in others]
        assert [guess.probability for guess in some] == pytest.approx([guess.probability for guess in others], rel=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, CHANCE, Sampling(max_tokens=40, temperature=1.0)])
def test_a_draft_that_gives_nan_finds_nothing_likely(
    checkpoint: Callable[..., Path], random_ids: Callable[..., list[int]], sampling: Sampling
) -> None:
    parts = load_engine(checkpoint("llama3-gqa-tied"), dtype="float32", page_size=PAGE_SIZE, num_pages=40)
    draft, sequence = DraftModel(parts), Sequence("a", random_ids(20, seed=2), sampling=sampling)
    assert draft.read(sequence, 12)
    parts.pool.data.fill_(float("nan"))
    (found,) = draft.guess([sequence], [limit(5)])
    assert [guess.probability for guess in found] == [0.0] * 5
    draft.free("a")
    draft.check_integrity()


def test_who_was_used_longest_ago_gives_way_and_is_read_again(
    parts: EngineParts, new_draft: Callable[[int], DraftModel], random_ids: Callable[..., list[int]]
) -> None:
    draft = new_draft(10)
    first, second = (Sequence(name, random_ids(24, seed=seed), sampling=GREEDY) for name, seed in (("a", 1), ("b", 2)))
    assert guesses(draft, first, 2) == answer(parts, first.token_ids, GREEDY)[:2]
    assert guesses(draft, second, 2) == answer(parts, second.token_ids, GREEDY)[:2]
    assert draft.num_lacking(first) == 24
    assert guesses(draft, first, 2) == answer(parts, first.token_ids, GREEDY)[:2]
    assert [*map(len, draft.guess([first, second], [limit(2), limit(2)]))] == [2, 0], "both do not fit"
    assert not draft.read(Sequence("c", random_ids(60, seed=3), sampling=GREEDY), 50)
    for key in ("a", "b", "c", "c"):
        draft.free(key)
    draft.check_integrity()


def test_pages_that_nobody_holds_are_noticed(new_draft: Callable[[int], DraftModel]) -> None:
    draft = new_draft(10)
    draft.guess([Sequence("a", [1, 2, 3], sampling=GREEDY)], [limit(1)])
    draft._memories.clear()
    with pytest.raises(InvariantViolated):
        draft.check_integrity()


def test_a_draft_of_another_vocabulary_is_refused(checkpoint: Callable[..., Path], parts: EngineParts) -> None:
    from demo import DEMO_MODEL

    with pytest.raises(ConfigError, match="vocabulary of 2048 tokens"):
        load_draft(DEMO_MODEL, parts, page_size=PAGE_SIZE, memory_bytes=1 << 20)
    loaded = load_draft(checkpoint("llama3-gqa-tied"), parts, page_size=PAGE_SIZE, memory_bytes=1 << 20)
    assert loaded.num_pages > 0
    assert loaded.num_used_pages == 0, "what was rehearsed is forgotten"
    loaded.check_integrity()
