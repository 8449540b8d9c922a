"""The `nccl` channel over a model of NCCL: whatever goes wrong, both ends hear it, nothing is left, the next one works.

The model notes what would crash or corrupt in reality (see models.py); no run may have such a note.
"""

from __future__ import annotations

import gc
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.transports import nccl_pair
from kv_transfer.transports.base import (
    AnyReceiveChannel,
    ChannelBroken,
    ChannelKey,
    DeviceFrame,
    DeviceReceiveChannel,
    DeviceSendChannel,
    RingSpec,
)
from kv_transfer.transports.nccl import NcclReceiveChannel, NcclSendChannel, NcclTransport
from kv_transfer.transports.nccl_pair import NcclPair, State
from tests.kv_transfer.transports.models import QUICK, Faults, ModelDevice, ModelNccl
from tests.waiting import HANG_LIMIT_S, wait_until

RING = RingSpec(num_slots=3, slot_bytes=512)
BOUND_S = HANG_LIMIT_S
"""Everything that is told or freed is so within this: all limits of QUICK together, and a busy machine."""


class World:
    """Both ends' NCCL, and one listener."""

    def __init__(self) -> None:
        self.device = ModelDevice()
        self.nccl = ModelNccl(self.device)
        self.transport = NcclTransport(self.nccl, self.device, QUICK)
        self.listener = self.transport.listen("127.0.0.1", 0)
        self.pairs: list[NcclPair] = []

    def expect(self) -> tuple[ChannelKey, Future[AnyReceiveChannel]]:
        key = ChannelKey(secrets.token_bytes(16), secrets.token_bytes(32), b"pair")
        return key, self.listener.expect(key, RING)

    def open(self) -> tuple[DeviceSendChannel, DeviceReceiveChannel]:
        key, opening = self.expect()
        sender = self.transport.open(self.listener.address, key, RING, timeout_s=3.0)
        receiver = opening.result(3.0)
        assert isinstance(sender, NcclSendChannel)
        assert isinstance(receiver, NcclReceiveChannel)
        self.pairs += [sender._pair, receiver._pair]
        return sender, receiver

    def close(self) -> None:
        self.nccl.stuck.set()
        self.listener.close()


def post(sender: DeviceSendChannel, seq: int, content: bytes) -> None:
    def fill(target: torch.Tensor) -> bytes:
        if content:
            target.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return seq.to_bytes(16, "big")

    sender.post(seq, len(content), fill, timeout_s=0.5)


def poll_all(receiver: DeviceReceiveChannel, arrived: list[bytes]) -> None:
    """Take frames until the channel breaks."""
    while True:
        frame = receiver.poll(timeout_s=0.1)
        if frame is not None:
            assert isinstance(frame, DeviceFrame)
            assert frame.digest == len(arrived).to_bytes(16, "big")
            arrived.append(bytes(frame.data.numpy()))
            receiver.release(frame.slot)


def until_broken(run: Callable[..., None], *arguments: object) -> tuple[threading.Thread, list[Exception]]:
    raised: list[Exception] = []

    def run_it() -> None:
        try:
            run(*arguments)
        except (ChannelBroken, AssertionError) as error:
            raised.append(error)

    thread = threading.Thread(target=run_it)
    thread.start()
    return thread, raised


def end(world: World, sender: DeviceSendChannel, receiver: DeviceReceiveChannel) -> None:
    for channel in (sender, receiver):
        channel.shutdown()
        channel.close()


def is_all_given_back(device: ModelDevice) -> bool:
    if device.num_alive():
        gc.collect()  # where it is not needed it takes longer than all else
    return not device.num_alive()


def assert_all_gone(world: World) -> None:
    for pair in world.pairs:
        assert pair.wait_gone(BOUND_S), pair.state
    world.pairs.clear()
    # A pair whose opening failed is nobody's to wait for: its watchdog ends it when it comes to it.
    wait_until(lambda: all(comm.is_aborted for comm in world.nccl.comms.values()), "a communicator was not aborted")
    wait_until(lambda: is_all_given_back(world.device), "memory was not given back")
    assert world.nccl.violations == []


