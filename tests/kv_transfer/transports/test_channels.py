"""The contract of a channel, for every transport: order, sizes, back-pressure, deadlines, ends, strangers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kv_transfer.transports import handshake
from kv_transfer.transports.base import (
    ChannelBroken,
    ChannelKey,
    ChannelTimeout,
    Countdown,
    DeviceFrame,
    DeviceSendChannel,
    Frame,
    LargePacketsLost,
    Listener,
    ReceiveChannel,
    RingSpec,
    SendChannel,
    Transport,
)
from kv_transfer.transports.registry import Transports, local_host_id, transport_named
from kv_transfer.transports.shm import ShmSendChannel
from kv_transfer.transports.tcp import TcpSendChannel, split_address
from kv_transfer.transports.tls import TlsTransport
from services.runtime import cuda_memory, dialling
from services.runtime.tls import Identity
from tests.certificates import Authority
from tests.kv_transfer.transports.models import MemfdMemory, cuda_ipc_model, nccl_model
from tests.services.runtime.test_dialling import resolving, silent
from tests.waiting import HANG_LIMIT_S

SLOT = 1000
RING = RingSpec(num_slots=3, slot_bytes=SLOT)
TIMEOUT_S = HANG_LIMIT_S
# Device channels with models of what a GPU does; on a GPU, the real ones.
GPU_NAMES = ("cuda_ipc on a GPU",)
NAMES = (
    "loopback",
    "shm",
    "tcp",
    "tls",
    "cuda_ipc",
    "nccl",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_NAMES),
)
SOCKET_NAMES = ("shm", "tcp", "tls", "cuda_ipc", "nccl")
TCP_NAMES = ("tcp", "tls", "nccl")


@dataclass
class Ends:
    transport: Transport
    listener: Listener
    sender: SendChannel
    receiver: ReceiveChannel

    def post(self, seq: int, *sizes: int, timeout_s: float = TIMEOUT_S) -> bytes:
        """Post a frame of random buffers of these sizes; return what it holds."""
        buffers = [np.frombuffer(secrets.token_bytes(size), dtype=np.uint8) for size in sizes]
        content = b"".join(bytes(buffer) for buffer in buffers)
        digest = seq.to_bytes(16, "big")
        if not isinstance(self.sender, DeviceSendChannel):
            self.sender.post(seq, digest, buffers, timeout_s=timeout_s)
            return content

        def fill(target: torch.Tensor) -> bytes:
            assert target.numel() == len(content)
            if content:
                target.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            return digest

        self.sender.post(seq, len(content), fill, timeout_s=timeout_s)
        return content

    def poll(self) -> Frame:
        frame = self.receiver.poll(timeout_s=TIMEOUT_S)
        if isinstance(frame, DeviceFrame):
            return Frame(frame.seq, frame.digest, frame.slot, frame.data.cpu().numpy())
        assert frame is not None
        return frame


@functools.cache
def identities() -> tuple[Identity, Identity]:
    """The identities of two workers, whose files are read again for each channel."""
    authority = Authority(Path(tempfile.mkdtemp()))
    return tuple(Identity(authority.issue(name, roles=["decode"])) for name in ("one", "two"))  # type: ignore[return-value]


def made(name: str) -> Transport:
    """The transport of this name; device channels with a model of the device, unless they are meant on a GPU."""
    match name:
        case "cuda_ipc":
            return cuda_ipc_model()
        case "nccl":
            return nccl_model()
        case "tls":
            return TlsTransport(identities()[0])
        case "cuda_ipc on a GPU":
            if not cuda_memory.is_supported(0):
                pytest.skip("this driver shares no memory by file descriptors")
            return Transports(torch.device("cuda"), 8)["cuda_ipc"]
        case _:
            return transport_named(name)


def make_key(binding: bytes = b"pair") -> ChannelKey:
    return ChannelKey(secrets.token_bytes(16), secrets.token_bytes(32), binding)


def connect(transport: Transport, listener: Listener, ring: RingSpec = RING) -> Ends:
    key = make_key()
    opening = listener.expect(key, ring)
    sender = transport.open(listener.address, key, ring, timeout_s=TIMEOUT_S)
    return Ends(transport, listener, sender, opening.result(TIMEOUT_S))


@pytest.fixture(params=NAMES)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    transport = made(request.param)
    listener = transport.listen("127.0.0.1", 0)
    both = connect(transport, listener)
    yield both
    for end in (both.sender, both.receiver):
        end.shutdown()
        end.close()
    listener.close()


@dataclass(frozen=True, slots=True)
class Listening:
    """A listener that strangers can reach."""

    name: str
    transport: Transport
    listener: Listener


@pytest.fixture(params=SOCKET_NAMES)
def listening(request: pytest.FixtureRequest) -> Iterator[Listening]:
    transport = made(request.param)
    listener = transport.listen("127.0.0.1", 0)
    yield Listening(request.param, transport, listener)
    listener.close()


def stranger(listening: Listening) -> socket.socket:
    listener = listening.listener
    if listening.name in TCP_NAMES:
        return socket.create_connection(split_address(listener.address), timeout=TIMEOUT_S)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(b"\0" + listener.address.encode())
    sock.settimeout(TIMEOUT_S)
    return sock


# --- what a channel carries ---


@pytest.mark.parametrize("sizes", [(1,), (SLOT - 1,), (SLOT,), (400, 600), (1, 0, 998, 1), (0,)])
def test_a_frame_arrives_as_it_was_posted(ends: Ends, sizes: tuple[int, ...]) -> None:
    content = ends.post(3, *sizes)
    frame = ends.poll()
    assert bytes(frame.data) == content
    assert (frame.seq, frame.digest) == (3, (3).to_bytes(16, "big"))


def test_a_frame_larger_than_a_slot_is_the_callers_mistake(ends: Ends) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        ends.post(0, SLOT, 1)


def test_frames_arrive_in_order_through_a_ring_much_smaller_than_them_all(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as pool:
        posting = pool.submit(lambda: [ends.post(seq, 1 + seq * 37 % SLOT) for seq in range(200)])
        received = []
        for seq in range(200):
            frame = ends.poll()
            assert frame.seq == seq
            received.append(bytes(frame.data))
            ends.receiver.release(frame.slot)
    assert received == posting.result()


def test_many_buffers_make_one_frame(ends: Ends) -> None:
    content = ends.post(0, *([1] * SLOT))
    assert bytes(ends.poll().data) == content


def test_slots_may_be_released_in_any_order(ends: Ends) -> None:
    for round_ in range(5):
        contents = [ends.post(round_ * 3 + index, 100) for index in range(3)]
        frames = [ends.poll() for _ in range(3)]
        assert [bytes(frame.data) for frame in frames] == contents
        for frame in reversed(frames):
            ends.receiver.release(frame.slot)


def test_a_held_slot_keeps_its_content_while_others_are_filled(ends: Ends) -> None:
    kept_content = ends.post(0, 500)
    kept = ends.poll()
    for seq in range(1, 20):
        ends.post(seq, 500)
        ends.receiver.release(ends.poll().slot)
    assert bytes(kept.data) == kept_content


def test_an_idle_channel_polls_nothing_within_its_time(ends: Ends) -> None:
    started = time.monotonic()
    assert ends.receiver.poll(timeout_s=0.1) is None
    assert time.monotonic() - started > 0.05
    content = ends.post(0, 10)
    assert bytes(ends.poll().data) == content


# --- back-pressure and deadlines ---


def test_a_receiver_that_releases_nothing_stops_the_sender_at_its_deadline(ends: Ends) -> None:
    # TCP buffers in the kernel, so only much more than that is sure to meet the limit.
    big = RingSpec(3, 2**20)
    big_ends = connect(ends.transport, ends.listener, big)

    def post_on() -> None:
        for seq in range(60):
            big_ends.post(seq, 2**20, timeout_s=0.3)

    with pytest.raises(ChannelTimeout):
        post_on()
    for end in (big_ends.sender, big_ends.receiver):
        end.shutdown()
        end.close()


def test_a_sender_waits_for_a_slot_and_goes_on(ends: Ends) -> None:
    frames = []
    for seq in range(3):
        ends.post(seq, SLOT)
        frames.append(ends.poll())
    with ThreadPoolExecutor(1) as pool:
        posting = pool.submit(lambda: ends.post(3, SLOT))
        time.sleep(0.05)
        ends.receiver.release(frames[0].slot)
        assert bytes(ends.poll().data) == posting.result(TIMEOUT_S)


# --- ends ---


def test_the_receiver_feels_the_senders_end(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(lambda: ends.receiver.poll(timeout_s=HANG_LIMIT_S))
        time.sleep(0.05)
        ends.sender.shutdown()
        with pytest.raises(ChannelBroken):
            polling.result(TIMEOUT_S)


def test_the_sender_feels_the_receivers_end_while_it_waits(ends: Ends) -> None:
    ends.receiver.shutdown()

    def post_until_broken() -> None:
        for seq in range(10_000):
            ends.post(seq, SLOT, timeout_s=HANG_LIMIT_S)

    with pytest.raises(ChannelBroken):
        post_until_broken()


def test_ones_own_shutdown_wakes_a_poll(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(lambda: ends.receiver.poll(timeout_s=HANG_LIMIT_S))
        time.sleep(0.05)
        ends.receiver.shutdown()
        with pytest.raises(ChannelBroken):
            polling.result(TIMEOUT_S)


def test_ones_own_shutdown_wakes_a_post(ends: Ends) -> None:
    def post_for_ever() -> None:
        for seq in range(1_000_000):
            ends.post(seq, SLOT, timeout_s=HANG_LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        posting = pool.submit(post_for_ever)
        time.sleep(0.1)
        ends.sender.shutdown()
        with pytest.raises(ChannelBroken):
            posting.result(TIMEOUT_S)


def test_release_after_the_end_is_harmless(ends: Ends) -> None:
    ends.post(0, 10)
    frame = ends.poll()
    ends.sender.shutdown()
    ends.sender.close()
    ends.receiver.shutdown()
    ends.receiver.release(frame.slot)


def test_shutdown_and_close_may_be_repeated(ends: Ends) -> None:
    for _ in range(2):
        for end in (ends.sender, ends.receiver):
            end.shutdown()
            end.close()


# --- permission to open ---


def test_a_key_opens_one_channel_only(ends: Ends) -> None:
    key = make_key()
    opening = ends.listener.expect(key, RING)
    first = ends.transport.open(ends.listener.address, key, RING, timeout_s=TIMEOUT_S)
    with pytest.raises(ChannelBroken):
        ends.transport.open(ends.listener.address, key, RING, timeout_s=TIMEOUT_S)
    for end in (first, opening.result(TIMEOUT_S)):
        end.shutdown()
        end.close()


@pytest.mark.parametrize("wrong", ["token", "binding", "channel_id"])
def test_a_wrong_key_opens_nothing(ends: Ends, wrong: str) -> None:
    key = make_key()
    opening = ends.listener.expect(key, RING)
    parts = {"channel_id": key.channel_id, "token": key.token, "binding": key.binding}
    parts[wrong] = secrets.token_bytes(len(parts[wrong]))
    with pytest.raises(ChannelBroken):
        ends.transport.open(ends.listener.address, ChannelKey(**parts), RING, timeout_s=TIMEOUT_S)
    if wrong == "channel_id":
        assert not opening.done()
        opening.cancel()
    else:
        # The receiver fails its waiting side too, at once where the proof is the receiver's own to check.
        with contextlib.suppress(ChannelBroken, TimeoutError):
            pytest.fail(f"opened: {opening.result(TIMEOUT_S)}")


def test_a_withdrawn_key_opens_nothing(ends: Ends) -> None:
    key = make_key()
    opening = ends.listener.expect(key, RING)
    assert opening.cancel()
    with pytest.raises(ChannelBroken):
        ends.transport.open(ends.listener.address, key, RING, timeout_s=TIMEOUT_S)
    with pytest.raises(CancelledError):
        opening.result(0)


def test_a_listener_is_closed_whatever_its_thread_is_doing(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may see the end before it is woken for it, and be gone before the closing is."""
    acceptor: Any = listening.listener
    acceptor = acceptor._acceptor
    is_awake = threading.Event()

    def busy() -> None:
        is_awake.set()
        while not acceptor._is_closed:
            time.sleep(0.001)

    monkeypatch.setattr(acceptor, "_drop_late", busy)
    opening = listening.listener.expect(make_key(), RING)
    opening.add_done_callback(lambda _: acceptor._thread.join(TIMEOUT_S))
    with stranger(listening):
        assert is_awake.wait(TIMEOUT_S)
        listening.listener.close()
    assert not acceptor._thread.is_alive()
    assert opening.cancelled()


