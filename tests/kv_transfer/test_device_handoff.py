"""Whole handoffs over device channels, with models of what a GPU does: right pages, or a clean failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kv_transfer.protocol.counters import Reason
from kv_transfer.transports.cuda_ipc import CudaIpcReceiveChannel
from kv_transfer.transports.nccl import NcclReceiveChannel
from services.runtime.errors import TransferFailed, WorkerUnavailable
from tests.kv_transfer.conftest import Pair, PairMaker, make_pool
from tests.kv_transfer.transports import models
from tests.waiting import until

TABLE = [31, 4, 5, 6, 50, 2, 9, 60, 0]


@pytest.fixture(params=["cuda_ipc", "nccl"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    models.install(request.param, monkeypatch.setattr)
    name: str = request.param
    return name


@pytest.mark.parametrize(("page_size", "own_page_size"), [(16, 16), (16, 64), (64, 16)])
async def test_pages_arrive_whatever_their_sizes(
    make_pair: PairMaker, transport: str, page_size: int, own_page_size: int
) -> None:
    source = make_pool(page_size=page_size, seed=1)
    pair = await make_pair(transport, source=source, pool=make_pool(page_size=own_page_size, seed=2))
    table = TABLE[: source.layout.num_pages_for(140)]
    transfer = await pair.hand_over(table, 140)
    assert transfer.transport == transport
    pair.assert_arrived(transfer, table, 140)


async def test_a_cached_prefix_is_left_as_it_is(make_pair: PairMaker, transport: str) -> None:
    pair = await make_pair(transport)
    pair.target.num_cached_tokens = 32
    before = pair.target.pool.data.clone()
    transfer = await pair.hand_over(TABLE, 140)
    kept = pair.target.committed[transfer.id][:2]
    assert torch.equal(pair.target.pool.data[kept], before[kept])
    sent, arrived = pair.source.data[TABLE[2:8]], pair.target.pool.data[pair.target.committed[transfer.id][2:8]]
    assert torch.equal(sent, arrived)


def channel_of(pair: Pair) -> CudaIpcReceiveChannel | NcclReceiveChannel:
    (link,) = pair.receiver._links
    channel = link._placer._channel
    assert isinstance(channel, CudaIpcReceiveChannel | NcclReceiveChannel)
    return channel


async def test_a_bit_that_flips_on_the_way_fails_the_transfer(
    make_pair: PairMaker, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair(transport)
    await pair.assert_works()
    channel = channel_of(pair)
    poll = channel.poll

    hurt: list[int] = []

    def poll_hurt(*, timeout_s: float) -> Any:
        frame = poll(timeout_s=timeout_s)
        if frame is not None and not hurt:
            frame.data[17] ^= 4
            hurt.append(frame.seq)
        return frame

    monkeypatch.setattr(channel, "poll", poll_hurt)
    with pytest.raises(TransferFailed):
        await pair.hand_over(TABLE, 140)
    assert pair.receiver.counters[Reason.CHECKSUM_MISMATCH] == 1
    assert len(pair.target.committed) == 1
    await pair.wait_all_free()
    assert len(hurt) == 1
    await pair.assert_works()


@pytest.mark.parametrize("end", ["sender", "receiver"])
async def test_a_channel_that_breaks_is_made_again(make_pair: PairMaker, transport: str, end: str) -> None:
    pair = await make_pair(transport)
    await pair.assert_works()
    (send_link,) = [task.result() for task in pair.links._links.values()]
    first = send_link._opened.channel
    transfer = await pair.reserve(140)
    (first if end == "sender" else channel_of(pair)).shutdown()

    async def hand_over() -> None:
        transfer.send(0, TABLE)
        await transfer.seal(num_tokens=140, first_token_id=7, sampling_position=141)

    with pytest.raises((TransferFailed, WorkerUnavailable)):
        await hand_over()
    await transfer.released.wait()
    await pair.wait_all_free()
    await until(lambda: not pair.links._links)
    await pair.assert_works()
    (send_link,) = [task.result() for task in pair.links._links.values()]
    assert send_link._opened.channel is not first
