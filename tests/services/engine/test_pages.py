import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.engine.pages import (
    CachedPages,
    PageAllocator,
    PageCounts,
    PageLayout,
    PageLease,
    PagePool,
    num_pages_for,
)
from services.runtime.errors import InvariantViolated, NoFreePages

LAYOUT = PageLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)


class TestLayoutAndPool:
    def test_a_page_is_heads_layers_kv_slots_dim(self) -> None:
        assert LAYOUT.shape == (2, 3, 2, 4, 8)
        assert LAYOUT.page_bytes == 2 * 3 * 2 * 4 * 8 * 2

    @pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
    def test_number_of_pages(self, num_tokens: int, expected: int) -> None:
        assert LAYOUT.num_pages_for(num_tokens) == num_pages_for(num_tokens, 4) == expected

    def test_pool_is_zero_contiguous_and_of_the_dtype(self) -> None:
        pool = PagePool(LAYOUT, 5)
        assert pool.data.shape == (5, 2, 3, 2, 4, 8)
        assert pool.data.is_contiguous()
        assert pool.data.dtype == torch.bfloat16
        assert not pool.data.any()

    def test_bytes_are_the_same_memory_one_row_per_page(self) -> None:
        pool = PagePool(LAYOUT, 5)
        pool.data[3] = 1.0
        assert pool.bytes.shape == (5, LAYOUT.page_bytes)
        assert pool.bytes.any(dim=1).tolist() == [False, False, False, True, False]
        pool.bytes[3] = 0
        assert not pool.data.any()

    def test_memory_outlives_the_pool(self) -> None:
        data = PagePool(LAYOUT, 5).data
        data.fill_(2.0)
        assert data.sum().item() == 2.0 * data.numel()

    @pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
    def test_nonsense_is_refused(self, field: str) -> None:
        arguments = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 1, field: 0}
        with pytest.raises(ValueError, match=field):
            PageLayout(**arguments, dtype=torch.float32)

    def test_an_empty_pool_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1 page"):
            PagePool(LAYOUT, 0)
        with pytest.raises(ValueError, match="at least 1 page"):
            PageAllocator(0)


