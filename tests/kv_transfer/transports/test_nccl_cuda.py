"""What of a GPU's streams can be checked without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from kv_transfer.transports import nccl_cuda
from kv_transfer.transports.base import ChannelBroken
from kv_transfer.transports.nccl_cuda import CudaDevice, CudaStream

_turns: dict[int, Iterator[int]] = {}


class PooledStream:
    """Comes from a pool of 32 for each priority, in turns, as torch's do."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        turn = _turns.setdefault(priority, itertools.cycle(range(32)))
        self.cuda_stream = 1000 * abs(priority) + next(turn)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    monkeypatch.setattr(torch.cuda, "Stream", PooledStream)
    monkeypatch.setattr(nccl_cuda, "_in_use", set())
    return CudaDevice(torch.device("cuda"))


def test_no_two_channels_share_a_stream(device: CudaDevice) -> None:
    held: list[CudaStream] = [device.stream() for _ in range(30)]
    for _ in range(50):
        PooledStream(torch.device("cuda"))  # somebody else's
        gone = held.pop(7).handle
        held.append(device.stream())
        handles = {stream.handle for stream in held}
        assert len(handles) == 30
        assert min(handles) >= 1000, "a stream of the priority that everybody has"
        assert gone not in handles or held[-1].handle == gone


def test_too_many_channels_are_refused_until_one_ends(device: CudaDevice) -> None:
    held = [device.stream() for _ in range(32)]
    with pytest.raises(ChannelBroken, match="in use"):
        device.stream()
    freed = held.pop().handle
    assert device.stream().handle == freed


def test_a_gpu_without_memory_breaks_the_channel(monkeypatch: pytest.MonkeyPatch, device: CudaDevice) -> None:
    def refuse(*args: object, **settings: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ChannelBroken, match="no memory: CUDA out of memory"):
        device.memory(10)
