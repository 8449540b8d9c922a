import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.engine.pages import PageAllocator, PageCounts, PageLayout, PageLease, PagePool, num_pages_for
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
            (lambda a: a._generations.__setitem__(0, 0), "held but was never allocated"),
        ],
    )
    def test_integrity_check_finds(self, break_it, complaint: str) -> None:  # type: ignore[no-untyped-def]
        allocator = PageAllocator(4)
        assert allocator.allocate(1, state="used") == [0]
        allocator.check_integrity()
        break_it(allocator)
        with pytest.raises(InvariantViolated, match=complaint):
            allocator.check_integrity()


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
    """Random use by many holders against a model that is a dict of page → number of holders."""

    leases = Bundle("leases")
    shares = Bundle("shares")
    num_pages = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.num_pages)
        self.holders: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.open: set[PageLease] = set()

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
        pages = lease.grow(count, state=state)  # type: ignore[arg-type]
        assert len(set(pages)) == count
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
        assert counts.free == self.num_pages - len(self.holders)
        assert counts.cached == 0
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