class TestAllocator:
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
            lambda: allocator.cache([2]),
            lambda: allocator.cache(allocator.allocate(1, state="reserved")),
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
            (lambda a: a._cachings.__setitem__(2, 0), r"list of cached pages is wrong about pages \[2\]"),
            (lambda a: (a.cache([0]), a._cachings.clear()), r"list of cached pages is wrong about pages \[0\]"),
            (lambda a: (a.cache([0]), a._generations.__setitem__(0, 0)), "cached but was never allocated"),
            (lambda a: (a.cache([0]), a._references.__setitem__(0, 1)), "page 0 is cached with 1 holders"),
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
    def test_cached_pages_are_taken_again_as_they_were(self) -> None:
        allocator = PageAllocator(4)
        page_ids = allocator.allocate(3, state="used")[::-1]
        generations = allocator.generations(page_ids)
        cached = allocator.cache(page_ids)
        assert cached.page_ids == tuple(page_ids)
        assert allocator.counts() == PageCounts(total=4, free=1, cached=3, reserved=0, used=0)
        assert allocator.num_available_pages == 4
        assert allocator.take_cached(cached)
        assert allocator.counts() == PageCounts(total=4, free=1, cached=0, reserved=0, used=3)
        assert allocator.generations(page_ids) == generations
        assert [allocator.num_references(page_id) for page_id in page_ids] == [1, 1, 1]
        allocator.check_integrity()

    def test_an_allocation_takes_free_pages_then_those_cached_first(self) -> None:
        allocator = PageAllocator(6)
        first, second = allocator.allocate(2, state="used"), allocator.allocate(2, state="used")
        cached_first, cached_second = allocator.cache(second), allocator.cache(first)
        assert not {*allocator.allocate(2, state="used")} & {*first, *second}
        before = allocator.generation(second[0])
        assert allocator.allocate(1, state="reserved") == [second[0]]
        assert allocator.generation(second[0]) == before + 1
        assert not allocator.take_cached(cached_first)
        assert allocator.state(second[1]) == "cached"  # a refusal changes nothing
        assert allocator.take_cached(cached_second)
        allocator.check_integrity()

    def test_taking_pages_back_makes_them_the_youngest_again(self) -> None:
        allocator = PageAllocator(2)
        (one,), (other,) = allocator.allocate(1, state="used"), allocator.allocate(1, state="used")
        cached_one = allocator.cache([one])
        allocator.cache([other])
        assert allocator.take_cached(cached_one)
        allocator.cache([one])
        assert allocator.allocate(1, state="used") == [other]

    def test_a_handle_serves_once(self) -> None:
        allocator = PageAllocator(2)
        page_ids = allocator.allocate(2, state="used")
        cached = allocator.cache(page_ids)
        assert allocator.take_cached(cached)
        assert not allocator.take_cached(cached)
        again = allocator.cache(page_ids)
        assert not allocator.take_cached(cached)  # the same pages, but who cached them now may have changed them
        allocator.drop_cached(cached)
        assert allocator.take_cached(again)

    def test_what_is_dropped_is_free_and_stays_whoever_has_it_next(self) -> None:
        allocator = PageAllocator(3)
        cached = allocator.cache(allocator.allocate(3, state="used"))
        (evicted,) = allocator.allocate(1, state="used")
        allocator.drop_cached(cached)
        assert allocator.counts() == PageCounts(total=3, free=2, cached=0, reserved=0, used=1)
        allocator.drop_cached(cached)
        assert allocator.state(evicted) == "used"
        assert not allocator.take_cached(cached)
        allocator.check_integrity()

    def test_a_promise_keeps_cached_pages_from_being_taken(self) -> None:
        allocator = PageAllocator(4)
        cached = allocator.cache(allocator.allocate(3, state="used"))
        allocator.promise(2)
        assert not allocator.take_cached(cached)
        allocator.check_integrity()
        allocator.unpromise(1)
        assert allocator.take_cached(cached)
        allocator.check_integrity()

    def test_shared_pages_are_not_cached(self) -> None:
        allocator = PageAllocator(2)
        page_ids = allocator.allocate(1, state="used")
        allocator.retain(page_ids)
        with pytest.raises(InvariantViolated, match="2 holders"):
            allocator.cache(page_ids)

    def test_a_lease_goes_into_the_cache_and_comes_back(self) -> None:
        allocator = PageAllocator(5)
        lease = PageLease(allocator, num_promised_pages=4)
        lease.grow(2, state="used")
        page_ids = lease.page_ids[:]
        cached = lease.cache()
        assert lease.is_closed
        assert lease.page_ids == []
        assert allocator.num_promised_pages == 0
        lease.close()
        assert allocator.counts().cached == 2
        with pytest.raises(InvariantViolated, match="closed"):
            lease.cache()
        again = PageLease.from_cached(allocator, cached)
        assert again is not None
        assert again.page_ids == page_ids
        assert PageLease.from_cached(allocator, cached) is None
        again.close()
        assert allocator.counts().free == 5


