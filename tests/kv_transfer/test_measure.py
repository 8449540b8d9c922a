"""`auto` between two workers, over real Links and real channels: measured, said, remembered, and what it does when
channels cannot be opened."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc
import pytest

from kv_transfer import measure as probing
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.messages import Abort, Hello, HelloAck, Probed
from kv_transfer.protocol.timing import Timeouts
from kv_transfer.transports import registry
from kv_transfer.transports.base import ChannelBroken, RingSpec
from kv_transfer.transports.registry import transport_named
from kv_transfer.wire import from_wire, to_wire
from protos import link_pb2, link_pb2_grpc
from services.runtime.errors import ChannelUnreachable, LayoutMismatch, TransferFailed, WorkerUnavailable
from services.runtime.rpc import make_channel
from tests.kv_transfer.conftest import Pair, PairMaker, identity, make_pool
from tests.kv_transfer.transports.models import cuda_ipc_model, nccl_model
from tests.waiting import HANG_LIMIT_S, until


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "ROUND_BYTES", 2**20)
    monkeypatch.setattr(probing, "AFTER_S", 0.0)


def break_channel(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def open_nothing(self: Any, *arguments: Any, **options: Any) -> None:
        raise ChannelBroken(f"{name} is out of order")

    monkeypatch.setattr(type(transport_named(name)), "open", open_nothing)


def slow_down(monkeypatch: pytest.MonkeyPatch, name: str, frame_s: float) -> None:
    kind = type(transport_named(name))
    really_open = kind.open

    def open_slow(self: Any, *arguments: Any, **options: Any) -> Any:
        channel = really_open(self, *arguments, **options)
        post = channel.post

        def post_slowly(*arguments: Any, **options: Any) -> None:
            time.sleep(frame_s)
            post(*arguments, **options)

        channel.post = post_slowly
        return channel

    monkeypatch.setattr(kind, "open", open_slow)


async def transport_of(pair: Pair) -> str:
    transfer = await pair.hand_over([4, 2, 7], 40)
    pair.assert_arrived(transfer, [4, 2, 7], 40)
    return transfer.transport


async def measured_transport_of(pair: Pair) -> str:
    """The transport of a transfer after the first Link's channels were measured."""
    await transport_of(pair)
    await asyncio.gather(*pair.links._improving)
    return await transport_of(pair)


