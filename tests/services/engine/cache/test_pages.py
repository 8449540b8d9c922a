import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.engine.cache.lease import PageLease
from services.engine.cache.pages import PageAllocator, PageChanges, PageCounts
from services.runtime.errors import InvariantViolated, NoFreePages


def keep(allocator: PageAllocator) -> None:
    allocator.release([0], is_kept=True)


class TestAllocator:
    def test_a_pool_has_pages(self) -> None:
        with pytest.raises(ValueError, match="at least 1 page"):
            PageAllocator(0)

    def test_pages_move_through_the_states(self) -> None:
        allocator = PageAllocator(10)
        reserved = allocator.allocate(3, state="reserved")
        used = allocator.allocate(2, state="used")
        assert allocator.counts() == PageCounts(total=10, free=5, cached=0, reserved=3, used=2)
        assert len({*reserved, *used}) == 5
        allocator.mark_used(reserved)
        assert allocator.counts() == PageCounts(total=10, free=5, cached=0, reserved=0, used=5)
        allocator.release(reserved)
        allocator.release(used)
        assert allocator.counts() == PageCounts(total=10, free=10, cached=0, reserved=0, used=0)
        allocator.check_integrity()

    def test_too_many_are_refused_whole(self) -> None:
        allocator = PageAllocator(4)
        allocator.allocate(2, state="used")
        with pytest.raises(NoFreePages, match=r"3 KV pages are needed, 2 of 4"):
            allocator.allocate(3, state="used")
        assert allocator.num_free_pages == 2
        allocator.check_integrity()

    def test_a_shared_page_stays_until_the_last_holder_lets_go(self) -> None:
        allocator = PageAllocator(2)
        page = allocator.allocate(1, state="used")
        allocator.retain(page)
        allocator.release(page)
        assert allocator.state(page[0]) == "used"
        assert allocator.num_references(page[0]) == 1
        allocator.release(page)
        assert allocator.state(page[0]) == "free"

    def test_generation_changes_at_each_allocation_only(self) -> None:
        allocator = PageAllocator(1)
        seen = []
        for _ in range(3):
            (page,) = allocator.allocate(1, state="reserved")
            generation = allocator.generation(page)
            allocator.mark_used([page])
            allocator.retain([page])
            allocator.release([page, page])
            assert allocator.generation(page) == generation
            seen.append(generation)
        assert len(set(seen)) == 3

    def test_promised_pages_are_nobody_elses(self) -> None:
        allocator = PageAllocator(5)
        allocator.promise(3)
        assert allocator.num_free_pages == 5  # counted, not taken
        assert not allocator.can_promise(3)
        with pytest.raises(NoFreePages):
            allocator.promise(3)
        with pytest.raises(NoFreePages):
            allocator.allocate(3, state="used")
        allocator.allocate(2, state="used")
        allocator.allocate(3, state="reserved", num_promised=3)
        assert allocator.num_promised_pages == 0
        allocator.check_integrity()

    def test_a_promise_can_be_given_back(self) -> None:
        allocator = PageAllocator(5)
        allocator.promise(5)
        allocator.unpromise(5)
        assert len(allocator.allocate(5, state="used")) == 5

    def test_misuse_is_told(self) -> None:
        allocator = PageAllocator(3)
        (page,) = allocator.allocate(1, state="used")
        for misuse in (
            lambda: allocator.release([2]),
            lambda: allocator.release([page, page]),
            lambda: allocator.retain([2]),
            lambda: allocator.mark_used([page]),
            lambda: allocator.mark_used([2]),
            lambda: allocator.release([-1]),
            lambda: allocator.release([3]),
            lambda: allocator.generation(-1),
            lambda: allocator.generations([0, -1]),
            lambda: allocator.generations([0, 3]),
            lambda: allocator.name([2], [b"a"]),
            lambda: allocator.name(allocator.allocate(1, state="reserved"), [b"a"]),
            lambda: (allocator.name([page], [b"b"]), allocator.name([page], [b"c"])),
            lambda: allocator.unname([2]),
            lambda: allocator.take([page], num_promised=1),
            lambda: allocator.take([3], [1]),
            lambda: allocator.unpromise(1),
            lambda: allocator.promise(-1),
            lambda: allocator.allocate(-1, state="used"),
            lambda: allocator.allocate(1, state="used", num_promised=1),
        ):
            with pytest.raises(InvariantViolated):
                misuse()

    @pytest.mark.parametrize(
        ("break_it", "complaint"),
        [
            (lambda a: a._free_ids.append(a._free_ids[0]), "listed as free twice"),
            (lambda a: a._free_ids.pop(), "list of free pages is wrong"),
            (lambda a: a._references.__setitem__(0, 0), "page 0 is used with 0 holders"),
            (lambda a: a._references.__setitem__(2, 1), "page 2 is free with 1 holders"),
            (lambda a: a._states.__setitem__(2, 1), "1 pages said to be cached|0 pages said to be cached, 1 are"),
            (lambda a: a._num_in_state.__setitem__(0, 7), "7 pages said to be free, 3 are.*add up to 8"),
            (lambda a: setattr(a, "_num_promised", 4), "4 pages promised of 3 free"),
            (lambda a: a._generations.__setitem__(0, 0), "used but was never allocated"),
            (lambda a: a._cached.__setitem__(2, None), r"list of cached pages is wrong about pages \[2\]"),
            (lambda a: (keep(a), a._cached.clear()), r"list of cached pages is wrong about pages \[0\]"),
            (lambda a: (keep(a), a._generations.__setitem__(0, 0)), "cached but was never allocated"),
            (lambda a: (keep(a), a._references.__setitem__(0, 1)), "page 0 is cached with 1 holders"),
            (lambda a: a._keys.__setitem__(0, b"k"), "pages and keys do not agree"),
            (lambda a: a._page_of.__setitem__(b"k", 0), "pages and keys do not agree"),
            (lambda a: (a._keys.__setitem__(2, b"k"), a._page_of.__setitem__(b"k", 2)), r"pages \[2\] are named and"),
        ],
    )
    def test_integrity_check_finds(self, break_it, complaint: str) -> None:  # type: ignore[no-untyped-def]
        allocator = PageAllocator(4)
        assert allocator.allocate(1, state="used") == [0]
        allocator.check_integrity()
        break_it(allocator)
        with pytest.raises(InvariantViolated, match=complaint):
            allocator.check_integrity()