def test_a_closed_listener_opens_nothing(ends: Ends) -> None:
    listener = ends.transport.listen("127.0.0.1", 0)
    key = make_key()
    opening = listener.expect(key, RING)
    listener.close()
    assert opening.cancelled()
    with pytest.raises(ChannelBroken):
        ends.transport.open(listener.address, key, RING, timeout_s=TIMEOUT_S)


def test_a_sender_gives_up_on_a_receiver_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ChannelBroken):
            transport_named("tcp").open(address, make_key(), RING, timeout_s=0.3)


def test_a_receiver_must_prove_itself_to_the_sender() -> None:
    key = make_key()
    with socket.create_server(("127.0.0.1", 0)) as rogue:

        def answer() -> bytes:
            sock, _ = rogue.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(secrets.token_bytes(64))
                return sock.recv(1000)

        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(answer)
            with pytest.raises(ChannelBroken, match="prove"):
                transport_named("tcp").open(f"127.0.0.1:{rogue.getsockname()[1]}", key, RING, timeout_s=TIMEOUT_S)
            assert answering.result(TIMEOUT_S) == b"", "the sender proved itself to a rogue"


@pytest.mark.parametrize(
    "garbage", [b"", b"\0", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, handshake.MAGIC + bytes(48), b"\xff" * 4096]
)
def test_garbage_from_strangers_disturbs_nobody(listening: Listening, garbage: bytes) -> None:
    for _ in range(5):
        with stranger(listening) as sock:
            if garbage:
                sock.send(garbage)
            with contextlib.suppress(OSError):  # it may have been thrown out already
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""
    ends = connect(listening.transport, listening.listener)
    content = ends.post(0, 10)
    assert bytes(ends.poll().data) == content
    for end in (ends.sender, ends.receiver):
        end.shutdown()
        end.close()


