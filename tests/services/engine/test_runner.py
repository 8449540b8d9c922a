import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.cache.pool import num_pages_for
from services.engine.engine import EngineParts, load_engine
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, SampledToken, StepItem, StepPlan
from services.runtime.errors import InvariantViolated

GREEDY = Sampling(max_tokens=50, temperature=0, logprobs=0)


@pytest.fixture
def parts(checkpoint: Callable[..., Path]) -> EngineParts:
    return load_engine(checkpoint("llama3-gqa-tied"), dtype="float32", device="cpu", page_size=4, num_pages=64)


@pytest.fixture
def new_sequence(parts: EngineParts) -> Callable[..., Sequence]:
    """`new_sequence(ids)` holds enough used pages for its tokens and 8 more."""

    def make(ids: list[int], **arguments: Any) -> Sequence:
        arguments = {"sampling": GREEDY, **arguments}
        sequence = Sequence(object(), ids, **arguments)
        sequence.page_table = parts.allocator.allocate(num_pages_for(sequence.num_tokens + 8, 4), state="used")
        return sequence

    return make


def compute(parts: EngineParts, sequence: Sequence, chunks: list[int]) -> SampledToken:
    """Run a sequence alone, in chunks; the last one reaches its end."""
    for chunk in chunks:
        (outcome,) = parts.runner.run(StepPlan([StepItem(sequence, chunk)])).outcomes
        sequence.num_computed_tokens += chunk
    assert isinstance(outcome, SampledToken)
    return outcome


def test_an_empty_plan_gives_an_empty_result(parts: EngineParts) -> None:
    assert parts.runner.run(StepPlan()).outcomes == []


def test_a_mixed_step_equals_each_sequence_alone(
    parts: EngineParts, new_sequence: Callable[..., Sequence], random_ids: Callable[..., list[int]]
) -> None:
    prompts = [random_ids(length, seed=length) for length in (1, 4, 5, 23)]
    alone = [compute(parts, new_sequence(prompt), [len(prompt)]) for prompt in prompts]
    decoding, fresh, halfway, chunked = (new_sequence(prompt) for prompt in prompts)
    compute(parts, halfway, [2, 3])
    halfway.append_token(17)
    parts.runner.run(StepPlan([StepItem(chunked, 9)]))
    chunked.num_computed_tokens = 9
    expected_halfway = compute(parts, new_sequence([*prompts[2], 17]), [6])
    result = parts.runner.run(
        StepPlan([StepItem(chunked, 14), StepItem(halfway, 1), StepItem(decoding, 1), StepItem(fresh, 3)])
    )
    tokens = result.outcomes
    assert [t.token_id if isinstance(t, SampledToken) else t for t in tokens] == [
        alone[3].token_id,
        expected_halfway.token_id,
        alone[0].token_id,
        None,
    ]


def test_sequences_are_not_changed(parts: EngineParts, new_sequence: Callable[..., Sequence]) -> None:
    sequence = new_sequence([3, 4, 5])
    table = list(sequence.page_table)
    parts.runner.run(StepPlan([StepItem(sequence, 3)]))
    assert (sequence.token_ids, sequence.num_computed_tokens, sequence.page_table) == ([3, 4, 5], 0, table)


def test_no_token_where_none_is_wanted(parts: EngineParts, new_sequence: Callable[..., Sequence]) -> None:
    one, other = new_sequence([3, 4, 5]), new_sequence([6, 7])
    items = [StepItem(one, 3, wants_token=False), StepItem(other, 2)]
    outcomes = parts.runner.run(StepPlan(items)).outcomes
    assert outcomes[0] is None
    assert isinstance(outcomes[1], SampledToken)
    # A step without any token at all still writes the cache.
    again = new_sequence([3, 4, 5])
    before = parts.pool.data[again.page_table].clone()
    assert parts.runner.run(StepPlan([StepItem(again, 2)])).outcomes == [None]
    assert not torch.equal(parts.pool.data[again.page_table], before)


def test_writes_only_its_own_slots(
    parts: EngineParts, new_sequence: Callable[..., Sequence], random_ids: Callable[..., list[int]]
) -> None:
    sequence = new_sequence(random_ids(9))
    compute(parts, sequence, [9])
    parts.pool.data.fill_(7.0)
    sequence.append_token(11)
    parts.runner.run(StepPlan([StepItem(sequence, 1)]))
    written = (parts.pool.data != 7.0).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert written == [sequence.page_table[2]]  # token 9 lies in slot 1 of the third page
    assert (parts.pool.data[written[0]] != 7.0).any(-1).any(2).any(1).any(0).tolist() == [False, True, False, False]


