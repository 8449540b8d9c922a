"""A sequence's pages: what it was promised it gets, and leaving gives all of it back."""

import pytest

from services.engine.cache.lease import PageLease
from services.engine.cache.pages import PageAllocator, PageCounts
from services.runtime.errors import InvariantViolated, NoFreePages


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