def test_idle_strangers_are_bounded_and_disturb_nobody(listening: Listening) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(handshake.MAX_STRANGERS + 20):
            stack.enter_context(stranger(listening))
        ends = connect(listening.transport, listening.listener)
        content = ends.post(0, 10)
        assert bytes(ends.poll().data) == content
        for end in (ends.sender, ends.receiver):
            end.shutdown()
            end.close()


def test_a_stranger_that_does_not_finish_is_dropped(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.2)
    key = make_key()
    opening = listening.listener.expect(key, RING)
    with stranger(listening) as sock:
        sock.send(handshake.MAGIC + key.channel_id + bytes(32))
        assert len(sock.recv(1000)) == 64
        with pytest.raises(ChannelBroken):
            opening.result(TIMEOUT_S)
        assert sock.recv(100) == b""


# --- packets of full size ---


def padded_key() -> ChannelKey:
    return ChannelKey(secrets.token_bytes(16), secrets.token_bytes(32), b"pair", handshake.PADDING_BYTES)


@pytest.mark.parametrize("name", TCP_NAMES)
def test_a_channel_opens_once_the_padding_has_arrived(name: str) -> None:
    transport, key = made(name), padded_key()
    listener = transport.listen("127.0.0.1", 0)
    opening = listener.expect(key, RING)
    both = Ends(transport, listener, transport.open(listener.address, key, RING, timeout_s=TIMEOUT_S), opening.result())
    content = both.post(0, 10)
    assert bytes(both.poll().data) == content
    for end in (both.sender, both.receiver):
        end.shutdown()
        end.close()
    listener.close()