def test_buffers_grow_and_shrink_with_the_steps(
    parts: EngineParts, new_sequence: Callable[..., Sequence], random_ids: Callable[..., list[int]]
) -> None:
    long, short = random_ids(150, seed=1), random_ids(2, seed=2)
    expected = compute(parts, new_sequence(short), [2])
    compute(parts, new_sequence(long), [150])
    assert compute(parts, new_sequence(short), [2]) == expected


def test_next_tokens_are_packed_like_any_others(
    parts: EngineParts, new_sequence: Callable[..., Sequence], random_ids: Callable[..., list[int]]
) -> None:
    # Lengths of sequences, and how many tokens are proposed for each.
    for shape in ({1: 0}, {9: 0, 2: 0, 40: 0}, {17: 3, 16: 0, 15: 1}, {5: 2}):
        sequences = [new_sequence(random_ids(length, seed=length)) for length in shape]
        for sequence in sequences:
            sequence.num_computed_tokens = sequence.num_tokens - 1
        items = [
            StepItem(sequence, 1, proposed=tuple(random_ids(num, seed=num)))
            for sequence, num in zip(sequences, shape.values(), strict=True)
        ]
        # The logits of all tokens are wanted, which are those of the last ones here. Buffers are used again.
        expected = copy.deepcopy(parts.runner._pack(items, wants_all=True))
        packed = parts.runner._pack(items)
        for one, other in (
            (packed.token_ids, expected.token_ids),
            (packed.positions, expected.positions),
            (packed.logits_indices, expected.logits_indices),
            (packed.batch.query_start, expected.batch.query_start),
            (packed.batch.context_lens, expected.batch.context_lens),
            (packed.batch.page_tables, expected.batch.page_tables),
            (packed.batch.slot_mapping, expected.batch.slot_mapping),
        ):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        assert packed.batch.longest_tokens == expected.batch.longest_tokens


def test_a_poisoned_page_fails_its_sequence_only(
    parts: EngineParts, new_sequence: Callable[..., Sequence], random_ids: Callable[..., list[int]]
) -> None:
    sequences = [new_sequence(random_ids(9, seed=i)) for i in range(3)]
    expected = [compute(parts, sequence, [9]) for sequence in sequences]
    for sequence in sequences:
        sequence.num_computed_tokens = 8
    parts.pool.data[sequences[1].page_table[0]] = float("nan")
    outcomes = parts.runner.run(StepPlan([StepItem(sequence, 1) for sequence in sequences])).outcomes
    assert isinstance(outcomes[1], NonFiniteLogits)
    assert outcomes[0] is not None
    assert [outcomes[i].token_id for i in (0, 2)] == [expected[i].token_id for i in (0, 2)]  # type: ignore[union-attr]


def test_nan_in_slots_beyond_the_context_is_never_read(
    parts: EngineParts, new_sequence: Callable[..., Sequence], random_ids: Callable[..., list[int]]
) -> None:
    ids = random_ids(6)
    expected = compute(parts, new_sequence(ids), [6])
    parts.pool.data.fill_(float("nan"))
    assert compute(parts, new_sequence(ids), [6]) == expected
    parts.pool.data.fill_(float("nan"))
    assert compute(parts, new_sequence(ids), [1, 1, 3, 1]).token_id == expected.token_id


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda s: StepPlan([StepItem(s, 0)]), "0 tokens scheduled"),
        (lambda s: StepPlan([StepItem(s, 4)]), "4 tokens scheduled, 3 are not computed"),
        (lambda s: (s.page_table.clear(), StepPlan([StepItem(s, 3)]))[1], "0 pages cannot hold 3"),
        (lambda s: StepPlan([StepItem(s, 1), StepItem(s, 1)]), "twice"),
        (lambda s: (s.token_ids.__setitem__(1, 331), StepPlan([StepItem(s, 3)]))[1], "vocabulary of 331"),
        (lambda s: (s.token_ids.__setitem__(1, -1), StepPlan([StepItem(s, 3)]))[1], "vocabulary of 331"),
    ],
)
def test_a_contradictory_plan_is_refused(  # type: ignore[no-untyped-def]
    parts: EngineParts, new_sequence: Callable[..., Sequence], break_it, complaint: str
) -> None:
    plan = break_it(new_sequence([1, 2, 3]))
    with pytest.raises(InvariantViolated, match=complaint):
        parts.runner.run(plan)
