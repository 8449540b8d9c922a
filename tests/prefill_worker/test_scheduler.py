import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_worker.scheduler import Chunk, ChunkScheduler, PromptQueue, PromptSize
from services.runtime.errors import Overloaded


def queue(*, max_waiting: int = 8, num_pages: int = 100, ahead_tokens: int = 32) -> PromptQueue:
    return PromptQueue(max_waiting=max_waiting, num_pages=num_pages, ahead_tokens=ahead_tokens)


def test_turns_are_given_in_order_until_enough_work_lies_ahead() -> None:
    q = queue(ahead_tokens=32)
    for key in "abcd":
        q.enter(key, PromptSize(num_tokens=16, num_pages=1))
    assert q.next_turns() == ["a", "b"]
    assert q.next_turns() == []
    q.computed("a", 16)
    assert q.next_turns() == ["c"]
    assert (q.num_inside, q.num_waiting, q.waiting_tokens) == (3, 1, 48)


def test_a_long_prompt_holds_back_the_next_until_it_is_nearly_done() -> None:
    q = queue(ahead_tokens=32)
    q.enter("long", PromptSize(num_tokens=100, num_pages=7))
    q.enter("next", PromptSize(num_tokens=10, num_pages=1))
    assert q.next_turns() == ["long"]
    q.computed("long", 68)
    assert q.next_turns() == []
    q.computed("long", 1)
    assert q.next_turns() == ["next"]


def test_nobody_overtakes_a_head_that_waits_for_pages() -> None:
    q = queue(num_pages=10, ahead_tokens=10_000)
    q.enter("a", PromptSize(96, 6))
    q.enter("big", PromptSize(96, 6))
    q.enter("small", PromptSize(16, 1))
    assert q.next_turns() == ["a"]
    q.computed("a", 96)
    assert q.next_turns() == [], "pages are held until the prompt leaves, not until it is computed"
    q.leave("a")
    assert q.next_turns() == ["big", "small"]


def test_the_queue_is_bounded_and_says_so() -> None:
    q = queue(max_waiting=2)
    q.enter("a", PromptSize(1, 1))
    q.enter("b", PromptSize(1, 1))
    with pytest.raises(Overloaded):
        q.enter("c", PromptSize(1, 1))
    assert q.num_waiting == 2


def test_leaving_twice_or_unknown_changes_nothing() -> None:
    q = queue(num_pages=10)
    q.enter("a", PromptSize(20, 2))
    q.next_turns()
    q.leave("a")
    q.leave("a")
    q.leave("nobody")
    q.computed("a", 20)
    assert (q.num_inside, q.num_waiting, q.waiting_tokens, q.promised_pages) == (0, 0, 0, 0)