@contextlib.contextmanager
def receiver_without_acknowledgement(key: ChannelKey, *, takes_padding: bool) -> Iterator[str]:
    """A receiver that proves itself and then stops; its kernel has room for the padding if `takes_padding`."""
    with socket.socket() as server:
        if not takes_padding:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least that the kernel allows
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        has_ended = threading.Event()

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                hello = b""
                while len(hello) < handshake._HELLO_BYTES:
                    hello += sock.recv(handshake._HELLO_BYTES - len(hello))
                own = bytes(handshake.NONCE_BYTES)
                sock.sendall(own + handshake._proof(key, b"receiver", hello[-handshake.NONCE_BYTES :], own))
                has_ended.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            has_ended.set()
            thread.join()


@pytest.mark.parametrize("name", TCP_NAMES)
def test_padding_that_does_not_arrive_is_a_path_that_loses_large_packets(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PADDING_TIMEOUT_S", 0.3)
    key = padded_key()
    with receiver_without_acknowledgement(key, takes_padding=False) as address:
        with pytest.raises(LargePacketsLost, match=r"of 12288 bytes of padding were not acknowledged within 0.3 s"):
            made(name).open(address, key, RING, timeout_s=HANG_LIMIT_S)


def test_a_receiver_that_is_busy_after_the_padding_arrived_is_no_such_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PADDING_TIMEOUT_S", 0.1)
    key = padded_key()
    with receiver_without_acknowledgement(key, takes_padding=True) as address:
        with pytest.raises(ChannelBroken) as caught:
            made("tcp").open(address, key, RING, timeout_s=0.5)
    assert not isinstance(caught.value, LargePacketsLost)


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_a_sender_whose_padding_does_not_arrive_is_dropped(num_bytes: int) -> None:
    listener, key = made("tcp").listen("127.0.0.1", 0), padded_key()
    opening = listener.expect(key, RING)
    with socket.create_connection(split_address(listener.address), timeout=TIMEOUT_S) as sock:
        unpadded = dataclasses.replace(key, padding_bytes=0)
        handshake.prove_to_receiver(sock, unpadded, Countdown(TIMEOUT_S))
        sock.sendall(bytes(num_bytes))
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelBroken, match=f"{handshake.PADDING_BYTES - num_bytes} bytes of padding"):
            opening.result(TIMEOUT_S)
    listener.close()


