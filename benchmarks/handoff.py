"""How fast pages move from one process's memory to another's, beside memcpy and a plain TCP socket.

    python -m benchmarks.handoff [--json FILE] [--sizes-mib 1,16,64] [--rounds 9] [--page-kib 64] [--device cuda]

Two processes, each on a core of its own. Every round runs everything once, in turn, and ratios are taken within a
round, so that what else the machine does falls on all alike. `channel` is a transport alone, pages to pages;
`handoff` is the whole protocol from the reservation to the commit, with checksums; `stream` is the part of it after
the reservation, which is what follows the last computed chunk at worst.

With `--device cuda` the pages are on a GPU (the second process's on the second GPU, if there is one), the channels
`cuda_ipc` and `nccl` come first, and `memcpy` is a copy within the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import multiprocessing
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.report import Ratio, add_arguments, leave
from kv_transfer.device_pages import DevicePages
from kv_transfer.link_end import LinkSetup
from kv_transfer.page_bytes import Destination, PageReader, PageWriter, wire_layout
from kv_transfer.protocol.messages import TransferId, pages_per_frame
from kv_transfer.receive_link import Reserved
from kv_transfer.receiving import LinkReceiver, RingConfig
from kv_transfer.sending import SendLinks
from kv_transfer.transports.base import (
    AnyReceiveChannel,
    AnySendChannel,
    ChannelKey,
    DeviceSendChannel,
    RingSpec,
    Transport,
)
from kv_transfer.transports.registry import DEVICE_NAMES, Transports
from kv_transfer.wire import SERVICE_NAME, LinkIdentity
from protos import link_pb2_grpc
from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout, PagePool
from services.runtime.clock import Deadline
from services.runtime.errors import TandemError
from services.runtime.rpc import make_server

MIB = 2**20
TRANSPORTS = {"cpu": ("shm", "tcp"), "cuda": ("cuda_ipc", "nccl", "shm", "tcp")}
# Two processes on one GPU are two hosts to NCCL, which meet over sockets: that tests it, and says nothing of its speed.
NCCL_ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
}
TARGET_CUDA_IPC_TO_MEMCPY = 0.7
TARGET_SHM_TO_MEMCPY = 0.5
TARGET_TCP_TO_SOCKET = 0.9
TIMEOUT_S = 60.0
PAGES_AT_ONCE_BYTES = 8 * MIB
_NO_DIGEST = bytes(16)


@dataclass(frozen=True)
class Settings:
    """What both processes must agree on."""

    page_kib: int
    max_mib: int
    slot_kib: int
    device_slot_mib: int = 8
    device: str = "cpu"
    """The device of the process that asks: cpu, or cuda:index."""

    @property
    def transports(self) -> tuple[str, ...]:
        """The channels that are measured."""
        return TRANSPORTS[torch.device(self.device).type]

    def transport(self, name: str) -> Transport:
        """One of them."""
        return Transports(torch.device(self.device), self.layout.page_bytes)[name]

    def await_device(self) -> None:
        """Wait for what was launched, if that runs behind the caller."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    @property
    def layout(self) -> PageLayout:
        """Pages of `page_kib`: 16 tokens, 4 heads of 64 elements in bfloat16 make 16 KiB per layer."""
        return PageLayout(
            num_layers=max(1, self.page_kib // 16), num_kv_heads=4, head_dim=64, page_size=16, dtype=torch.bfloat16
        )

    def make_pool(self) -> PagePool:
        """A pool with something in every page."""
        pool = PagePool(self.layout, self.max_mib * MIB // self.layout.page_bytes, device=self.device)
        # Every page is touched, and none is like another.
        pool.bytes.view(torch.int16).copy_(torch.arange(pool.bytes.numel() // 2).view_as(pool.bytes.view(torch.int16)))
        return pool

    @property
    def ring(self) -> RingConfig:
        """The ring that Links use."""
        return RingConfig(slot_bytes=self.slot_kib * 1024, device_slot_bytes=self.device_slot_mib * MIB)

    def ring_spec(self, name: str) -> RingSpec:
        """The ring of a channel for these pages."""
        return self.ring.spec_for(self.layout.page_bytes, is_on_device=name in DEVICE_NAMES)

    def frame_pages(self, name: str) -> int:
        """Pages of a frame."""
        return pages_per_frame(self.layout.page_bytes, self.ring_spec(name).slot_bytes)


# --- the receiving process ---


class Target:
    """Gives out the same pages to every transfer; there is one at a time."""

    async def reserve(self, transfer_id: TransferId, num_tokens: int) -> Reserved:
        """See ReceiveTarget."""
        return Reserved(range(num_tokens // 16), 0)

    async def commit(self, transfer_id: TransferId, *, first_token_id: int, sampling_position: int) -> None:
        """See ReceiveTarget."""

    async def release(self, transfer_id: TransferId, error: TandemError) -> None:
        """See ReceiveTarget."""

    async def abandon(self, transfer_id: TransferId, error: TandemError) -> None:
        """See ReceiveTarget."""


class ReceivingProcess:
    """Answers the commands of the sending process, one at a time."""

    def __init__(self, pipe: Connection, settings: Settings) -> None:
        self._pipe = pipe
        self._settings = settings
        self._pool = settings.make_pool()
        layout = wire_layout(self._pool.layout, fingerprint="benchmark", exact=True)
        self._writer = PageWriter(self._pool, layout)
        self._device_pages = DevicePages(self._pool)
        self._channels: dict[str, AnyReceiveChannel] = {}
        self._buffer = memoryview(bytearray(settings.max_mib * MIB))

    def run(self) -> None:
        """Serve until the other process says that it is done."""
        listeners = self._open_channels()
        plain = socket.create_server(("127.0.0.1", 0))
        self._pipe.send(plain.getsockname()[1])
        connection, _ = plain.accept()
        serving = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        serving.start()
        while (command := self._pipe.recv()) is not None:
            kind, name, num_pages = command
            if kind == "channel":
                self._receive_frames(self._channels[name], num_pages)
            else:
                num_bytes = num_pages * self._settings.layout.page_bytes
                received = 0
                while received < num_bytes:
                    received += connection.recv_into(self._buffer[received:num_bytes])
            self._pipe.send("done")
        for channel in self._channels.values():
            channel.shutdown()
            channel.close()
        for listener in listeners:
            listener.close()
        connection.close()
        plain.close()

    def _open_channels(self) -> list[Any]:
        listeners = []
        for name in self._settings.transports:
            listener = self._settings.transport(name).listen("127.0.0.1", 0)
            key = ChannelKey(secrets.token_bytes(16), secrets.token_bytes(32), b"benchmark")
            opening = listener.expect(key, self._settings.ring_spec(name))
            self._pipe.send((listener.address, key))
            self._channels[name] = opening.result(TIMEOUT_S)
            listeners.append(listener)
        return listeners

    def _receive_frames(self, channel: AnyReceiveChannel, num_pages: int) -> None:
        destination = Destination(tuple(range(num_pages)), 0, num_pages * 16)
        first_page = 0
        while first_page < num_pages:
            frame = channel.poll(timeout_s=TIMEOUT_S)
            if frame is None:
                raise TimeoutError("no frame came")
            with self._device_pages.working(None):
                self._writer.write(frame.data, first_page, destination)
            first_page += frame.num_bytes // self._settings.layout.page_bytes
            channel.release(frame.slot)

    async def _serve(self) -> None:
        servers = []  # a server that nobody refers to stops
        for name in self._settings.transports:
            identity = LinkIdentity("decode", name, "benchmark", True, "here")
            setup = LinkSetup(identity, self._pool, PageAllocator(self._pool.num_pages), (name,))
            receiver = LinkReceiver(setup, Target(), ring=self._settings.ring)
            server = make_server([SERVICE_NAME])
            servers.append(server)
            link_pb2_grpc.add_LinkServicer_to_server(receiver, server.server)
            self._pipe.send(await server.start("127.0.0.1", 0))
        await asyncio.Event().wait()


def receive(pipe: Connection, settings: Settings, core: int) -> None:
    """Root of the receiving process."""
    if settings.device != "cpu":
        os.environ["NCCL_HOSTID"] = "receiver"
        settings = replace(settings, device=f"cuda:{torch.cuda.device_count() - 1}")
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    ReceivingProcess(pipe, settings).run()


# --- the sending process ---


@dataclass
class Round:
    """Seconds that each way took for one size."""

    seconds: dict[str, float]


class Sender:
    """Sends the same pages in every way there is."""

    def __init__(self, pipe: Connection, settings: Settings) -> None:
        self._pipe = pipe
        self._settings = settings
        self._pool = settings.make_pool()
        self._reader = PageReader(self._pool)
        self._device_pages = DevicePages(self._pool)
        self._source = self._pool.bytes.view(-1)
        self._target = torch.ones_like(self._source)
        self._channels: dict[str, AnySendChannel] = {}
        self._ports: dict[str, int] = {}
        self._seq = 0
        for name in settings.transports:
            address, key = pipe.recv()
            transport = settings.transport(name)
            self._channels[name] = transport.open(address, key, settings.ring_spec(name), timeout_s=TIMEOUT_S)
        self._plain = socket.create_connection(("127.0.0.1", pipe.recv()))
        for name in settings.transports:
            self._ports[name] = pipe.recv()
        identity = LinkIdentity("prefill", "sender", "benchmark", True, "here")
        allocator = PageAllocator(self._pool.num_pages)
        self._links = SendLinks(LinkSetup(identity, self._pool, allocator, settings.transports))

    async def run_round(self, num_pages: int) -> Round:
        """Everything once."""
        num_bytes = num_pages * self._settings.layout.page_bytes
        seconds = {"memcpy": _timed(lambda: self._copy(num_bytes)), "socket": self._time_plain(num_pages)}
        for name in self._settings.transports:
            seconds[f"{name} channel"] = self._time_channel(name, num_pages)
        for name in self._settings.transports:
            seconds[f"{name} handoff"], seconds[f"{name} stream"] = await self._time_handoff(name, num_pages)
        return Round(seconds)

    async def close(self) -> None:
        """End the other process and all channels."""
        await self._links.close()
        self._pipe.send(None)
        for channel in self._channels.values():
            channel.shutdown()
            channel.close()
        self._plain.close()

    def _copy(self, num_bytes: int) -> None:
        self._target[:num_bytes].copy_(self._source[:num_bytes])
        self._settings.await_device()

    def _time_plain(self, num_pages: int) -> float:
        data = self._source[: num_pages * self._settings.layout.page_bytes].cpu().numpy().data
        self._pipe.send(("plain", "", num_pages))
        return _timed(lambda: (self._plain.sendall(data), self._await_done()))

    def _time_channel(self, name: str, num_pages: int) -> float:
        self._pipe.send(("channel", name, num_pages))
        return _timed(lambda: (self._post_all(name, num_pages), self._await_done()))

    def _post_all(self, name: str, num_pages: int) -> None:
        channel, step = self._channels[name], self._settings.frame_pages(name)
        for first in range(0, num_pages, step):
            page_ids = range(first, min(first + step, num_pages))
            if isinstance(channel, DeviceSendChannel):
                fill = functools.partial(self._device_pages.gather, page_ids)
                num_bytes = len(page_ids) * self._device_pages.page_bytes
                channel.post(self._seq, num_bytes, fill, timeout_s=TIMEOUT_S)
            else:
                channel.post(self._seq, _NO_DIGEST, self._reader.pieces(page_ids), timeout_s=TIMEOUT_S)
            self._seq += 1

    async def _time_handoff(self, name: str, num_pages: int) -> tuple[float, float]:
        num_tokens = num_pages * 16
        step = max(1, PAGES_AT_ONCE_BYTES // self._settings.layout.page_bytes)
        started = time.perf_counter()
        transfer = await self._links.reserve(
            f"127.0.0.1:{self._ports[name]}",
            name,
            TransferId(secrets.token_hex(8), 1),
            num_tokens=num_tokens,
            deadline=Deadline.after(TIMEOUT_S),
        )
        granted = time.perf_counter()
        for first in range(0, num_pages, step):
            transfer.send(first, range(first, min(first + step, num_pages)))
        stats = await transfer.seal(num_tokens=num_tokens, first_token_id=1, sampling_position=num_tokens + 1)
        ended = time.perf_counter()
        if stats.transport != name:
            raise RuntimeError(f"{name} was to be measured and {stats.transport} was used")
        return ended - started, ended - granted

    def _await_done(self) -> None:
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError("the receiving process does not answer")
        self._pipe.recv()


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# --- the report ---


@dataclass(frozen=True)
class Result:
    """Medians over the rounds of one size and way. `to_memcpy` and `to_socket` are ratios of speeds within a round."""

    size_mib: float
    way: str
    gb_per_s: float
    to_memcpy: float
    to_socket: float


async def measure(sender: Sender, settings: Settings, sizes_mib: Sequence[int], num_rounds: int) -> list[Result]:
    """Run the rounds of every size."""
    results = []
    for size_mib in sizes_mib:
        num_pages = max(1, size_mib * MIB // settings.layout.page_bytes)
        await sender.run_round(num_pages)  # warms up: connections, page faults, the slots of the rings
        rounds = [await sender.run_round(num_pages) for _ in range(num_rounds)]
        num_bytes = num_pages * settings.layout.page_bytes
        for way in rounds[0].seconds:
            results.append(
                Result(
                    size_mib=num_bytes / MIB,
                    way=way,
                    gb_per_s=num_bytes / 1e9 / statistics.median(each.seconds[way] for each in rounds),
                    to_memcpy=statistics.median(each.seconds["memcpy"] / each.seconds[way] for each in rounds),
                    to_socket=statistics.median(each.seconds["socket"] / each.seconds[way] for each in rounds),
                )
            )
            print(_line(results[-1]), flush=True)
    return results


def summary(results: Sequence[Result]) -> dict[str, float]:
    """The two figures that have a target: the median over the sizes from 16 MiB."""
    large = [result for result in results if result.size_mib >= 16]
    if not large:
        return {}
    figures = {
        f"{name}_{kind}_to_memcpy": statistics.median(ratios)
        for name in ("cuda_ipc", "nccl")
        for kind in ("channel", "stream")
        if (ratios := [r.to_memcpy for r in large if r.way == f"{name} {kind}"])
    }
    return figures | {
        "shm_channel_to_memcpy": statistics.median(r.to_memcpy for r in large if r.way == "shm channel"),
        "tcp_channel_to_socket": statistics.median(r.to_socket for r in large if r.way == "tcp channel"),
        "shm_stream_to_memcpy": statistics.median(r.to_memcpy for r in large if r.way == "shm stream"),
        "tcp_stream_to_socket": statistics.median(r.to_socket for r in large if r.way == "tcp stream"),
    }


def _line(result: Result) -> str:
    return (
        f"{result.size_mib:8.1f} MiB  {result.way:12}  {result.gb_per_s:7.2f} GB/s"
        f"  {result.to_memcpy:5.2f} of memcpy  {result.to_socket:5.2f} of a socket"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--sizes-mib", default="1,4,16,64,256", help="sizes of a handoff")
    parser.add_argument("--rounds", type=int, default=9, help="rounds per size")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pages are")
    parser.add_argument("--device-slot-mib", type=int, default=8, help="size of a ring slot of a device channel")
    parser.add_argument("--page-kib", type=int, default=64, help="size of a page, a multiple of 16")
    parser.add_argument("--slot-kib", type=int, default=RingConfig().slot_bytes // 1024, help="size of a ring slot")
    return parser.parse_args()


async def _run(pipe: Connection, settings: Settings, sizes_mib: Sequence[int], num_rounds: int) -> list[Result]:
    sender = Sender(pipe, settings)
    try:
        return await measure(sender, settings, sizes_mib, num_rounds)
    finally:
        await sender.close()


def main() -> None:
    """Measure and print; exit 1 if a target is missed."""
    arguments = _arguments()
    sizes_mib = [int(size) for size in arguments.sizes_mib.split(",")]
    device = "cpu"
    if arguments.device == "cuda":
        device = "cuda:0"
        os.environ.update(NCCL_ON_ONE_GPU if torch.cuda.device_count() == 1 else {}, NCCL_HOSTID="sender")
    settings = Settings(arguments.page_kib, max(sizes_mib), arguments.slot_kib, arguments.device_slot_mib, device)
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=receive, args=(other, settings, cores[-1]), daemon=True)
    process.start()
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    results = asyncio.run(_run(own, settings, sizes_mib, arguments.rounds))
    process.join(TIMEOUT_S)
    figures = summary(results)
    if figures:
        if "cuda_ipc_channel_to_memcpy" in figures:
            ratio = figures["cuda_ipc_channel_to_memcpy"]
            print(f"cuda_ipc channel: {ratio:.2f} of a copy in the GPU (target {TARGET_CUDA_IPC_TO_MEMCPY})")
        print(f"shm channel: {figures['shm_channel_to_memcpy']:.2f} of memcpy (target {TARGET_SHM_TO_MEMCPY})")
        print(f"tcp channel: {figures['tcp_channel_to_socket']:.2f} of a socket (target {TARGET_TCP_TO_SOCKET})")
    aims = {"shm_channel_to_memcpy": TARGET_SHM_TO_MEMCPY, "tcp_channel_to_socket": TARGET_TCP_TO_SOCKET}
    ratios = {name: Ratio(value, aims.get(name)) for name, value in figures.items()}
    leave(arguments, "handoff", {"results": [asdict(result) for result in results]}, ratios)


if __name__ == "__main__":
    main()