class TestCache:
    def test_named_pages_are_found_in_a_row_from_the_first_on(self) -> None:
        allocator = PageAllocator(4)
        pages = allocator.allocate(3, state="used")
        allocator.name(pages, [b"a", b"b", b"c"])
        assert allocator.find([b"a", b"b", b"x", b"c"]) == pages[:2]
        assert allocator.find([b"x", b"a"]) == []
        assert allocator.take(pages[:2])
        assert [allocator.num_references(page) for page in pages] == [2, 2, 1]
        allocator.check_integrity()

    def test_a_named_page_stays_when_its_holders_have_gone_and_comes_back_as_it_was(self) -> None:
        allocator = PageAllocator(3)
        pages = allocator.allocate(2, state="used")
        allocator.name(pages[:1], [b"a"])
        generation = allocator.generation(pages[0])
        allocator.release(pages)
        assert allocator.counts() == PageCounts(total=3, free=2, cached=1, reserved=0, used=0)
        assert allocator.take(allocator.find([b"a"]))
        assert allocator.counts().used == allocator.num_references(pages[0]) == 1
        assert allocator.generation(pages[0]) == generation
        allocator.check_integrity()

    def test_of_two_pages_with_one_content_one_is_named(self) -> None:
        allocator = PageAllocator(3)
        first, second = allocator.allocate(2, state="used")
        allocator.name([first], [b"a"])
        allocator.name([second], [b"a"])
        allocator.name([first], [b"a"])
        assert allocator.find([b"a"]) == [first]
        allocator.release([first, second])
        assert (allocator.state(first), allocator.state(second)) == ("cached", "free")
        allocator.check_integrity()

    def test_what_was_let_go_first_gives_way_first_and_the_end_of_a_sequence_before_its_beginning(self) -> None:
        allocator = PageAllocator(4)
        old, new = allocator.allocate(2, state="used"), allocator.allocate(2, state="used")
        allocator.name(new, [b"c", b"d"])
        allocator.name(old, [b"a", b"b"])
        allocator.release(old)
        allocator.release(new)
        assert allocator.take_changes() == ((b"c", b"d", b"a", b"b"), ())
        taken = [allocator.allocate(1, state="used")[0] for _ in range(4)]
        assert taken == [*old[::-1], *new[::-1]]
        assert allocator.take_changes() == ((), (b"b", b"a", b"d", b"c"))
        assert allocator.find([b"a"]) == []
        allocator.check_integrity()

    def test_using_a_page_again_makes_it_the_youngest(self) -> None:
        allocator = PageAllocator(2)
        (one,), (other,) = allocator.allocate(1, state="used"), allocator.allocate(1, state="used")
        allocator.name([one, other], [b"a", b"b"])
        allocator.release([one])
        allocator.release([other])
        assert allocator.take([one])
        allocator.release([one])
        assert allocator.allocate(1, state="used") == [other]

    def test_a_page_in_use_is_never_given_away(self) -> None:
        allocator = PageAllocator(2)
        pages = allocator.allocate(2, state="used")
        allocator.name(pages, [b"a", b"b"])
        with pytest.raises(NoFreePages):
            allocator.allocate(1, state="used")
        assert allocator.find([b"a", b"b"]) == pages

    def test_what_cannot_be_trusted_is_found_by_nobody(self) -> None:
        allocator = PageAllocator(2)
        pages = allocator.allocate(2, state="used")
        allocator.name(pages, [b"a", b"b"])
        allocator.unname(pages[1:])
        assert allocator.find([b"a", b"b"]) == pages[:1]
        allocator.release(pages)
        assert allocator.counts().cached == 1

    def test_with_a_page_goes_what_was_computed_behind_it(self) -> None:
        allocator = PageAllocator(8)
        first, second, other = (allocator.allocate(2, state="used") for _ in range(3))
        allocator.name(first, [b"a", b"b"])
        allocator.name(second, [b"c", b"d"], parent=b"b")
        allocator.name(other, [b"x", b"y"])
        allocator.release(second)
        allocator.release(other)
        allocator.take_changes()
        allocator.unname(first)
        assert sorted(allocator.take_changes().evicted) == [b"a", b"b", b"c", b"d"]
        assert allocator.counts() == PageCounts(total=8, free=4, cached=2, reserved=0, used=2)
        assert allocator.find([b"x", b"y"]) == other
        allocator.check_integrity()

    def test_what_gave_way_in_between_does_not_save_what_is_behind_it(self) -> None:
        allocator = PageAllocator(3)
        (first,), (middle,), (last,) = (allocator.allocate(1, state="used") for _ in range(3))
        allocator.name([first, middle, last], [b"a", b"b", b"c"])
        allocator.release([middle])
        assert allocator.allocate(1, state="used") == [middle]
        allocator.unname([first])
        allocator.name([first, middle], [b"a", b"b"])
        assert allocator.find([b"a", b"b", b"c"]) == [first, middle]

    def test_behind_a_page_that_nobody_finds_nothing_is_named(self) -> None:
        allocator = PageAllocator(3)
        pages = allocator.allocate(3, state="used")
        allocator.name(pages[1:], [b"b", b"c"], parent=b"a")
        allocator.name(pages[:1], [b"a"])
        assert allocator.find([b"a", b"b"]) == pages[:1]
        allocator.name(pages[1:], [b"b", b"c"], parent=b"a")
        assert allocator.find([b"a", b"b", b"c"]) == pages

    def test_what_comes_and_goes_between_two_looks_is_no_change(self) -> None:
        allocator = PageAllocator(1)
        pages = allocator.allocate(1, state="used")
        allocator.name(pages, [b"a"])
        allocator.unname(pages)
        assert not allocator.has_changes
        allocator.name(pages, [b"a"])
        assert allocator.take_changes() == ((b"a",), ())
        allocator.unname(pages)
        assert allocator.has_changes
        allocator.name(pages, [b"a"])
        assert allocator.take_changes() == PageChanges.none()

    def test_kept_pages_are_taken_by_their_generation(self) -> None:
        allocator = PageAllocator(3)
        pages = allocator.allocate(2, state="used")
        generations = allocator.generations(pages)
        allocator.release(pages, is_kept=True)
        assert allocator.counts().cached == 2
        assert allocator.take(pages, generations)
        allocator.release(pages, is_kept=True)
        assert pages[1] in allocator.allocate(2, state="used")
        assert not allocator.take(pages, generations)
        assert allocator.state(pages[0]) == "cached"  # a refusal changes nothing
        allocator.drop(pages, generations)
        allocator.drop(pages, generations)
        assert (allocator.state(pages[0]), allocator.state(pages[1])) == ("free", "used")
        assert not allocator.take(pages[:1], generations[:1])  # free now, though of the same generation
        allocator.check_integrity()

    def test_dropping_what_was_kept_leaves_what_a_key_finds(self) -> None:
        allocator = PageAllocator(2)
        pages = allocator.allocate(2, state="used")
        allocator.name(pages[:1], [b"a"])
        allocator.release(pages, is_kept=True)
        allocator.drop(pages, allocator.generations(pages))
        assert [allocator.state(page) for page in pages] == ["cached", "free"]

    def test_reserved_pages_are_not_kept(self) -> None:
        allocator = PageAllocator(2)
        pages = allocator.allocate(2, state="reserved")
        allocator.release(pages, is_kept=True)
        assert allocator.counts().free == 2

    def test_a_promise_keeps_cached_pages_from_being_taken_by_others(self) -> None:
        allocator = PageAllocator(4)
        pages = allocator.allocate(3, state="used")
        allocator.name(pages, [b"a", b"b", b"c"])
        allocator.release(pages)
        allocator.promise(2)
        assert not allocator.take(pages)
        allocator.check_integrity()
        assert allocator.take(pages, num_promised=1)
        assert allocator.num_promised_pages == 1
        allocator.check_integrity()