@pytest.mark.parametrize("name", TCP_NAMES)
def test_a_name_whose_first_address_is_silent_opens_at_the_second(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = made(name)
    listener, key = transport.listen("127.0.0.1", 0), padded_key()
    opening = listener.expect(key, RING)
    with silent() as first:
        resolve = resolving(first, split_address(listener.address))
        monkeypatch.setattr(dialling.dial, "__kwdefaults__", {"resolve": resolve})
        sender = transport.open(listener.address, key, RING, timeout_s=HANG_LIMIT_S)
    for end in (sender, opening.result(TIMEOUT_S)):
        end.shutdown()
        end.close()
    listener.close()


# --- a peer that breaks the rules after it was let in ---


def _socket_of(ends: Ends) -> socket.socket:
    if isinstance(ends.sender, ShmSendChannel | TcpSendChannel):
        return ends.sender._socket
    sender: Any = ends.sender  # of a GPU's pages
    found: socket.socket = sender._slots._messages._socket
    return found


def _raw_post(ends: Ends, slot: int, num_bytes: int) -> None:
    sock = _socket_of(ends)
    if isinstance(ends.sender, TcpSendChannel):
        sock.send(struct.pack("<QQ16s", 0, num_bytes, bytes(16)))
    else:
        sock.send(struct.pack("<QIQ16s", 0, slot, num_bytes, bytes(16)))


@pytest.mark.parametrize("name", SOCKET_NAMES)
@pytest.mark.parametrize(("slot", "num_bytes"), [(0, SLOT + 1), (0, 2**63), (0, 2**64 - 1)])
def test_a_frame_larger_than_a_slot_breaks_the_channel(name: str, slot: int, num_bytes: int) -> None:
    _check_broken_by(name, lambda ends: _raw_post(ends, slot, num_bytes))


@pytest.mark.parametrize("name", ["shm", "cuda_ipc", "nccl"])
@pytest.mark.parametrize("slot", [3, 2**32 - 1])
def test_a_slot_outside_the_ring_breaks_the_channel(name: str, slot: int) -> None:
    _check_broken_by(name, lambda ends: _raw_post(ends, slot, 10))


@pytest.mark.parametrize("name", ["shm", "cuda_ipc"])
def test_a_slot_that_is_in_use_breaks_the_channel(name: str) -> None:
    def post_twice(ends: Ends) -> None:
        _raw_post(ends, 1, 10)
        assert ends.poll().slot == 1
        _raw_post(ends, 1, 10)

    _check_broken_by(name, post_twice)


@pytest.mark.parametrize("name", SOCKET_NAMES)
def test_a_torn_message_breaks_the_channel(name: str) -> None:
    def tear(ends: Ends) -> None:
        _socket_of(ends).send(b"abc")
        ends.sender.shutdown()

    _check_broken_by(name, tear)


def _check_broken_by(name: str, misbehave: Callable[[Ends], None]) -> None:
    transport = made(name)
    listener = transport.listen("127.0.0.1", 0)
    ends = connect(transport, listener)
    misbehave(ends)
    with pytest.raises(ChannelBroken):
        ends.receiver.poll(timeout_s=TIMEOUT_S)
    for end in (ends.sender, ends.receiver):
        end.shutdown()
        end.close()
    listener.close()


@pytest.mark.parametrize("name", ["shm", "cuda_ipc", "nccl"])
def test_a_release_of_a_slot_that_was_not_posted_breaks_the_channel(name: str) -> None:
    transport = made(name)
    listener = transport.listen("127.0.0.1", 0)
    ends = connect(transport, listener)
    receiver: Any = ends.receiver
    deadline = time.monotonic() + TIMEOUT_S
    receiver.poll(timeout_s=0.0)
    while name != "shm" and receiver._slots is None and time.monotonic() < deadline:
        ends.receiver.poll(timeout_s=0.01)  # it opens behind the receiving end
    sock = receiver._socket if name == "shm" else receiver._slots._messages._socket
    sock.send(struct.pack("<I", 77))

    def post_on() -> None:
        for seq in range(4):
            ends.post(seq, 10)

    with pytest.raises(ChannelBroken):
        post_on()
    for end in (ends.sender, ends.receiver):
        end.shutdown()
        end.close()
    listener.close()


# --- nothing is left behind, and nothing is taken that was not asked for ---


def test_device_memory_that_torch_cannot_use_is_a_channel_that_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, fd: int, num_bytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: invalid argument")

    transport = cuda_ipc_model()
    listener = transport.listen("127.0.0.1", 0)
    key = make_key()
    opening = listener.expect(key, RING)
    monkeypatch.setattr(MemfdMemory, "map", refuse)
    monkeypatch.setattr(MemfdMemory, "make", lambda self, num_bytes: (torch.zeros(num_bytes), os.memfd_create("ring")))
    with pytest.raises(ChannelBroken, match="invalid argument"):
        transport.open(listener.address, key, RING, timeout_s=TIMEOUT_S)
    opening.result(TIMEOUT_S).close()
    listener.close()


def test_tcp_listens_on_the_configured_address_only() -> None:
    listener = transport_named("tcp").listen("127.0.0.1", 0)
    host, port = split_address(listener.address)
    assert host == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=1).close()
    listener.close()


