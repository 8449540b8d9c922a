"""Reading and writing pages as bytes, against the plain meaning: token t of the sender is token t of the receiver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.page_bytes import Destination, PageReader, PageWriter, wire_layout
from services.engine.cache.pool import PagePool
from services.runtime.errors import InvariantViolated
from tests.kv_transfer.conftest import make_pool, tokens_of


def writer_between(source: PagePool, pool: PagePool) -> PageWriter:
    return PageWriter(pool, wire_layout(source.layout, fingerprint="f", exact=True))


def frame_of(source: PagePool, page_ids: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    return np.concatenate(PageReader(source).pieces(page_ids))


@pytest.mark.parametrize("as_on_gpu", [False, True])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tokens_keep_their_place_whatever_the_page_sizes(as_on_gpu: bool, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if as_on_gpu:  # the code that works on tensors, without needing another device
            patch.setattr("kv_transfer.page_bytes._memory_of", lambda pool: list(pool.parts))
        _check_tokens_keep_their_place(data)


def _check_tokens_keep_their_place(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 3, 4, 8]))
    own_page_size = data.draw(st.sampled_from([1, 2, 4, 5, 8, 16]))
    num_tokens = data.draw(st.integers(1, 40))
    source, pool = make_pool(page_size=page_size, seed=1), make_pool(page_size=own_page_size, seed=2)
    table = data.draw(st.permutations(range(64)))[: source.layout.num_pages_for(num_tokens)]
    own_table = data.draw(st.permutations(range(64)))[: pool.layout.num_pages_for(num_tokens)]
    num_cached = own_page_size * data.draw(st.integers(0, num_tokens // own_page_size))
    before = pool.data.clone()
    writer = writer_between(source, pool)
    destination = Destination(tuple(own_table), num_cached, num_tokens)
    step = data.draw(st.integers(1, 5))
    for first in range(0, len(table), step):
        writer.write(frame_of(source, table[first : first + step]), first, destination)
    arrived, kept = tokens_of(pool, own_table, num_tokens), tokens_of(_like(pool, before), own_table, num_tokens)
    assert torch.equal(arrived[:, :, :, num_cached:], tokens_of(source, table, num_tokens)[:, :, :, num_cached:])
    assert torch.equal(arrived[:, :, :, :num_cached], kept[:, :, :, :num_cached])
    others = sorted(set(range(64)) - set(own_table))
    assert torch.equal(pool.data[others], before[others])


def test_neighbours_are_read_as_one_piece_and_in_place() -> None:
    pool = make_pool()
    pieces = PageReader(pool).pieces([4, 5, 6, 2, 9, 8])
    assert [piece.size // pool.layout.page_bytes for piece in pieces] == [3, 1, 1, 1]
    assert all(np.shares_memory(piece, pool.bytes.numpy()) for piece in pieces)


@pytest.mark.parametrize("page_ids", [(0, 0), (64,), (-1,)])
def test_an_unusable_reservation_is_refused(page_ids: tuple[int, ...]) -> None:
    writer = writer_between(make_pool(), make_pool())
    with pytest.raises(InvariantViolated):
        writer.check(Destination(page_ids, 0, 16))


def test_a_prefix_that_ends_within_a_page_is_refused() -> None:
    with pytest.raises(InvariantViolated):
        writer_between(make_pool(), make_pool()).check(Destination((1, 2), 7, 20))


def _like(pool: PagePool, data: torch.Tensor) -> PagePool:
    other = PagePool(pool.layout, pool.num_pages)
    other.data.copy_(data)
    return other
