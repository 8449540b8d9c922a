"""Accounts of the memory of named requests: shares, what makes room, and what is given back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.named.memory import JournalMemory, MemoryBounds
from services.runtime.errors import Overloaded, RateLimited


class Books:
    """Memory of entries that are numbers, and those that were forgotten."""

    def __init__(self, **bounds):
        self.forgotten = []
        self.memory = JournalMemory(MemoryBounds(**bounds), forget=self.forget)

    def forget(self, entry):
        self.forgotten.append(entry)
        self.memory.drop(entry)


def test_a_tenant_beyond_its_share_is_refused_and_nobody_else():
    books = Books(tenant_bytes=100, all_bytes=300)
    books.memory.take(1, "acme", 60)
    with pytest.raises(RateLimited) as refused:
        books.memory.take(2, "acme", 60)
    assert refused.value.retry_after_s == 1.0
    books.memory.take(3, "other", 60)
    books.memory.drop(1)
    books.memory.take(2, "acme", 60)
    assert books.memory.num_bytes == 120


def test_where_all_is_used_everybody_is_refused():
    books = Books(tenant_bytes=100, all_bytes=150)
    books.memory.take(1, "acme", 100)
    with pytest.raises(Overloaded):
        books.memory.take(2, "other", 60)


def test_what_a_tenant_keeps_makes_room_for_what_it_runs():
    books = Books(tenant_bytes=100, all_bytes=1000)
    for entry in (1, 2):
        books.memory.take(entry, "acme", 40)
        books.memory.keep(entry)
    books.memory.take(3, "acme", 50)
    assert books.forgotten == [1]


def test_who_keeps_most_makes_room_first():
    books = Books(kept_bytes=100)
    books.memory.take(1, "acme", 30)
    books.memory.keep(1)
    for entry in range(2, 12):
        books.memory.take(entry, "flood", 20)
        books.memory.keep(entry)
    assert 1 not in books.forgotten
    assert books.forgotten == [*range(2, 9)]
    assert books.memory.num_kept_bytes == 90


def test_what_nobody_read_for_long_is_forgotten():
    books = Books()
    books.memory.take(1, "acme", 30)
    books.memory.keep(1)
    books.memory.forget_older(60.0)
    assert not books.forgotten
    books.memory.forget_older(-1.0)
    assert books.forgotten == [1]
    assert books.memory.num_bytes == books.memory.num_kept_bytes == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "resize", "keep", "use", "drop"]),
            st.integers(0, 5),
            st.sampled_from("ab"),
            st.integers(0, 60),
        )
    )
)
def test_the_accounts_are_those_of_the_entries(steps):
    books = Books(tenant_bytes=100, all_bytes=150, kept_bytes=70)
    for what, entry, tenant, num_bytes in steps:
        if what == "take":
            try:
                books.memory.take(entry, tenant, num_bytes)
            except (RateLimited, Overloaded):
                pass
        elif what == "resize":
            books.memory.resize(entry, num_bytes)
        else:
            getattr(books.memory, what)(entry)
        held = books.memory._costs
        assert books.memory.num_bytes == sum(cost for _, cost in held.values())
        kept = [entry for entries in books.memory._kept.values() for entry in entries]
        assert books.memory.num_kept_bytes == sum(held[entry][1] for entry in kept)