@pytest.mark.parametrize("name", TCP_NAMES)
def test_an_idle_connection_is_not_silent(name: str) -> None:
    """Else a firewall on the way forgets it, and the next frame is lost without a word."""
    transport = made(name)
    listener = transport.listen("127.0.0.1", 0)
    ends = connect(transport, listener)
    sock = _socket_of(ends)

    def silent_s() -> tuple[float, float]:
        """Since the last data and the last acknowledgement from the other side, as `struct tcp_info` has it."""
        last_data_ms, last_ack_ms = struct.unpack_from(
            "=II", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64), 52
        )
        return last_data_ms / 1e3, last_ack_ms / 1e3

    try:
        deadline = time.monotonic() + HANG_LIMIT_S
        while silent_s()[0] < 2.5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert silent_s()[1] < 1.9
    finally:
        for end in (ends.sender, ends.receiver):
            end.shutdown()
            end.close()
        listener.close()


def test_threads_and_descriptors_go_with_the_channel(ends: Ends) -> None:
    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(20):
        listener = ends.transport.listen("127.0.0.1", 0)
        both = connect(ends.transport, listener)
        both.post(0, 10)
        both.poll()
        for end in (both.sender, both.receiver):
            end.shutdown()
            end.close()
        listener.close()
    end = time.monotonic() + TIMEOUT_S  # a communicator opens and ends in the background
    while any(now > then for now, then in zip(count(), before, strict=True)) and time.monotonic() < end:
        time.sleep(0.01)
    assert all(now <= then for now, then in zip(count(), before, strict=True))


def test_a_ring_out_of_bounds_is_refused_before_memory_is_taken() -> None:
    for num_slots, slot_bytes in [(0, 1), (1, 0), (2**20, 2**20), (-1, 5)]:
        with pytest.raises(ChannelBroken):
            RingSpec(num_slots, slot_bytes)


# --- where a channel leads ---


def test_the_host_id_is_the_same_for_all_processes_of_a_host() -> None:
    assert local_host_id() == local_host_id()
    assert len(local_host_id()) == 32


