from hypothesis import given
from hypothesis import strategies as st

from decode_worker.scheduler import Work
from tests.decode_worker.pages import add, make


def test_a_handed_over_sequence_decodes_one_token_a_step() -> None:
    s, pages = make(max_batch=4, step_tokens=64)
    add(s, pages, "a", 10, 1, 10)
    assert s.next_step(pages) == [Work("a", 10, 1, True)]
    assert s.next_step(pages) == [Work("a", 11, 1, True)]
    s.remove("a")
    assert s.next_step(pages) == []


def test_emitted_tokens_are_replayed_one_by_one_without_sampling() -> None:
    s, pages = make(max_batch=4, step_tokens=64)
    add(s, pages, "a", 10, 3, 10)
    assert [s.next_step(pages)[0] for _ in range(4)] == [
        Work("a", 10, 1, False),
        Work("a", 11, 1, False),
        Work("a", 12, 1, True),
        Work("a", 13, 1, True),
    ]


def test_a_local_prompt_is_chunked_beside_the_batch_and_stops_at_the_replay() -> None:
    s, pages = make(max_batch=4, step_tokens=8, min_prefill_tokens=1)
    add(s, pages, "d", 5, 1, 5)
    add(s, pages, "p", 9, 2, 0)
    assert s.next_step(pages) == [Work("d", 5, 1, True), Work("p", 0, 7, False)]
    assert s.next_step(pages) == [Work("d", 6, 1, True), Work("p", 7, 2, False)]
    assert s.next_step(pages) == [Work("d", 7, 1, True), Work("p", 9, 1, False)]
    assert s.next_step(pages) == [Work("d", 8, 1, True), Work("p", 10, 1, True)]


def test_a_prompt_that_ends_samples_its_first_token() -> None:
    s, pages = make(max_batch=4, step_tokens=8, min_prefill_tokens=1)
    add(s, pages, "p", 8, 0, 0)
    assert s.next_step(pages) == [Work("p", 0, 8, True)]
    assert s.next_step(pages) == [Work("p", 8, 1, True)]


def test_a_full_batch_does_not_starve_prompts() -> None:
    s, pages = make(max_batch=9, step_tokens=4, min_prefill_tokens=2)
    for key in range(8):
        add(s, pages, key, 1, 1, 1)
    add(s, pages, "p", 4, 0, 0)
    assert Work("p", 0, 2, False) in s.next_step(pages)
    assert Work("p", 2, 2, True) in s.next_step(pages)


def test_a_small_budget_is_kept_by_prompts_that_are_alone() -> None:
    s, pages = make(max_batch=4, step_tokens=4)
    add(s, pages, "p", 9, 0, 0)
    assert [s.next_step(pages)[0].num_tokens for _ in range(3)] == [4, 4, 1]


def test_a_place_in_the_batch_is_given_in_order_when_one_is_free() -> None:
    s, pages = make(max_batch=2, step_tokens=64)
    for key in "abc":
        add(s, pages, key, 1, 1, 1)
    assert [work.key for work in s.next_step(pages)] == ["a", "b"]
    assert (s.num_running, s.num_waiting) == (2, 1)
    s.remove("a")
    assert [work.key for work in s.next_step(pages)] == ["b", "c"]
    s.remove("nobody")


SEQUENCES = st.lists(
    st.tuples(
        st.integers(1, 80),  # prompt
        st.integers(0, 6),  # emitted
        st.booleans(),  # computed here, or handed over
        st.integers(1, 8),  # new tokens until it ends
        st.integers(0, 5),  # step in which it arrives
    ),
    max_size=10,
)


@given(SEQUENCES, st.integers(1, 6), st.integers(1, 32), st.integers(1, 8))
def test_every_sequence_advances_each_step_and_ends_with_its_tokens(
    sequences: list[tuple[int, int, bool, int, int]], max_batch: int, step_tokens: int, min_prefill: int
) -> None:
    s, pages = make(max_batch=max_batch, step_tokens=step_tokens, min_prefill_tokens=min_prefill)
    position: dict[int, int] = {}
    produced: dict[int, int] = {}
    ended: set[int] = set()
    for step in range(3000):
        for key, (prompt, emitted, local, _, arrival) in enumerate(sequences):
            if arrival == step:
                emitted = emitted if local else max(emitted, 1)
                position[key] = 0 if local else prompt
                produced[key] = 0
                add(s, pages, key, prompt, emitted, position[key])
        work = s.next_step(pages)
        assert len({w.key for w in work}) == len(work) <= max_batch
        decodes = [w for w in work if w.start >= sequences[w.key][0]]
        chunks = [w for w in work if w.start < sequences[w.key][0]]
        assert all(w.num_tokens == 1 for w in decodes)
        assert sum(w.num_tokens for w in chunks) <= max(step_tokens - len(decodes), min(min_prefill, step_tokens))
        for w in work:
            prompt, emitted, local, new, _ = sequences[w.key]
            emitted = emitted if local else max(emitted, 1)
            assert w.start == position[w.key]
            position[w.key] += w.num_tokens
            assert w.start + w.num_tokens <= prompt or w.num_tokens == 1, "a chunk stops where the prompt ends"
            assert w.samples == (position[w.key] == prompt + emitted + produced[w.key])
            produced[w.key] += w.samples
            if produced[w.key] == new:
                s.remove(w.key)
                ended.add(w.key)
        live = position.keys() - ended
        assert s.num_running + s.num_waiting == len(live)
        assert s.waiting_tokens == sum(max(sequences[k][0] - position[k], 0) for k in live)
        if len(ended) == len(sequences):
            assert s.next_step(pages) == []
            return
        assert work or step < 6, "there is work and none was planned"
    raise AssertionError("some sequence never ended")