class AllocatorMachine(RuleBasedStateMachine):
    """Random use by many holders against a model: page → number of holders, names, and cached pages by age."""

    leases = Bundle("leases")
    shares = Bundle("shares")
    kept = Bundle("kept")
    num_pages = 12

    def __init__(self) -> None:
        super().__init__()
        self.said: set[bytes] = set()
        self.allocator = PageAllocator(self.num_pages)
        self.holders: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.open: set[PageLease] = set()
        self.cached: dict[int, None] = {}
        self.names: dict[int, bytes] = {}

    @rule()
    def take_changes(self) -> None:
        added, evicted = map(set, self.allocator.take_changes())
        assert not added & self.said, "a key that is told twice counts twice"
        assert evicted <= self.said
        self.said = (self.said | added) - evicted
        assert self.said == set(self.names.values())
        assert not self.allocator.has_changes

    @rule(target=leases, num_promised=st.integers(0, 8))
    def admit(self, num_promised: int) -> object:
        available = self.num_pages - len(self.holders) - sum(lease.num_promised_pages for lease in self.open)
        assert self.allocator.can_promise(num_promised) == (num_promised <= available)
        if num_promised > available:
            with pytest.raises(NoFreePages):
                PageLease(self.allocator, num_promised_pages=num_promised)
            return multiple()
        lease = PageLease(self.allocator, num_promised_pages=num_promised)
        self.open.add(lease)
        return lease

    @rule(lease=leases, count=st.integers(0, 6), state=st.sampled_from(["reserved", "used"]))
    def grow(self, lease: PageLease, count: int, state: str) -> None:
        if lease.is_closed:
            return
        available = self.num_pages - len(self.holders) - sum(other.num_promised_pages for other in self.open)
        beyond_promise = max(0, count - lease.num_promised_pages)
        if beyond_promise > available:
            with pytest.raises(NoFreePages):
                lease.grow(count, state=state)  # type: ignore[arg-type]
            return
        num_evicted = max(0, count - (self.num_pages - len(self.holders) - len(self.cached)))
        oldest = list(self.cached)[:num_evicted]
        pages = lease.grow(count, state=state)  # type: ignore[arg-type]
        assert len(set(pages)) == count
        assert {*pages} & {*self.cached} == {*oldest}
        for page in oldest:
            del self.cached[page]
            self.names.pop(page, None)
        for page in pages:
            assert page not in self.holders
            assert self.allocator.generation(page) != self.generations.get(page, 0)
            assert self.allocator.state(page) == state
            self.generations[page] = self.allocator.generation(page)
            self.holders[page] = 1

    @rule(lease=leases)
    def verify(self, lease: PageLease) -> None:
        lease.mark_used()
        assert all(self.allocator.state(page) == "used" for page in lease.page_ids)

    @rule(target=shares, lease=leases)
    def share(self, lease: PageLease) -> list[int]:
        pages = lease.page_ids[:2]
        self.allocator.retain(pages)
        for page in pages:
            self.holders[page] += 1
        return pages

    @rule(pages=consumes(shares))
    def unshare(self, pages: list[int]) -> None:
        self.allocator.release(pages)
        self._let_go(pages)

    @rule(lease=leases, first=st.integers(0, 3), start=st.integers(0, 3))
    def name(self, lease: PageLease, first: int, start: int) -> None:
        """Content is told by the place in a sequence, of which there are four."""
        pages = lease.page_ids[start:5]
        keys = [b"%d %d" % (first, start + place) for place in range(len(pages))]
        if not pages or any(self.allocator.state(page) != "used" for page in pages):
            return
        if any(self.names.get(page, key) != key for page, key in zip(pages, keys, strict=True)):
            return
        parent = b"%d %d" % (first, start - 1) if start else None
        self.allocator.name(pages, keys, parent=parent)
        if parent is not None and parent not in self.names.values():
            return
        for page, key in zip(pages, keys, strict=True):
            if key not in self.names.values():
                self.names[page] = key

    @rule(lease=leases)
    def unname(self, lease: PageLease) -> None:
        if any(self.allocator.state(page) != "used" for page in lease.page_ids):
            return
        self.allocator.unname(lease.page_ids)
        doubtful = {self.names[page] for page in lease.page_ids if page in self.names}
        if not doubtful:
            return
        there = set(self.names.values()) - doubtful
        for page, key in list(self.names.items()):
            first, place = map(int, key.split())
            if not all(b"%d %d" % (first, earlier) in there for earlier in range(place + 1)):
                del self.names[page]
                if page in self.cached:
                    del self.cached[page]
                    assert self.allocator.state(page) == "free"

    @rule(target=leases, first=st.integers(0, 3), num_promised=st.integers(0, 5))
    def admit_to_a_prefix(self, first: int, num_promised: int) -> object:
        keys = [b"%d %d" % (first, place) for place in range(5)]
        places = {key: page for page, key in self.names.items()}
        expected = []
        for key in keys:
            if key not in places:
                break
            expected.append(places[key])
        found = self.allocator.find(keys)
        assert found == expected
        if not self.allocator.can_promise(num_promised):
            return multiple()
        lease = PageLease(self.allocator, num_promised_pages=num_promised)
        self.open.add(lease)
        self._take(lease, found, None)
        return lease

    @rule(target=kept, lease=leases)
    def keep(self, lease: PageLease) -> object:
        if lease.is_closed:
            return multiple()
        pages = lease.page_ids[:]
        generations = self.allocator.generations(pages)
        are_used = [self.allocator.state(page) == "used" for page in pages]
        lease.close(is_kept=True)
        self.open.discard(lease)
        for page, is_used in zip(reversed(pages), reversed(are_used), strict=True):
            self._drop_holder(page, becomes_cached=is_used)
        return [*pages], generations

    @rule(target=leases, kept=kept)
    def take_kept(self, kept: tuple[list[int], tuple[int, ...]]) -> object:
        lease = PageLease(self.allocator)
        self.open.add(lease)
        self._take(lease, *kept)
        return lease

    @rule(kept=kept)
    def drop(self, kept: tuple[list[int], tuple[int, ...]]) -> None:
        self.allocator.drop(*kept)
        for page, generation in zip(*kept, strict=True):
            if page in self.cached and self.generations[page] == generation and page not in self.names:
                del self.cached[page]

    def _take(self, lease: PageLease, pages: list[int], generations: tuple[int, ...] | None) -> None:
        is_there = all(page in self.cached or self.holders.get(page) for page in pages)
        is_there &= all(self.allocator.state(page) != "reserved" for page in pages)
        is_there &= generations is None or generations == self.allocator.generations(pages)
        available = self.num_pages - len(self.holders) - sum(other.num_promised_pages for other in self.open)
        num_cached = sum(page in self.cached for page in pages)
        num_promised = min(len(pages), lease.num_promised_pages)
        assert lease.take(pages, generations) == (is_there and num_cached - num_promised <= available)
        if not lease.page_ids:
            return
        assert lease.page_ids == pages
        for page in pages:
            self.cached.pop(page, None)
            self.holders[page] = self.holders.get(page, 0) + 1

    @rule(lease=leases)
    def close(self, lease: PageLease) -> None:
        pages = lease.page_ids[:]
        lease.close()
        self.open.discard(lease)
        self._let_go(pages)

    def _let_go(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._drop_holder(page, becomes_cached=page in self.names)

    def _drop_holder(self, page: int, *, becomes_cached: bool) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]
            if becomes_cached:
                self.cached[page] = None
            assert self.allocator.state(page) == ("cached" if becomes_cached else "free")

    @invariant()
    def books_agree(self) -> None:
        self.allocator.check_integrity()
        counts = self.allocator.counts()
        assert counts.total == self.num_pages == sum(counts[1:])
        assert counts.free == self.num_pages - len(self.holders) - len(self.cached)
        assert counts.cached == len(self.cached)
        assert all(self.allocator.state(page) == "cached" for page in self.cached)
        pages = list(range(self.num_pages))
        assert self.allocator.generations(pages) == tuple(self.generations.get(page, 0) for page in pages)
        assert self.allocator.num_promised_pages == sum(lease.num_promised_pages for lease in self.open)
        for page, count in self.holders.items():
            assert self.allocator.num_references(page) == count
            assert self.allocator.generation(page) == self.generations[page]

    def teardown(self) -> None:
        for lease in list(self.open):
            self.close(lease)
        assert self.allocator.num_promised_pages == 0


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase
