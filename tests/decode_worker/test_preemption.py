"""What is preempted when pages or places run out, against plain counts: BatchScheduler alone, without pages."""

import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_worker.pages import is_swap_cheaper
from decode_worker.scheduler import HEADROOM_TOKENS, BatchScheduler, Progress, Work
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed
from tests.decode_worker.pages import add, make
from tests.examples import examples


def reasons(s: BatchScheduler) -> list[tuple[Hashable, str]]:
    return [tuple(preemption) for preemption in s.take_preemptions()]


def keys(work: list[Work]) -> list[Hashable]:
    return sorted(w.key for w in work)


def test_a_better_class_takes_the_place_of_the_youngest_of_the_lowest_one() -> None:
    s, pages = make(max_batch=3)
    for key, service_class in (("a", 2), ("b", 4), ("c", 4), ("d", 3), ("e", 4)):
        add(s, pages, key, 4, 1, 4, service_class=service_class)
    assert keys(s.next_step(pages)) == ["a", "b", "d"], "class first, then arrival"
    add(s, pages, "f", 4, 1, 4, service_class=4)
    assert keys(s.next_step(pages)) == ["a", "b", "d"], "nobody's place goes to its own class"
    add(s, pages, "g", 4, 1, 4, service_class=0)
    assert keys(s.next_step(pages)) == ["a", "d", "g"]
    assert reasons(s) == [("b", "place")]
    assert pages.held["b"] == 2, "and it keeps its pages"
    s.remove("g")
    assert keys(s.next_step(pages)) == ["a", "b", "d"], "those that were in the batch come before those that were not"


def test_who_needs_a_page_takes_those_of_the_youngest_of_the_lowest_class() -> None:
    s, pages = make(num_pages=9)
    for key, service_class in (("a", 2), ("b", 2), ("c", 4), ("d", 4)):
        add(s, pages, key, 7, 1, 7, service_class=service_class)
    for _ in range(1):
        assert keys(s.next_step(pages)) == ["a", "b", "c", "d"]
    assert keys(s.next_step(pages)) == ["a", "b", "c"], "one page is free, d's two are the next three's"
    assert reasons(s) == [("d", "recomputed")]
    assert pages.held == {"a": 3, "b": 3, "c": 3}


def test_the_worst_one_waits_with_what_it_has_until_somebody_better_needs_it() -> None:
    s, pages = make(num_pages=5)
    add(s, pages, "a", 8, 1, 8, new=11)  # takes a page now, and one four tokens later
    add(s, pages, "b", 6, 1, 6, new=11)  # takes one two tokens later
    steps = [keys(s.next_step(pages)) for _ in range(6)]
    assert steps == [["a", "b"], ["a", "b"], ["a"], ["a"], ["a"], ["a"]]
    assert reasons(s) == [("b", "no_page"), ("b", "recomputed")]
    assert pages.held == {"a": 4}


def test_one_that_gave_way_waits_for_room_to_stay() -> None:
    s, pages = make(num_pages=20, max_batch=8)
    add(s, pages, "a", 4, 1, 4, new=100)
    add(s, pages, "b", 30, 1, 30, new=60)
    while "b" in pages.held:
        s.next_step(pages)
    pages.num_pages += 4
    assert keys(s.next_step(pages)) == ["a"], "its tokens would fit, not those of a and it that are to come"
    pages.num_pages += 60
    assert keys(s.next_step(pages)) == ["a", "b"]


def test_a_reservation_waits_behind_who_needs_pages_and_takes_from_worse_classes() -> None:
    s, pages = make(num_pages=8)
    add(s, pages, "a", 15, 1, 15, service_class=2)
    add(s, pages, "b", 15, 1, 15, service_class=4)
    s.next_step(pages)
    for key, service_class in (("late", 4), ("r", 2), ("urgent", 1)):
        pages.asked[key] = 3
        s.ask(key, 3, service_class=service_class)
    s.settle(pages)
    assert pages.reserved == ["urgent"]
    assert reasons(s) == [("b", "recomputed")]
    assert pages.held == {"a": 4, "urgent": 3}
    s.remove("r")
    s.remove("a")
    del pages.held["a"]
    s.next_step(pages)
    assert pages.reserved == ["urgent"], "b was in the batch before; its tokens go first"
    assert pages.held == {"b": 4, "urgent": 3} or pages.held == {"b": 5, "urgent": 3}