@st.composite
def faults(draw: st.DrawFn) -> Faults:
    at = draw(st.integers(1, 6))  # call 0 is the warm-up
    match draw(st.sampled_from(["none", "dies", "dies, with an error later", "call fails", "slow abort"])):
        case "dies":
            return Faults(dies_at=at)
        case "dies, with an error later":
            return Faults(dies_at=at, late_error_s=draw(st.sampled_from([0.0, 0.05, 0.2])))
        case "call fails":
            return Faults(call_fails_at=at)
        case "slow abort":
            return Faults(dies_at=at, abort_takes_s=0.1)
        case _:
            return Faults()


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(0, RING.slot_bytes), max_size=8),
    sender_faults=faults(),
    receiver_faults=faults(),
    who_ends=st.sampled_from(["sender", "receiver"]),
)
def test_frames_arrive_whole_and_in_order_or_both_ends_are_told_and_nothing_is_left(
    sizes: list[int], sender_faults: Faults, receiver_faults: Faults, who_ends: str
) -> None:
    world = World()
    try:
        world.nccl.faults = {0: sender_faults, 1: receiver_faults}
        sender, receiver = world.open()
        contents = [secrets.token_bytes(size) for size in sizes]
        arrived: list[bytes] = []
        receiving, receive_error = until_broken(poll_all, receiver, arrived)
        broke: ChannelBroken | None = None
        try:
            for seq, content in enumerate(contents):
                post(sender, seq, content)
        except ChannelBroken as error:
            broke = error
        is_faulty = sender_faults != Faults() or receiver_faults != Faults()
        deadline = time.monotonic() + BOUND_S
        while len(arrived) < len(contents) and receiving.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert arrived == contents[: len(arrived)], "what arrived is not what was sent"
        if not is_faulty:
            assert (broke, len(arrived)) == (None, len(contents))
        (sender if who_ends == "sender" else receiver).shutdown()
        receiving.join(BOUND_S)
        assert not receiving.is_alive(), "the receiver was not told"
        assert isinstance(receive_error[0], ChannelBroken)
        end(world, sender, receiver)
        del sender, receiver, receiving, receive_error, broke
        assert_all_gone(world)
        # After whatever happened, a new channel over the same transport works.
        world.nccl.faults = {0: Faults(), 1: Faults()}
        sender, receiver = world.open()
        post(sender, 0, b"again")
        frame = receiver.poll(timeout_s=BOUND_S)
        assert frame is not None
        assert bytes(frame.data.numpy()) == b"again"
        del frame
        end(world, sender, receiver)
        del sender, receiver
        assert_all_gone(world)
    finally:
        world.close()


@pytest.fixture
def world() -> World:
    world = World()
    yield world  # type: ignore[misc]
    world.close()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fault", [Faults(never_opens=True), Faults(open_fails=True)], ids=["never", "refused"])