class TestLease:
    def test_grows_from_its_promise_then_from_what_is_left(self) -> None:
        allocator = PageAllocator(4)
        with PageLease(allocator, num_promised_pages=2) as lease:
            table = lease.page_ids
            assert lease.grow(1, state="used") == table
            assert lease.num_promised_pages == 1
            assert len(lease.grow_to(4, state="used")) == 3
            assert lease.grow_to(4, state="used") == []
            assert len(table) == 4
            assert allocator.counts().used == 4
        assert table == []  # a sequence that shares the list cannot reach its former pages
        assert allocator.counts().free == 4
        assert allocator.num_promised_pages == 0

    def test_a_promise_beats_newcomers(self) -> None:
        allocator = PageAllocator(4)
        lease = PageLease(allocator, num_promised_pages=3)
        with pytest.raises(NoFreePages):
            PageLease(allocator, num_promised_pages=2)
        other = PageLease(allocator)
        with pytest.raises(NoFreePages):
            other.grow(2, state="used")
        assert other.page_ids == []
        assert len(lease.grow(3, state="reserved")) == 3
        allocator.check_integrity()

    def test_an_unfulfilled_growth_leaves_everything_as_it_was(self) -> None:
        allocator = PageAllocator(4)
        lease = PageLease(allocator, num_promised_pages=2)
        with pytest.raises(NoFreePages):
            lease.grow(5, state="used")
        assert lease.num_promised_pages == allocator.num_promised_pages == 2
        assert lease.page_ids == []

    def test_close_is_idempotent_and_final(self) -> None:
        allocator = PageAllocator(4)
        lease = PageLease(allocator, num_promised_pages=3)
        lease.grow(1, state="reserved")
        lease.close()
        allocator.allocate(4, state="used")  # a second close must not free another's pages
        lease.close()
        assert lease.is_closed
        assert allocator.counts().used == 4
        with pytest.raises(InvariantViolated, match="closed"):
            lease.grow(1, state="used")

    def test_an_error_inside_gives_everything_back(self) -> None:
        allocator = PageAllocator(4)

        def fail_half_way() -> None:
            with PageLease(allocator, num_promised_pages=2) as lease:
                lease.grow(3, state="reserved")
                raise RuntimeError("boom")

        with pytest.raises(RuntimeError, match="boom"):
            fail_half_way()
        assert allocator.counts().free == 4
        assert allocator.num_promised_pages == 0

    def test_mark_used_takes_what_is_reserved(self) -> None:
        allocator = PageAllocator(4)
        lease = PageLease(allocator)
        lease.grow(2, state="reserved")
        lease.grow(1, state="used")
        lease.mark_used()
        lease.mark_used()
        assert allocator.counts() == PageCounts(total=4, free=1, cached=0, reserved=0, used=3)


class AllocatorMachine(RuleBasedStateMachine):
    """Random use by many holders against a model: page → number of holders, and cached pages by age."""

    leases = Bundle("leases")
    shares = Bundle("shares")
    cachings = Bundle("cachings")
    num_pages = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.num_pages)
        self.holders: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.open: set[PageLease] = set()
        self.cached: dict[int, CachedPages] = {}

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

    @rule(target=cachings, lease=leases)
    def cache(self, lease: PageLease) -> object:
        pages = lease.page_ids[:]
        is_cachable = all(self.holders[page] == 1 and self.allocator.state(page) == "used" for page in pages)
        if lease.is_closed or not is_cachable:
            return multiple()
        cached = lease.cache()
        self.open.discard(lease)
        for page in pages:
            del self.holders[page]
            self.cached[page] = cached
        return cached

    @rule(target=leases, cached=cachings)
    def take_cached(self, cached: CachedPages) -> object:
        is_there = all(self.cached.get(page) is cached for page in cached.page_ids)
        available = self.num_pages - len(self.holders) - sum(lease.num_promised_pages for lease in self.open)
        lease = PageLease.from_cached(self.allocator, cached)
        assert (lease is not None) == (is_there and len(cached.page_ids) <= available)
        if lease is None:
            return multiple()
        self.open.add(lease)
        assert lease.page_ids == [*cached.page_ids]
        for page in cached.page_ids:
            del self.cached[page]
            self.holders[page] = 1
        return lease

    @rule(cached=cachings)
    def drop_cached(self, cached: CachedPages) -> None:
        self.allocator.drop_cached(cached)
        self.cached = {page: by for page, by in self.cached.items() if by is not cached}

    @rule(lease=leases)
    def close(self, lease: PageLease) -> None:
        pages = lease.page_ids[:]
        lease.close()
        self.open.discard(lease)
        self._let_go(pages)

    def _let_go(self, pages: list[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                del self.holders[page]
                assert self.allocator.state(page) == "free"

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