def test_the_watermark_is_left_when_something_enters_beside_others() -> None:
    s, pages = make(num_pages=300)
    add(s, pages, "a", 1182, 1, 1182)
    add(s, pages, "b", 4, 0, 0)
    assert keys(s.next_step(pages)) == ["a", "b"], "296 and 1; 3 of 300 are left"
    add(s, pages, "c", 4, 0, 0)
    assert keys(s.next_step(pages)) == ["a", "b"]


@pytest.mark.parametrize("replays_in_chunks", [True, False])
def test_what_is_computed_again_is_computed_in_chunks_only_where_that_replays_in_chunks(
    replays_in_chunks: bool,
) -> None:
    s, pages = make(num_pages=9, replays_in_chunks=replays_in_chunks)
    add(s, pages, "a", 4, 1, 4, new=31)
    add(s, pages, "b", 4, 1, 4, new=31)
    num = {"a": 1, "b": 1}
    ended = False
    replay: list[Work] = []
    for _ in range(100):
        for w in s.next_step(pages):
            if w.key == "b" and ended:
                replay.append(w)
            num[w.key] += w.samples
            if num[w.key] == 32:
                s.remove(w.key)
                pages.held.pop(w.key)
                if w.key == "a":
                    ended = True
    assert num == {"a": 32, "b": 32}
    done = replay[0].start + replay[0].num_tokens
    assert replay[0].start == 0
    assert done > 10 if replays_in_chunks else done == 4
    assert [w.start for w in replay[1:]] == list(range(done, done + len(replay) - 1))


@dataclass
class Model:
    """What is known of a sequence from outside."""

    prompt: int
    num_tokens: int
    most: int
    service_class: int
    computed: int = 0


ARRIVING = {
    "service_class": st.integers(0, 4),
    "share": st.floats(0.05, 1.0),
    "share_of_prompt": st.floats(0.0, 1.0),
}


