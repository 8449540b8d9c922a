"""Pages that are given to another use in the middle of a handoff: nothing of it is committed, on either side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

from kv_transfer.page_bytes import PageWriter
from kv_transfer.protocol.counters import Reason
from kv_transfer.send_link import SendTransfer
from kv_transfer.transports.base import Bytes
from services.engine.cache.pages import PageAllocator
from services.runtime.errors import InvariantViolated, TransferFailed
from tests.kv_transfer.conftest import Pair, PairMaker, make_pool
from tests.waiting import until

TABLE = [9, 3, 4, 5, 8, 1, 2, 7, 6]
NUM_TOKENS = 140
FRAME_PAGES = 4


@pytest.fixture(params=("loopback", "shm", "tcp"))
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def _stream(pair: Pair, transfer: SendTransfer) -> None:
    transfer.send(0, TABLE)
    await transfer.seal(num_tokens=NUM_TOKENS, first_token_id=7, sampling_position=NUM_TOKENS + 1)


async def _after_post(pair: Pair, number: int, do: Callable[[], None]) -> None:
    """Have something done on the posting thread, just when frame `number` has been read, before that is believed."""
    channel = (await next(iter(pair.links._links.values())))._opened.channel
    post = channel.post
    num_posts = 0

    def post_and_do(seq: int, digest: bytes, buffers: Sequence[Bytes], *, timeout_s: float) -> None:
        nonlocal num_posts
        post(seq, digest, buffers, timeout_s=timeout_s)
        if num_posts == number:
            do()
        num_posts += 1

    channel.post = post_and_do  # type: ignore[method-assign]


def _give_away(allocator: PageAllocator, page_id: int) -> None:
    """What a worker must not do: let a page go, and have somebody else begin to use it."""
    allocator._generations[page_id] += 1


# Frames hold pages 9 3 4 5, then 8 1 2 7, then 6.
@pytest.mark.parametrize(("page_id", "frame"), [(9, 0), (5, 0), (8, 0), (6, 0), (7, 1), (6, 1), (6, 2)])
async def test_a_page_given_away_before_it_was_read_fails_the_transfer(
    make_pair: PairMaker, transport: str, page_id: int, frame: int
) -> None:
    pair = await make_pair(transport)
    transfer = await pair.reserve(NUM_TOKENS)
    await _after_post(pair, frame, lambda: _give_away(pair.allocator, page_id))
    with pytest.raises(TransferFailed, match="another use"):
        await _stream(pair, transfer)
    assert transfer.released.is_set()
    assert pair.links.counters.snapshot() == {"stale_generation": 1}
    await pair.wait_all_free()
    assert not pair.target.committed
    # The receiver was told, and takes what it got of the chunk for nothing worse.
    assert pair.receiver.counters.snapshot() in ({}, {"late_frame": 1}, {"late_frame": 2}, {"late_frame": 3})
    (link,) = pair.receiver._links
    await pair.assert_works()
    assert pair.receiver._links == (link,)


async def test_a_page_given_away_between_two_sends_fails_the_transfer(make_pair: PairMaker, transport: str) -> None:
    pair = await make_pair(transport)
    page_ids = pair.allocator.allocate(9, state="used")
    transfer = await pair.reserve(NUM_TOKENS)
    transfer.send(0, page_ids[:4])
    await until(lambda: pair.receiver._links[0]._placer.num_frames_seen == 1)
    transfer.send(4, page_ids[4:])  # meant while they were ours, so this is no mistake of the caller's
    pair.allocator.release(page_ids[4:])
    others = pair.allocator.allocate(60, state="used")
    assert {*page_ids[4:]} <= {*others}
    with pytest.raises(TransferFailed, match="another use"):
        await transfer.seal(num_tokens=NUM_TOKENS, first_token_id=7, sampling_position=NUM_TOKENS + 1)
    assert pair.links.counters[Reason.STALE_GENERATION] == 1
    await pair.wait_all_free()
    assert not pair.target.committed


async def test_a_page_given_away_after_it_was_read_does_no_harm(make_pair: PairMaker, transport: str) -> None:
    pair = await make_pair(transport)
    transfer = await pair.reserve(NUM_TOKENS)
    await _after_post(pair, 1, lambda: _give_away(pair.allocator, TABLE[0]))
    await _stream(pair, transfer)
    pair.assert_arrived(transfer, TABLE, NUM_TOKENS)
    assert pair.links.counters.snapshot() == {}


async def test_the_senders_next_transfer_of_reused_pages_is_of_their_new_use(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    for num_times, page_id in enumerate(TABLE):
        for _ in range(num_times):
            _give_away(pair.allocator, page_id)
    transfer = await pair.hand_over(TABLE, NUM_TOKENS)
    pair.assert_arrived(transfer, TABLE, NUM_TOKENS)
    # Also where the first of them are left out, as the receiver has them.
    pair.target.num_cached_tokens = 32
    transfer = await pair.reserve(NUM_TOKENS)
    await _stream(pair, transfer)
    assert transfer.id in pair.target.committed


@pytest.mark.parametrize("page_ids", [[-1], [3, 64], [10**9]])
async def test_a_page_that_does_not_exist_is_told_before_anything_is_announced(
    make_pair: PairMaker, page_ids: list[int]
) -> None:
    pair = await make_pair("shm")
    transfer = await pair.reserve(16 * len(page_ids))
    with pytest.raises(InvariantViolated, match="exist"):
        transfer.send(0, page_ids)
    transfer.send(0, [5, 6][: len(page_ids)])
    await transfer.seal(num_tokens=transfer_tokens(page_ids), first_token_id=7, sampling_position=50)
    pair.assert_arrived(transfer, [5, 6][: len(page_ids)], transfer_tokens(page_ids))


def transfer_tokens(page_ids: Sequence[int]) -> int:
    return 16 * len(page_ids)


# --- at the receiver ---


@pytest.mark.parametrize(("page_size", "own_page_size"), [(16, 16), (16, 64), (64, 16), (16, 24)])
@pytest.mark.parametrize("place", [0, -1])
async def test_a_reserved_page_given_away_is_not_written_to(
    make_pair: PairMaker, transport: str, page_size: int, own_page_size: int, place: int
) -> None:
    source = make_pool(page_size=page_size, seed=1)
    pair = await make_pair(transport, source=source, pool=make_pool(page_size=own_page_size, seed=2))
    transfer = await pair.reserve(NUM_TOKENS)
    page_id = pair.target.held[transfer.id][place]
    before = pair.target.pool.data[page_id].clone()
    _give_away(pair.target.allocator, page_id)
    table = list(range(source.layout.num_pages_for(NUM_TOKENS)))
    transfer.send(0, table)
    with pytest.raises(TransferFailed, match="stale_generation"):
        await transfer.seal(num_tokens=NUM_TOKENS, first_token_id=7, sampling_position=NUM_TOKENS + 1)
    assert torch.equal(pair.target.pool.data[page_id], before)
    assert pair.receiver.counters[Reason.STALE_GENERATION] == 1
    assert not pair.target.committed
    await pair.wait_all_free()
    await pair.assert_works()


@pytest.mark.parametrize("num_cached_tokens", [0, 16])
async def test_a_reserved_page_given_away_after_the_copy_is_not_committed(
    make_pair: PairMaker, transport: str, num_cached_tokens: int
) -> None:
    pair = await make_pair(transport)
    pair.target.num_cached_tokens = num_cached_tokens
    transfer = await pair.reserve(48)
    first = num_cached_tokens // 16
    transfer.send(first, TABLE[first : first + 1])
    (link,) = pair.receiver._links
    await until(lambda: len(link._machine.transfers[0]._digests) == 1)
    # Also one that nothing was copied into, the cached prefix: decoding would read it.
    _give_away(pair.target.allocator, pair.target.held[transfer.id][0])
    transfer.send(first + 1, TABLE[first + 1 : 3])
    with pytest.raises(TransferFailed, match="another use"):
        await transfer.seal(num_tokens=48, first_token_id=7, sampling_position=49)
    assert pair.receiver.counters.snapshot() == {"stale_generation": 1}
    assert not pair.target.committed
    await pair.wait_all_free()
    pair.target.num_cached_tokens = 0
    await pair.assert_works()


def test_the_places_of_a_frame_are_those_that_are_written_to() -> None:
    """Whatever the sizes: what `places` leaves out, `write` leaves as it was, and all of the rest changes."""
    from kv_transfer.page_bytes import Destination, wire_layout

    for page_size, own_page_size in ((16, 16), (16, 64), (64, 16), (16, 24), (24, 16)):
        source = make_pool(page_size=page_size, seed=1)
        for first_page, num_pages, num_cached in ((0, 1, 0), (1, 2, 0), (2, 1, own_page_size), (0, 3, own_page_size)):
            pool = make_pool(page_size=own_page_size, seed=2)
            before = pool.data.clone()
            num_tokens = (first_page + num_pages - 1) * page_size + 1
            # One page more than is needed, which nothing may touch.
            table = tuple(range(40, 41 + pool.layout.num_pages_for(num_tokens)))
            destination = Destination(table, num_cached, num_tokens)
            writer = PageWriter(pool, wire_layout(source.layout, fingerprint="f", exact=True))
            data = source.bytes[first_page : first_page + num_pages].reshape(-1).numpy()
            writer.write(data, first_page, destination)
            changed = {page for page in range(pool.num_pages) if not torch.equal(pool.data[page], before[page])}
            assert {*table[writer.places(first_page, num_pages, destination)]} == changed


def test_layouts_differ_in_arithmetic_without_fault() -> None:
    from kv_transfer.page_bytes import wire_layout

    layout = make_pool(num_pages=1).layout
    one = wire_layout(layout, fingerprint="f", exact=True, arithmetic="avx2")
    assert one.arithmetic == "avx2"
    assert not one.difference(dataclasses.replace(one, arithmetic="avx512"))
