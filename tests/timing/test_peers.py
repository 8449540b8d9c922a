"""How soon a worker notices that its peer died or froze."""

import signal

import pytest

from kv_transfer.link_end import LinkIdentity, LinkSetup
from kv_transfer.receiving import LinkReceiver
from tests.kv_transfer.conftest import Target, make_pool, serving
from tests.kv_transfer.test_processes import FINGERPRINT, make_links, peer, reserve
from tests.timing.limits import within
from tests.waiting import until

LIMITS_S = {signal.SIGKILL: 2.0, signal.SIGSTOP: 4.5}
"""A broken connection is noticed at once, silence after three seconds."""


@pytest.mark.parametrize("end", LIMITS_S)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_sender_notices(transport: str, end: signal.Signals) -> None:
    links = make_links(make_pool(seed=1), transport)
    async with peer(role="receiver", transport=transport, page_size=16) as receiver:
        ready = await receiver.told("ready")
        transfer = await reserve(links, ready, "a", 1000)
        transfer.send(0, [1, 2])
        await receiver.told("reserved")
        receiver.kill(end)
        with within(LIMITS_S[end]):
            await until(lambda: transfer.error is not None)
        await transfer.released.wait()
        await links.close()


@pytest.mark.parametrize("end", LIMITS_S)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_receiver_notices(transport: str, end: signal.Signals) -> None:
    target = Target(make_pool(seed=2))
    own = LinkIdentity("decode-0", "1" * 32, FINGERPRINT, True)
    receiver = LinkReceiver(LinkSetup(own, target.pool, target.allocator, (transport,)), target)
    async with serving(receiver) as address:
        settings = {"address": address, "incarnation": own.incarnation}
        async with peer(role="sender", transport=transport, page_size=16, **settings) as sender:
            await until(lambda: bool(target.held))
            sender.kill(end)
            with within(LIMITS_S[end]):
                await until(lambda: not target.held and receiver.num_transfers == 0)
