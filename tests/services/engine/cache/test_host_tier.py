import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.engine.cache.host_tier import HostTier, take_prefix
from services.engine.cache.lease import PageLease
from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout, PagePool
from services.engine.cache.swap import SwapSpace
from services.runtime.errors import InvariantViolated

LAYOUT = PageLayout(num_layers=1, num_kv_heads=2, head_dim=4, page_size=4, dtype=torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def keys_of(text: str) -> list[bytes]:
    """A key for each beginning of a text: a letter is a page."""
    return [text[:end].encode() for end in range(1, len(text) + 1)]


class Memory:
    """A pool and a tier, and sequences that write into their pages what belongs there."""

    def __init__(self, num_pages: int, num_slots: int, *, device: str = "cpu") -> None:
        self.pool = PagePool(LAYOUT, num_pages, device=device)
        self.tier = HostTier(SwapSpace(self.pool, num_slots * LAYOUT.page_bytes))
        self.allocator = PageAllocator(num_pages, store=self.tier)
        self.num_copied = 0

    @staticmethod
    @functools.cache
    def content(key: bytes) -> torch.Tensor:
        """What a page with this key holds: nothing else has it."""
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        return torch.randint(0, 256, (LAYOUT.page_bytes,), dtype=torch.uint8, generator=generator)

    def holds(self, page_id: int, key: bytes) -> bool:
        return torch.equal(self.pool.bytes[page_id].cpu(), self.content(key))

    def begin(
        self, text: str, *, is_worth: Callable[[int, int], bool] = lambda num, before: True
    ) -> tuple[PageLease, int]:
        """Returns a lease of pages for all of a text, and how many of them were cached."""
        keys = keys_of(text)
        lease = PageLease(self.allocator)

        def timed(num_pages: int, copy: Callable[[], None]) -> None:
            self.num_copied += num_pages
            copy()

        num_there = take_prefix(lease, self.allocator, self.tier, keys, is_worth=is_worth, timed=timed)
        assert all(map(self.holds, lease.page_ids, keys))
        assert len(lease.page_ids) == num_there
        lease.grow_to(len(text), state="used")
        assert all(map(self.holds, lease.page_ids, keys[:num_there])), "growing took nothing from the sequence itself"
        return lease, num_there

    def compute(self, lease: PageLease, text: str, start: int) -> None:
        """Writes what is not there, and names it."""
        keys = keys_of(text)
        for page_id, key in zip(lease.page_ids[start:], keys[start:], strict=True):
            self.pool.bytes[page_id] = self.content(key).to(self.pool.bytes.device)
        self.allocator.name(lease.page_ids[start:], keys[start:], parent=keys[start - 1] if start else None)

    def say(self, text: str, **how: Callable[[int, int], bool]) -> int:
        """Computes a whole sequence; returns how many of its pages were cached."""
        lease, num_there = self.begin(text, **how)
        self.compute(lease, text, num_there)
        lease.close()
        self.allocator.check_integrity()
        return num_there


@pytest.mark.parametrize("device", DEVICES)
def test_what_gave_way_comes_back_as_it_was(device: str) -> None:
    memory = Memory(6, 8, device=device)
    assert memory.say("abcdef") == 0
    assert memory.say("ABCD") == 0  # c to f were evicted
    assert memory.tier.stats()[:3] == (8, 4, 4)
    assert memory.say("abcdef") == 6
    assert memory.num_copied == 4
    stats = memory.tier.stats()
    assert (stats.num_stored, stats.num_loaded, stats.num_dropped) == (8, 4, 0)
    assert memory.say("ABCD") == 4


def test_only_what_has_a_name_is_copied() -> None:
    memory = Memory(4, 8)
    lease = PageLease(memory.allocator)
    lease.grow(4, state="used")
    lease.close(is_kept=True)
    assert memory.allocator.num_cached_pages == 4
    memory.say("ABC")
    assert memory.tier.stats().held == 0


def test_the_longest_there_go_first_and_the_end_of_a_sequence_before_its_beginning() -> None:
    memory = Memory(4, 4)
    memory.say("abcd")
    memory.say("ABCD")
    assert set(memory.tier.parents()) == set(keys_of("abcd"))
    memory.allocator.take_changes()
    memory.say("xy")  # ABC and ABCD go to the tier, abc and abcd for them
    assert list(memory.tier.parents()) == [b"ab", b"a", b"ABCD", b"ABC"]
    assert memory.allocator.take_changes() == ((b"x", b"xy"), (b"abcd", b"abc"))
    assert memory.say("abcd") == 2


def test_of_more_than_fit_in_the_beginning_is_kept() -> None:
    memory = Memory(6, 2)
    memory.say("abcdef")
    memory.say("ABCDEF")
    assert set(memory.tier.parents()) == {b"a", b"ab"}
    assert memory.allocator.take_changes().added == (*keys_of("ab"), *keys_of("ABCDEF"))


def test_a_tier_without_room_for_a_page_is_none() -> None:
    memory = Memory(4, 0)
    memory.say("abcd")
    assert memory.say("ABCD") == 0
    assert memory.say("abcd") == 0
    assert memory.tier.stats().total == 0


def test_what_is_not_worth_a_copy_is_computed_and_kept_once() -> None:
    memory = Memory(4, 8)
    memory.say("abcd")
    memory.say("ABCD")
    asked = []
    assert memory.say("abcd", is_worth=lambda num, before: bool(asked.append((num, before)))) == 0
    assert asked == [(4, 0)]
    assert memory.num_copied == 0
    assert set(memory.tier.parents()) == set(keys_of("ABCD")), "what was computed again is in the pool alone"
    assert memory.say("ab") == 2
    assert memory.allocator.take_changes().evicted == ()


def test_without_room_in_the_pool_nothing_comes_back_and_nothing_is_lost() -> None:
    memory = Memory(4, 8)
    memory.say("abcd")
    memory.say("ABCD")
    with PageLease(memory.allocator, num_promised_pages=2):
        lease = PageLease(memory.allocator)
        taken = take_prefix(
            lease,
            memory.allocator,
            memory.tier,
            keys_of("abcd"),
            is_worth=lambda *_: True,
            timed=lambda _, copy: copy(),
        )
        assert taken == 0
        assert memory.tier.stats().held == 4
        lease.close()
    assert memory.say("abcd") == 4


def test_a_page_that_moves_between_the_tiers_is_no_news() -> None:
    memory = Memory(4, 8)
    memory.say("abcd")
    memory.allocator.take_changes()
    memory.say("ABCD")
    assert memory.allocator.take_changes() == (tuple(keys_of("ABCD")), ())
    memory.say("abcd")
    assert not memory.allocator.has_changes


def test_what_was_computed_behind_a_wrong_page_is_found_in_neither_tier() -> None:
    memory = Memory(6, 8)
    memory.say("abcd")
    memory.say("abXY")
    memory.say("klmn")  # the ends of both go to the tier
    lease, _ = memory.begin("ab")
    assert {b"abX", b"abXY"} <= set(memory.tier.parents())
    memory.allocator.take_changes()
    memory.allocator.unname(lease.page_ids[1:])
    assert set(memory.tier.parents()) <= {*keys_of("klmn"), b"a"}
    changes = memory.allocator.take_changes()
    assert {b"ab", b"abc", b"abcd", b"abX", b"abXY"} == set(changes.evicted)
    lease.close()
    memory.allocator.check_integrity()
    assert memory.say("abcd") == 1


def test_a_stored_page_does_not_hide_that_one_before_it_is_doubtful() -> None:
    memory = Memory(6, 8)
    memory.say("abcd")
    memory.say("ABCDE")  # all of abcd but a are in the tier
    assert {b"ab", b"abc", b"abcd"} <= set(memory.tier.parents())
    lease, _ = memory.begin("a")
    memory.allocator.unname(lease.page_ids)
    lease.close()
    assert not memory.tier.parents().keys() & set(keys_of("abcd"))


def test_a_slot_that_was_given_back_is_never_read_as_another() -> None:
    pool = PagePool(LAYOUT, 4)
    space = SwapSpace(pool, 2 * LAYOUT.page_bytes)
    (old,) = space.store([0])
    space.free([old])
    (new,) = space.store([1])
    assert new != old
    with pytest.raises(InvariantViolated, match="not held"):
        space.load([old], [2])
    with pytest.raises(InvariantViolated, match="not held"):
        space.free([old])
    space.load([new], [2])


@pytest.mark.parametrize("damage", ["slot", "key", "both"])
def test_integrity_check_finds(damage: str) -> None:
    memory = Memory(4, 8)
    memory.say("abcd")
    memory.say("ABCD")
    entries = memory.tier._entries
    if damage == "slot":
        memory.tier._space.free([entries[b"a"].slot])
    elif damage == "key":
        entries[b"a"] = entries[b"ab"]
    else:
        entries[b"A"] = entries.pop(b"a")
    with pytest.raises(
        InvariantViolated, match="tier do not agree" if damage != "both" else "in the pool and in the store"
    ):
        memory.allocator.check_integrity()


TEXTS = ["abcdefg", "abcxyzw", "abxyzwv", "qrstuvw", "qrsabcd"]


class TierMachine(RuleBasedStateMachine):
    """Sequences that begin, continue, share, end, and turn out wrong, in a pool and a tier that are both too small.

    The model is what a page with a key must hold: a sequence that is given one by its key finds just that, also after
    the page and the slot were another's. What is found was named, and not taken back since.
    """

    leases = Bundle("leases")
    junk = Bundle("junk")
    num_pages, num_slots = 9, 4

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(self.num_pages, self.num_slots)
        self.allocator = self.memory.allocator
        self.open: dict[PageLease, str] = {}
        self.said: set[bytes] = set()
        self.sound: set[bytes] = set()
        """Keys that were named since they were last taken back."""

    @rule(
        target=leases,
        text=st.sampled_from(TEXTS),
        end=st.integers(1, 7),
        is_worth=st.booleans(),
        named=st.integers(0, 7),
    )
    def begin(self, text: str, end: int, is_worth: bool, named: int) -> object:
        text = text[:end]
        if not self.allocator.can_promise(end):
            return multiple()
        pool_keys = self._pool_keys()
        expected = 0
        for key in keys_of(text):
            if key not in pool_keys:
                break
            expected += 1
        stored = len(self.allocator.find_stored(keys_of(text)[expected:]))
        before = self.memory.num_copied
        lease, num_there = self.memory.begin(text, is_worth=lambda num, start: is_worth)
        assert num_there == expected + (stored if is_worth else 0)
        assert self.memory.num_copied - before == num_there - expected
        assert set(keys_of(text)[:num_there]) <= self.sound
        self.open[lease] = text
        if named >= num_there:
            computed = text[: max(named, num_there)][:end]
            part = PageLeasePart(lease, len(computed))
            self.memory.compute(part, computed, num_there)  # type: ignore[arg-type]
            self.sound |= self._pool_keys() & set(keys_of(computed))
        return lease

    @rule(target=junk, count=st.integers(1, 5), state=st.sampled_from(["reserved", "used"]))
    def overwrite(self, count: int, state: str) -> object:
        """Somebody who names nothing, such as a transfer that is not sealed."""
        if not self.allocator.can_promise(count):
            return multiple()
        lease = PageLease(self.allocator)
        for page_id in lease.grow(count, state=state):  # type: ignore[arg-type]
            self.memory.pool.bytes[page_id] = 255
        return lease

    @rule(lease=consumes(junk), is_kept=st.booleans())
    def end_junk(self, lease: PageLease, is_kept: bool) -> None:
        lease.close(is_kept=is_kept)

    @rule(lease=consumes(leases))
    def end(self, lease: PageLease) -> None:
        self.open.pop(lease)
        lease.close()

    @rule(lease=leases, place=st.integers(0, 6))
    def unname(self, lease: PageLease, place: int) -> None:
        page_ids = lease.page_ids[place : place + 1]
        key = next((key for key, page in self.allocator._page_of.items() if [page] == page_ids), None)
        self.allocator.unname(page_ids)
        if key is not None:
            found = self._pool_keys() | self.memory.tier.parents().keys()
            assert not [other for other in found if other.startswith(key)]
            self.sound = {other for other in self.sound if not other.startswith(key)}

    @rule()
    def take_changes(self) -> None:
        added, evicted = map(set, self.allocator.take_changes())
        assert not added & self.said
        assert evicted <= self.said
        self.said = (self.said | added) - evicted
        assert self.said == self._pool_keys() | self.memory.tier.parents().keys()

    def _pool_keys(self) -> set[bytes]:
        return set(self.allocator._page_of)

    @invariant()
    def books_agree(self) -> None:
        self.allocator.check_integrity()
        counts = self.allocator.counts()
        assert counts.total == self.num_pages == sum(counts[1:])
        stats = self.memory.tier.stats()
        assert stats.total == self.num_slots == stats.free + stats.held
        assert stats.held == len(self.memory.tier.parents()) == stats.num_stored - stats.num_loaded - stats.num_dropped
        assert not self._pool_keys() & self.memory.tier.parents().keys()
        assert self._pool_keys() | self.memory.tier.parents().keys() <= self.sound

    @invariant()
    def named_pages_hold_what_they_are_named_for(self) -> None:
        assert all(self.memory.holds(page_id, key) for key, page_id in self.allocator._page_of.items())


class PageLeasePart:
    """The first pages of a lease."""

    def __init__(self, lease: PageLease, num_pages: int) -> None:
        self.page_ids = lease.page_ids[:num_pages]


TierMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTierMachine = TierMachine.TestCase