async def test_both_channels_are_measured_and_the_choice_is_said(
    make_pair: PairMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kv_transfer")
    pair = await make_pair("auto")
    told: list[dict[str, str]] = []
    pair.links._on_channels = lambda channels: told.append(dict(channels))
    chosen = await measured_transport_of(pair)
    (measured,) = (each for _, each in pair.links._dialler._measured.values())
    assert set(measured.bytes_per_s) == {"shm", "tcp"}
    assert all(1e6 < rate < 1e12 for rate in measured.bytes_per_s.values())
    assert not measured.failures
    assert told[0] == {"decode-0": "shm"}
    assert told[-1] == {"decode-0": chosen}
    assert len(told) == (1 if chosen == "shm" else 2)
    text = caplog.text
    assert "shm" in text
    assert "tcp" in text
    assert "GB/s" in text
    assert f"handoff channel {chosen} to decode-0" in text
    await pair.links.close()
    assert told[-1] == {}


@pytest.mark.parametrize(("slow", "expected"), [("shm", "tcp"), ("tcp", "shm")])
async def test_what_was_measured_to_be_faster_is_taken(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch, slow: str, expected: str
) -> None:
    slow_down(monkeypatch, slow, 0.005)
    pair = await make_pair("auto")
    assert await measured_transport_of(pair) == expected
    await until(lambda: len(pair.receiver._links) == 1)
    assert pair.links._channels == {"decode-0": expected}
    assert not pair.links.counters[Reason.LINK_LOST]


async def test_nobody_waits_for_a_measurement(make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    may_measure = asyncio.Event()
    really_measure = probing.measure

    async def measure_later(*arguments: Any, **options: Any) -> probing.Measured:
        await may_measure.wait()
        return await really_measure(*arguments, **options)

    monkeypatch.setattr(probing, "measure", measure_later)
    slow_down(monkeypatch, "shm", 0.005)
    pair = await make_pair("auto")
    assert [await transport_of(pair) for _ in range(3)] == ["shm"] * 3
    may_measure.set()
    assert await measured_transport_of(pair) == "tcp"


async def test_a_transfer_that_has_begun_ends_on_its_link(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, "shm", 0.005)
    pair = await make_pair("auto")
    begun = await pair.reserve(40)
    await asyncio.gather(*pair.links._improving)
    assert begun.transport == "shm"
    assert await transport_of(pair) == "tcp"
    assert len(pair.receiver._links) == 2
    begun.send(0, [4, 2, 7])
    await begun.seal(num_tokens=40, first_token_id=1, sampling_position=40)
    await until(lambda: len(pair.receiver._links) == 1)
    assert pair.links._channels == {"decode-0": "tcp"}


async def test_a_worker_that_leaves_ends_what_runs_on_a_replaced_link(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, "shm", 0.005)
    pair = await make_pair("auto")
    begun = await pair.reserve(40)
    await asyncio.gather(*pair.links._improving)
    assert await transport_of(pair) == "tcp"
    async with asyncio.timeout(HANG_LIMIT_S):
        await pair.links.close()
    assert isinstance(begun.error, WorkerUnavailable)
    await pair.wait_all_free()


async def test_an_order_that_was_asked_for_is_kept_whatever_could_not_be_opened(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair("auto")
    pair.links._dialler._is_auto, pair.links._dialler.transports = False, ("shm", "tcp")
    break_channel(monkeypatch, "shm")
    assert await transport_of(pair) == "tcp"
    monkeypatch.undo()
    for task in list(pair.links._links.values()):
        task.result().fail(TransferFailed("for a test"))
    await pair.wait_all_free()
    assert await transport_of(pair) == "shm"


async def test_a_measurement_that_fails_changes_nothing(make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **options: Any) -> probing.Measured:
        raise TransferFailed("the receiver ended the probe")

    monkeypatch.setattr(probing, "measure", fail)
    pair = await make_pair("auto")
    assert await measured_transport_of(pair) == "shm"
    assert not pair.links._dialler._measured


class EndedCall:
    """A call that the receiver has ended without an answer."""

    async def write(self, message: link_pb2.LinkMessage) -> None:
        pass

    async def read(self) -> object:
        return grpc.aio.EOF

    def cancel(self) -> None:
        pass


async def test_a_receiver_that_ends_a_probe_does_not_make_the_sender_unavailable(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")

    async def begin() -> Any:
        return EndedCall()

    dialler = pair.links._dialler
    with pytest.raises(TransferFailed, match="the receiver ended the probe"):
        await probing.measure(begin, dialler.hello(pair.incarnation, ("shm",)), dialler.open_channel)


async def test_a_worker_that_leaves_does_not_wait_for_its_measurement(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any, **options: Any) -> probing.Measured:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(probing, "measure", hang)
    pair = await make_pair("auto")
    await transport_of(pair)
    async with asyncio.timeout(HANG_LIMIT_S):
        await pair.links.close()
    assert not pair.links._improving


async def test_a_measurement_is_used_again_for_the_next_link(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, "shm", 0.005)
    pair = await make_pair("auto")
    assert await measured_transport_of(pair) == "tcp"
    monkeypatch.setattr(probing, "measure", None)  # it would raise
    for task in list(pair.links._links.values()):
        task.result().fail(TransferFailed("for a test"))
    await pair.wait_all_free()
    assert await transport_of(pair) == "tcp"


@pytest.mark.parametrize(("broken", "expected"), [("shm", "tcp"), ("tcp", "shm")])
async def test_a_channel_that_cannot_be_opened_is_named_and_the_next_is_taken(
    make_pair: PairMaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
    expected: str,
) -> None:
    caplog.set_level(logging.INFO, logger="kv_transfer")
    break_channel(monkeypatch, broken)
    pair = await make_pair("auto")
    assert await transport_of(pair) == expected
    assert await measured_transport_of(pair) == expected
    assert f"{broken} failed ({broken} is out of order)" in caplog.text


async def test_a_channel_that_hangs_while_it_opens_is_left_out_and_not_tried_again(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts_s: list[float] = []

    def hang(self: Any, *arguments: Any, timeout_s: float) -> None:
        timeouts_s.append(timeout_s)
        time.sleep(timeout_s)
        raise ChannelBroken("shm did not open in time")

    monkeypatch.setattr(type(transport_named("shm")), "open", hang)
    monkeypatch.setattr(probing, "AFTER_S", 60.0)
    pair = await make_pair("auto", timeouts=Timeouts(connect_s=4.0))
    assert await transport_of(pair) == "tcp"
    assert timeouts_s == [pytest.approx(3.2)]
    for task in list(pair.links._links.values()):
        task.result().fail(TransferFailed("for a test"))
    await pair.wait_all_free()
    assert await transport_of(pair) == "tcp"
    assert len(timeouts_s) == 1


async def test_where_nothing_can_be_opened_the_error_says_so(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shm", "tcp"):
        break_channel(monkeypatch, name)
    pair = await make_pair("auto")
    with pytest.raises(ChannelUnreachable, match=r"shm is out of order; tcp .* tcp is out of order"):
        await pair.reserve(40)
    monkeypatch.undo()
    await until(lambda: bool(pair.links._links))
    await transport_of(pair)


async def test_a_pair_that_does_not_fit_is_refused_once(make_pair: PairMaker) -> None:
    pair = await make_pair("auto", receiver_identity=identity("decode-0", fingerprint="e" * 32))
    with pytest.raises(LayoutMismatch):
        await pair.reserve(40)
    assert pair.receiver.counters[Reason.LAYOUT_MISMATCH] == 1


async def test_one_explicit_transport_is_not_measured(make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "measure", None)
    assert await transport_of(await make_pair("tcp")) == "tcp"


async def test_on_another_host_only_tcp_is_measured(make_pair: PairMaker) -> None:
    pair = await make_pair("auto", sender_identity=identity("prefill-0", host_id="elsewhere"))
    assert await measured_transport_of(pair) == "tcp"
    (measured,) = (each for _, each in pair.links._dialler._measured.values())
    assert set(measured.bytes_per_s) == {"tcp"}


async def test_device_channels_are_measured_like_the_others(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = nccl_model()
    found = {"cuda_ipc": cuda_ipc_model(), "nccl": nccl}
    monkeypatch.setattr(registry, "device_transports", lambda device: found)
    monkeypatch.setattr(registry.Reach, "at", lambda self, device: registry.Reach(self.host_id, "GPU-0", "1@"))
    pair = await make_pair("auto", slot_bytes=100_000)
    chosen = await measured_transport_of(pair)
    (measured,) = (each for _, each in pair.links._dialler._measured.values())
    # Two ranks of NCCL on one GPU are refused, so it was not even tried.
    assert set(measured.bytes_per_s) == {"cuda_ipc", "shm", "tcp"}
    assert chosen in measured.bytes_per_s


async def test_a_sender_that_leaves_in_the_middle_does_not_keep_others_from_measuring(make_pair: PairMaker) -> None:
    pair = await make_pair("auto")
    for _ in range(3):
        channel = make_channel(pair.address)
        call = link_pb2_grpc.LinkStub(channel).Probe()
        await call.write(to_wire(pair.links._dialler.hello(pair.incarnation, ("tcp",))))
        assert isinstance(from_wire(await call.read()), HelloAck)
        call.cancel()
        await channel.close()
    assert await asyncio.wait_for(measured_transport_of(pair), HANG_LIMIT_S) in ("shm", "tcp")
    (measured,) = (each for _, each in pair.links._dialler._measured.values())
    assert set(measured.bytes_per_s) == {"shm", "tcp"}


async def test_a_probe_never_touches_pages(make_pair: PairMaker) -> None:
    pair = await make_pair("auto", pool=make_pool(seed=5))
    before = pair.target.pool.data.clone()
    channel = make_channel(pair.address)
    call = link_pb2_grpc.LinkStub(channel).Probe()
    hello: Hello = pair.links._dialler.hello(pair.incarnation, ("shm",))
    await call.write(to_wire(hello))
    ack = from_wire(await call.read())
    assert isinstance(ack, HelloAck)
    opened = await pair.links._dialler.open_channel(hello, ack)
    ring = RingSpec(ack.ring_slots, ack.ring_slot_bytes)
    await asyncio.to_thread(probing.post_round, opened, ring, 0, probing.frame_bytes(ring))
    assert from_wire(await call.read()) == Probed(probing.num_frames(ring) * probing.frame_bytes(ring))
    opened.shutdown()
    opened.close()
    await call.write(to_wire(pair.links._dialler.hello(pair.incarnation, ())))
    assert isinstance(from_wire(await call.read()), Abort)
    await channel.close()
    assert bool((pair.target.pool.data == before).all())
    assert not pair.target.held