def test_a_communicator_that_does_not_open_is_given_up_in_time(
    world: World, who: int, fault: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.transports.nccl.OPEN_TIMEOUT_S", 0.3)
    world.nccl.faults[who] = fault
    key, opening = world.expect()
    with pytest.raises(ChannelBroken):
        world.transport.open(world.listener.address, key, RING, timeout_s=0.6)
    receiver = opening.result(BOUND_S)

    polling, raised = until_broken(poll_all, receiver, [])
    polling.join(BOUND_S)
    assert isinstance(raised[0], ChannelBroken)
    receiver.shutdown()
    receiver.close()
    del receiver, opening, raised, polling
    assert_all_gone(world)


def test_a_thread_that_is_stuck_in_a_call_is_aborted_under_and_the_other_end_is_told(world: World) -> None:
    world.nccl.faults[0] = Faults(call_is_stuck_at=2)
    sender, receiver = world.open()
    receiving, received = until_broken(poll_all, receiver, [])

    def post_all() -> None:
        for seq in range(3):
            post(sender, seq, b"x")

    posting, posted = until_broken(post_all)
    time.sleep(0.1)
    sender.shutdown()
    sent_pair = world.pairs[0]
    assert sent_pair.wait_gone(BOUND_S), "the watchdog waits for a thread that never comes back"
    receiving.join(BOUND_S)
    assert isinstance(received[0], ChannelBroken)
    world.nccl.stuck.set()  # what an abort does to a thread inside
    posting.join(BOUND_S)
    assert isinstance(posted[0], ChannelBroken)
    end(world, sender, receiver)


def test_a_thread_that_is_stuck_in_opening_leaves_no_communicator_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.nccl.faults[0] = Faults(opening_is_stuck_s=0.6)
    pair = NcclPair(world.nccl, world.device.stream(), QUICK)
    opening, raised = until_broken(lambda: pair.open(world.nccl.unique_id(), 0, timeout_s=3.0))
    time.sleep(0.1)
    pair.break_off(ChannelBroken("no longer wanted"))
    assert pair.wait_gone(BOUND_S)
    assert opening.is_alive(), "it is stuck still"
    opening.join(BOUND_S)
    assert isinstance(raised[0], ChannelBroken)
    assert [comm.is_aborted for comm in world.nccl.comms.values()] == [True]


def test_memory_under_an_abort_that_never_ends_is_never_given_back(world: World) -> None:
    world.nccl.faults[1] = Faults(dies_at=1, abort_takes_s=30)
    world.nccl.faults[0] = Faults(dies_at=1)
    sender, receiver = world.open()
    receiving, received = until_broken(poll_all, receiver, [])
    post(sender, 0, b"never arrives")
    receiving.join(BOUND_S)
    assert isinstance(received[0], ChannelBroken)
    end(world, sender, receiver)
    sent_pair, received_pair = world.pairs
    world.pairs.clear()
    assert sent_pair.wait_gone(BOUND_S)
    assert received_pair.state is State.BROKEN
    del sender, receiver, receiving, received
    gc.collect()
    assert world.device.num_alive() == 1, "the receiver's ring may still be written to"
    world.nccl.stuck.set()
    assert received_pair.wait_gone(BOUND_S)
    assert world.device.num_alive() == 0


def test_no_two_communicators_are_called_at_the_same_time(world: World) -> None:
    sender, receiver = world.open()
    with nccl_pair.LAUNCH_LOCK:
        posting, raised = until_broken(post, sender, 0, b"x")
        time.sleep(0.1)
        assert posting.is_alive()
    posting.join(BOUND_S)
    assert not raised
    end(world, sender, receiver)


def test_who_waits_for_another_communicators_call_finds_its_own_aborted_and_does_not_call_it(world: World) -> None:
    sender, receiver = world.open()
    with nccl_pair.LAUNCH_LOCK:
        posting, raised = until_broken(post, sender, 0, b"x")
        time.sleep(0.1)
        assert posting.is_alive()
        world.pairs[0].break_off(ChannelBroken("given up"))
        wait_until(lambda: any(comm.is_aborted for comm in world.nccl.comms.values()), "it was not aborted")
    posting.join(BOUND_S)
    assert [type(error) for error in raised] == [ChannelBroken]
    end(world, sender, receiver)
    del sender, receiver, raised
    assert_all_gone(world)


def test_an_operation_whose_peer_is_dead_ends_by_its_own_deadline_without_any_error(world: World) -> None:
    world.nccl.faults[0] = Faults(dies_at=1)
    sender, receiver = world.open()
    post(sender, 0, b"x")
    started = time.monotonic()
    with pytest.raises(ChannelBroken, match="did not take part"):
        poll_all(receiver, [])
    assert time.monotonic() - started > QUICK.operation_s / 2
    end(world, sender, receiver)
    del sender, receiver
    assert_all_gone(world)