class Preempting(RuleBasedStateMachine):
    """Arrivals, reservations, pauses and cancels at any time, in a pool in which few fit at once."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.live: dict[int, Model] = {}
        self.asking: dict[int, Model] = {}
        self.receiving: dict[int, Model] = {}
        self.paused: dict[int, Model] = {}
        self.preempted: Counter[Hashable] = Counter()

    @initialize(
        num_pages=st.integers(2, 14),
        page_size=st.integers(1, 4),
        max_batch=st.integers(1, 5),
        step_tokens=st.integers(1, 20),
        replays_in_chunks=st.booleans(),
        keeps=st.booleans(),
    )
    def begin(
        self, num_pages: int, page_size: int, max_batch: int, step_tokens: int, replays_in_chunks: bool, keeps: bool
    ) -> None:
        self.max_batch, self.replays_in_chunks = max_batch, replays_in_chunks
        self.s, self.pages = make(
            num_pages=num_pages,
            page_size=page_size,
            max_batch=max_batch,
            step_tokens=step_tokens,
            replays_in_chunks=replays_in_chunks,
            min_prefill_tokens=1,
        )
        self.pages.keeps = keeps

    def _model(self, service_class: int, share: float, share_of_prompt: float) -> Model:
        most = max(3, int(share * self.pages.num_pages * self.pages.page_size))
        prompt = max(1, min(most - 2, int(most * share_of_prompt)))  # the first token of an answer never ends it
        self.number += 1
        return Model(prompt, prompt, most, service_class)

    @rule(**ARRIVING, emits=st.integers(0, 6))
    def arrive(self, service_class: int, share: float, share_of_prompt: float, emits: int) -> None:
        model = self._model(service_class, share, share_of_prompt)
        if model.most > self.pages.num_pages * self.pages.page_size:
            return
        model.num_tokens = min(model.prompt + emits, model.most - 1)
        self.live[self.number] = model
        self._add(self.number, model)

    def _add(self, key: int, model: Model, *, has_run: bool = False) -> None:
        chunked = max(model.prompt, model.num_tokens - 1) if self.replays_in_chunks else model.prompt
        progress = Progress(chunked, model.num_tokens, model.computed)
        num_pages = self.pages.held.get(key, 0)
        self.s.add(
            key,
            progress,
            max_num_tokens=model.most,
            service_class=model.service_class,
            num_pages=num_pages,
            has_run=has_run,
        )

    @rule(**ARRIVING)
    def ask(self, service_class: int, share: float, share_of_prompt: float) -> None:
        model = self._model(service_class, share, share_of_prompt)
        if model.most > self.pages.num_pages * self.pages.page_size:
            return
        self.asking[self.number] = model
        num_pages = -(-model.prompt // self.pages.page_size)
        self.pages.asked[self.number] = num_pages
        self.s.ask(self.number, num_pages, service_class=service_class)
        self.s.settle(self.pages)
        self._note_reserved()

    def _note_reserved(self) -> None:
        for key in self.pages.reserved:
            assert isinstance(key, int)
            self.receiving[key] = self.asking.pop(key)
        self.pages.reserved.clear()

    @precondition(lambda self: self.receiving)
    @rule(data=st.data(), is_committed=st.booleans())
    def end_receiving(self, data: st.DataObject, is_committed: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.receiving)))
        model = self.receiving.pop(key)
        if not is_committed:
            del self.pages.held[key]
            return
        model.computed, model.num_tokens = model.prompt, model.prompt + 1
        self.live[key] = model
        self._add(key, model)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        model = self.live[key]
        if key in self.pages.held and model.computed == model.num_tokens - 1 >= model.prompt:
            self.s.remove(key)
            self.paused[key] = self.live.pop(key)

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def unpause(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.paused)))
        self.live[key] = self.paused.pop(key)
        self._add(key, self.live[key], has_run=True)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        known = sorted({*self.live, *self.asking})
        if known:
            key = data.draw(st.sampled_from(known))
            self._forget(key)

    def _forget(self, key: int) -> None:
        self.s.remove(key)
        for where in (self.live, self.asking):
            where.pop(key, None)
        self.pages.held.pop(key, None)
        self.pages.asked.pop(key, None)
        self.pages.kept.pop(key, None)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> int:
        work = self.s.next_step(self.pages)
        self._note_reserved()
        for preemption in self.s.take_preemptions():
            assert isinstance(preemption.key, int)
            if preemption.reason in ("swapped", "recomputed"):
                self.preempted[preemption.key] += 1
                if preemption.key in self.live:
                    self.live[preemption.key].computed = 0
                assert (preemption.reason == "swapped") <= self.pages.keeps
        assert len({w.key for w in work}) == len(work) <= self.max_batch
        for w in work:
            assert isinstance(w.key, int)
            model = self.live[w.key]
            if w.start != model.computed:
                assert self.pages.keeps, "what was lost begins at 0"
            model.computed = w.start + w.num_tokens
            assert model.computed <= self.pages.held[w.key] * self.pages.page_size
            assert w.num_tokens == 1 or model.computed <= (
                max(model.prompt, model.num_tokens - 1) if self.replays_in_chunks else model.prompt
            )
            assert w.samples == (model.computed == model.num_tokens)
            model.num_tokens += w.samples
            if model.num_tokens == model.most:
                self._forget(w.key)
        out_of_reach = self.receiving or self.paused
        assert work or not self.s.num_waiting or out_of_reach, "some sequence could continue"
        return len(work)

    @invariant()
    def nothing_is_given_twice(self) -> None:
        if not hasattr(self, "s"):
            return
        assert self.pages.num_available_pages >= 0
        assert self.pages.held.keys() <= self.live.keys() | self.receiving.keys() | self.paused.keys()
        assert self.s.num_running + self.s.num_waiting == len(self.live)
        assert self.s.num_running <= self.max_batch
        assert self.s.has_any == bool(self.live or self.asking)
        entries = [self.s._entries[key] for key in self.live]
        assert {e.key: e.num_pages for e in entries if e.num_pages} == {
            key: self.pages.held[key] for key in self.live if key in self.pages.held
        }
        chunked = [e.progress.num_chunked_tokens - e.progress.num_computed_tokens for e in entries]
        assert self.s.waiting_tokens == sum(max(0, rest) for rest in chunked)

    def teardown(self) -> None:
        """Whatever happened, all end once nothing is out of reach."""
        if not hasattr(self, "s"):
            return
        for _ in range(20_000):
            for key in sorted(self.receiving):
                model = self.receiving.pop(key)
                model.computed, model.num_tokens = model.prompt, model.prompt + 1
                self.live[key] = model
                self._add(key, model)
            for key in sorted(self.paused):
                self.live[key] = self.paused.pop(key)
                self._add(key, self.live[key], has_run=True)
            if not self.live and not self.asking:
                break
            self._step()
        assert not self.live
        assert not self.asking
        assert not self.pages.held
        assert self.s.next_step(self.pages) == []
        assert self.s.waiting_tokens == 0


TestPreempting = Preempting.TestCase
TestPreempting.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


@given(st.integers(0, 10_000))
@settings(max_examples=examples(25), deadline=None)
def test_of_one_class_nobody_gives_way_often(seed: int) -> None:
    """Long answers, a quarter of the memory that they take: how often pages are lost, for each and in all."""
    source = random.Random(seed)
    s, pages = make(num_pages=500, page_size=4, max_batch=32, replays_in_chunks=True)
    most = {key: source.randrange(50, 1500) for key in range(24)}
    num = dict.fromkeys(most, 0)
    lost: Counter[Hashable] = Counter()
    for key, new in most.items():
        add(s, pages, key, source.randrange(1, 200), 0, 0, new=new)
    while s.has_any:
        for w in s.next_step(pages):
            num[w.key] += w.samples
            if num[w.key] == most[w.key]:
                s.remove(w.key)
                del pages.held[w.key]
        lost.update(key for key, reason in reasons(s) if reason in ("swapped", "recomputed"))
    assert num == most
    # The first time without a warning, then with headroom for 256, 512, 1024 … tokens.
    assert all(times <= 1 + (1500 // HEADROOM_TOKENS).bit_length() for times in lost.values())
    assert 1000 * sum(lost.values()) <= 2 * sum(num.values())


def test_many_urgent_ones_beside_one_long_one_cost_it_no_pages() -> None:
    s, pages = make(num_pages=200, max_batch=2)
    add(s, pages, "long", 10, 0, 0, new=300, service_class=4)
    add(s, pages, "long too", 10, 0, 0, new=300, service_class=4)
    num: Counter[Hashable] = Counter()
    for number in range(400):
        if number % 4 == 0:
            add(s, pages, number, 5, 0, 0, new=2, service_class=0)
        for w in s.next_step(pages):
            num[w.key] += w.samples
            if num[w.key] == (300 if isinstance(w.key, str) else 2):
                s.remove(w.key)
                del pages.held[w.key]
    assert all(reason == "place" for _, reason in reasons(s))
    assert num["long"] == 300
    assert num["long too"] > 150


COPY = LinkSpeed(latency_s=0.001, bytes_per_s=1e9)
PREFILL = PrefillSpeed(overhead_s=0.001, s_per_token=1e-4)
DECODE = DecodeSpeed(overhead_s=0.005, s_per_sequence=0.001)


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes", "replays_in_chunks", "expected"),
    [
        (100, 10_000_000, True, False),  # 22 ms to copy, 11 ms to compute
        (400, 10_000_000, True, True),  # 22 ms to copy, 41 ms to compute
        (100, 10_000_000, False, True),  # of 100 tokens 90 one by one: 540 ms
        (10, 10_000_000, False, False),  # the prompt alone: 2 ms
    ],
)
def test_the_quicker_way_is_taken(num_tokens: int, num_bytes: int, replays_in_chunks: bool, expected: bool) -> None:
    assert expected == is_swap_cheaper(
        num_tokens=num_tokens,
        num_chunked_tokens=num_tokens if replays_in_chunks else 10,
        num_bytes=num_bytes,
        prefill=PREFILL,
        decode=DECODE,
        copy=COPY,
    )


def test_nobody_younger_reserves_past_one_of_its_class_that_waits_for_pages() -> None:
    s, pages = make(num_pages=10)
    add(s, pages, "a", 15, 1, 15)
    s.next_step(pages)
    for key, num_pages in (("first", 8), ("second", 1)):
        pages.asked[key] = num_pages
        s.ask(key, num_pages)
    s.next_step(pages)
    assert pages.reserved == []


def test_who_was_in_the_batch_keeps_its_rank_before_those_who_were_not() -> None:
    s, pages = make(max_batch=1)
    add(s, pages, "runs", 4, 1, 4, service_class=2)
    s.next_step(pages)
    add(s, pages, "waits", 4, 1, 4, service_class=2)
    add(s, pages, "urgent", 4, 1, 4, service_class=0)
    s.next_step(pages)
    assert s._entries["runs"].rank < s._entries["waits"].rank
    assert not s._entries["runs"].rank[1], "one that arrived earlier and never ran comes after it"
    assert s._entries["waits"].rank[1]


def test_each_further_time_twice_the_room_is_wanted() -> None:
    s, pages = make(num_pages=2000)
    add(s, pages, "a", 4, 1, 4, new=5000)
    s.next_step(pages)
    add(s, pages, "b", 4, 1, 4, new=5000)
    b = s._entries["b"]
    got = []
    for num_shortages in (1, 2, 3):
        b.num_shortages = num_shortages
        got.append(s._margin(b))
    assert got[0] < got[1] < got[2]
    assert got[2] - got[1] == 2 * (got[1] - got[0])