class PromptQueueMachine(RuleBasedStateMachine):
    """The queue against a naive model: conservation of pages and tokens, order, bound."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue(max_waiting=4, num_pages=12, ahead_tokens=40)
        self.waiting: list[tuple[int, PromptSize]] = []
        self.inside: dict[int, list[int]] = {}  # key -> [uncomputed, pages]
        self.next_key = 0

    @rule(num_tokens=st.integers(1, 90), num_pages=st.integers(1, 12))
    def enter(self, num_tokens: int, num_pages: int) -> None:
        key, self.next_key = self.next_key, self.next_key + 1
        if len(self.waiting) == 4:
            with pytest.raises(Overloaded):
                self.queue.enter(key, PromptSize(num_tokens, num_pages))
        else:
            self.queue.enter(key, PromptSize(num_tokens, num_pages))
            self.waiting.append((key, PromptSize(num_tokens, num_pages)))

    @rule()
    def turns(self) -> None:
        for key in self.queue.next_turns():
            expected, size = self.waiting.pop(0)
            assert key == expected, "first come, first served"
            assert sum(tokens for tokens, _ in self.inside.values()) < 40
            self.inside[expected] = [size.num_tokens, size.num_pages]
            assert sum(pages for _, pages in self.inside.values()) <= 12
        if self.waiting:
            full = sum(pages for _, pages in self.inside.values()) + self.waiting[0][1].num_pages > 12
            assert full or sum(tokens for tokens, _ in self.inside.values()) >= 40, "a turn was withheld"

    @precondition(lambda self: any(tokens for tokens, _ in self.inside.values()))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([k for k, v in self.inside.items() if v[0]]))
        num_tokens = data.draw(st.integers(1, self.inside[key][0]))
        self.queue.computed(key, num_tokens)
        self.inside[key][0] -= num_tokens

    @precondition(lambda self: self.inside or self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([*self.inside, *(key for key, _ in self.waiting)]))
        self.queue.leave(key)
        self.inside.pop(key, None)
        self.waiting = [entry for entry in self.waiting if entry[0] != key]

    @invariant()
    def counts_agree(self) -> None:
        assert self.queue.num_waiting == len(self.waiting)
        assert self.queue.num_inside == len(self.inside)
        assert self.queue.promised_pages == sum(pages for _, pages in self.inside.values())
        uncomputed = sum(tokens for tokens, _ in self.inside.values())
        assert self.queue.waiting_tokens == uncomputed + sum(size.num_tokens for _, size in self.waiting)


TestPromptQueueMachine = PromptQueueMachine.TestCase


def test_a_long_prompt_is_chunked_and_its_last_step_takes_the_next_along() -> None:
    s = ChunkScheduler(chunk_tokens=8)
    s.add("long", num_tokens=20)
    s.add("short", num_tokens=3)
    assert s.next_step() == [Chunk("long", 0, 8, False)]
    assert s.next_step() == [Chunk("long", 8, 8, False)]
    assert s.next_step() == [Chunk("long", 16, 4, True), Chunk("short", 0, 3, True)]
    assert s.next_step() == []
    assert len(s) == 0


def test_a_removed_prompt_is_in_no_later_step() -> None:
    s = ChunkScheduler(chunk_tokens=8)
    s.add("a", num_tokens=20)
    s.add("b", num_tokens=20)
    s.next_step()
    s.remove("a")
    s.remove("a")
    assert s.next_step() == [Chunk("b", 0, 8, False)]


@given(
    chunk_tokens=st.integers(1, 64),
    prompts=st.lists(st.integers(1, 300), max_size=12),
    arrivals=st.lists(st.integers(0, 6), max_size=12),
    removals=st.dictionaries(st.integers(0, 11), st.integers(0, 30), max_size=4),
)
def test_every_token_is_computed_once_in_order_and_steps_are_full(
    chunk_tokens: int, prompts: list[int], arrivals: list[int], removals: dict[int, int]
) -> None:
    s = ChunkScheduler(chunk_tokens=chunk_tokens)
    to_add = [(arrivals[i] if i < len(arrivals) else 0, i, n) for i, n in enumerate(prompts)]
    remaining: dict[int, int] = {}
    position: dict[int, int] = {}
    for step in range(sum(prompts) + 40):
        for arrival, key, num_tokens in to_add:
            if arrival == step:
                s.add(key, num_tokens=num_tokens)
                remaining[key], position[key] = num_tokens, 0
        for key in [k for k, when in removals.items() if when == step]:
            s.remove(key)
            remaining.pop(key, None)
        chunks = s.next_step()
        total = sum(chunk.num_tokens for chunk in chunks)
        assert total == min(chunk_tokens, sum(remaining.values())), "the step is as full as the work allows"
        for chunk in chunks:
            assert chunk.start == position[chunk.key]
            position[chunk.key] += chunk.num_tokens
            remaining[chunk.key] -= chunk.num_tokens
            assert chunk.is_last == (remaining[chunk.key] == 0)
        remaining = {key: left for key, left in remaining.items() if left}
        assert len(s) == len(remaining)
    assert not remaining


def test_a_computed_prompt_overtakes_the_queue_where_its_pages_fit() -> None:
    queue = PromptQueue(max_waiting=4, num_pages=10, ahead_tokens=8)
    for key in ("a", "b"):
        queue.enter(key, PromptSize(num_tokens=16, num_pages=4))
    assert queue.next_turns() == ["a"]
    assert not queue.enter_computed("large", PromptSize(num_tokens=28, num_pages=7))
    assert queue.enter_computed("small", PromptSize(num_tokens=24, num_pages=6))
    assert (queue.num_inside, queue.num_waiting, queue.promised_pages, queue.waiting_tokens) == (2, 1, 10, 32)
    queue.computed("a", 16)
    assert queue.next_turns() == [], "its pages are in the books"
    queue.leave("small")
    assert queue.next_turns() == ["b"]
    assert queue.promised_pages == 8