@pytest.mark.parametrize("address", ["", "nohost", "host:", ":1", "host:x", "host:0", "host:99999"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ChannelBroken):
        split_address(address)


def test_a_receiver_whose_gpu_fails_refuses_and_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = nccl_model()
    listener = transport.listen("127.0.0.1", 0)
    stream = transport._device.stream
    calls = iter([stream, None])  # the sender's, the receiver's

    def failing() -> object:
        call = next(calls, stream)
        if call is None:
            raise RuntimeError("CUDA error: out of memory")
        return call()

    monkeypatch.setattr(transport._device, "stream", failing)
    key = make_key()
    opening = listener.expect(key, RING)
    with pytest.raises(ChannelBroken):
        transport.open(listener.address, key, RING, timeout_s=TIMEOUT_S)
    with pytest.raises(ChannelBroken, match="could not be set up: CUDA error"):
        opening.result(TIMEOUT_S)
    both = connect(transport, listener)
    for end in (both.sender, both.receiver):
        end.shutdown()
        end.close()
    listener.close()


# --- what somebody on the way sees and can do ---


class Between:
    """Stands between a sender and a receiver and passes on what it gets; `seen` is what the sender sent."""

    def __init__(self, address: str) -> None:
        self.seen = bytearray()
        self._to = split_address(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]  # noqa: UP031
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        up, _ = self._listener.accept()
        down = socket.create_connection(self._to)
        with contextlib.suppress(OSError):
            up, down = self._meddle(up, down)
            back = threading.Thread(target=self._pass, args=(down, up, bytearray()), daemon=True)
            back.start()
            self._pass(up, down, self.seen)
            back.join()
        up.close()
        down.close()

    def _meddle(self, up: socket.socket, down: socket.socket) -> tuple[socket.socket, socket.socket]:
        return up, down

    def _pass(self, source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._thread.join(TIMEOUT_S)
        self._listener.close()


class Impostor(Between):
    """Has a certificate of the CA too, and so a TLS connection with each side."""

    def _meddle(self, up: socket.socket, down: socket.socket) -> tuple[socket.socket, socket.socket]:
        for source, target, size in ((up, down, 56), (down, up, 64), (up, down, 32)):  # the proofs, passed on
            data = b""
            while len(data) < size:
                data += source.recv(size - len(data))
            target.sendall(data)
        own = identities()[1]
        return (
            own.channel_context(is_server=True).wrap_socket(up, server_side=True),
            own.channel_context(is_server=False).wrap_socket(down),
        )


@pytest.mark.parametrize(("name", "is_seen"), [("tcp", True), ("tls", False)])
def test_what_passes_over_tls_cannot_be_read_on_the_way(name: str, is_seen: bool) -> None:
    transport = made(name)
    listener = transport.listen("127.0.0.1", 0)
    between = Between(listener.address)
    key = make_key()
    opening = listener.expect(key, RING)
    sender = transport.open(between.address, key, RING, timeout_s=TIMEOUT_S)
    both = Ends(transport, listener, sender, opening.result(TIMEOUT_S))  # type: ignore[arg-type]
    content = both.post(0, SLOT)
    assert bytes(both.poll().data) == content
    assert (content in between.seen) == is_seen
    both.sender.shutdown()
    for end in (both.sender, both.receiver, listener, between):
        end.close()


def test_an_impostor_with_a_certificate_of_the_ca_is_found_out() -> None:
    transport = made("tls")
    listener = transport.listen("127.0.0.1", 0)
    impostor = Impostor(listener.address)
    key = make_key()
    opening = listener.expect(key, RING)
    with pytest.raises(ChannelBroken):
        transport.open(impostor.address, key, RING, timeout_s=TIMEOUT_S)
    with pytest.raises(ChannelBroken, match="the encrypted connection ends at it"):
        opening.result(TIMEOUT_S)
    impostor.close()
    listener.close()


def test_a_sender_without_a_certificate_of_the_ca_is_refused(tmp_path: Path) -> None:
    listener = made("tls").listen("127.0.0.1", 0)
    stranger = TlsTransport(Identity(Authority(tmp_path).issue("stranger", roles=["decode"])))
    key = make_key()
    opening = listener.expect(key, RING)
    with pytest.raises(ChannelBroken):
        stranger.open(listener.address, key, RING, timeout_s=TIMEOUT_S)
    with pytest.raises(ChannelBroken, match="could not be set up"):
        opening.result(TIMEOUT_S)
    listener.close()
