"""Which transports a pool can use, which of them reach another, and in which order `auto` takes them."""

from __future__ import annotations

import ssl

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports import registry
from kv_transfer.transports.registry import (
    CLEARLY_FASTER,
    DEVICE_NAMES,
    NAMES,
    Reach,
    Transports,
    choose,
    in_order,
    reaches,
)
from services.runtime.errors import ConfigError
from tests.kv_transfer.transports.models import cuda_ipc_model, nccl_model


class NoFiles:
    """TLS whose files nobody opens, as no channel is opened either."""

    def channel_context(self, *, is_server: bool) -> ssl.SSLContext:
        raise NotImplementedError


CPU = torch.device("cpu")
HERE = Reach("a")
GPU_0 = Reach("a", "GPU-0", "22907@")
GPU_1 = Reach("a", "GPU-1", "22907@")
FAR_GPU = Reach("b", "GPU-2", "22907@")


def test_pages_in_host_memory_go_by_shared_memory_or_tcp() -> None:
    transports = Transports(CPU, 64)
    assert transports.resolve(["auto"]) == ("shm", "tcp")
    assert transports.resolve(["tcp", "auto"]) == ("tcp", "shm")


@pytest.mark.parametrize(
    ("name", "why"), [("carrier-pigeon", "is not one of"), ("nccl", "needs pages on a GPU"), ("cuda_ipc", "on a GPU")]
)
def test_a_transport_that_cannot_be_used_is_refused_at_the_start(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Transports(CPU, 64).resolve([name])


def test_pages_on_a_gpu_go_by_its_own_ways_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"cuda_ipc": cuda_ipc_model(), "nccl": nccl_model()}
    monkeypatch.setattr(registry, "device_transports", lambda device: found)
    assert Transports(CPU, 64).resolve(["auto"]) == ("cuda_ipc", "nccl", "shm", "tcp")
    encrypted = Transports(CPU, 64, NoFiles())
    assert encrypted.resolve(["auto"]) == ("cuda_ipc", "shm", "tls"), "nothing leaves the host as it is"
    assert encrypted.resolve(["tcp"]) == ("tls",)
    with pytest.raises(ConfigError, match="--insecure"):
        encrypted.resolve(["nccl"])
    with pytest.raises(ConfigError, match="--tls-ca"):
        Transports(CPU, 64).resolve(["tls"])
    assert Transports(CPU, 66).resolve(["auto"]) == ("shm", "tcp"), "kernels move whole words"


@pytest.mark.parametrize(
    ("name", "sender", "receiver", "expected"),
    [
        ("shm", HERE, HERE, True),
        ("shm", HERE, Reach("b"), False),
        ("tcp", HERE, Reach("b"), True),
        ("cuda_ipc", GPU_0, GPU_0, True),
        ("cuda_ipc", GPU_0, GPU_1, True),
        ("cuda_ipc", GPU_0, FAR_GPU, False),
        ("cuda_ipc", GPU_0, HERE, False),
        ("cuda_ipc", HERE, GPU_0, False),
        ("nccl", GPU_0, GPU_1, True),
        ("nccl", GPU_0, FAR_GPU, True),
        ("nccl", GPU_0, HERE, False),
        # NCCL refuses two ranks on one GPU, unless they say that they are on two hosts.
        ("nccl", GPU_0, GPU_0, False),
        ("nccl", Reach("a", "GPU-0", "22907@x"), Reach("a", "GPU-0", "22907@y"), True),
        ("nccl", GPU_0, Reach("a", "GPU-1", "23203@"), False),
        ("nccl", Reach("a", "GPU-0"), Reach("a", "GPU-1"), False),
    ],
)
def test_what_reaches_whom(name: str, sender: Reach, receiver: Reach, expected: bool) -> None:
    assert reaches(name, sender, receiver) is expected


def test_the_first_offer_that_both_have_and_that_reaches_is_chosen() -> None:
    def chosen(offered: tuple[str, ...], available: tuple[str, ...], sender: Reach, receiver: Reach) -> str | None:
        return choose(offered, available, sender=sender, receiver=receiver)

    both = ("shm", "tcp")
    assert chosen(both, both, HERE, HERE) == "shm"
    assert chosen(both, both, HERE, Reach("b")) == "tcp"
    assert chosen(both, ("tcp",), HERE, HERE) == "tcp"
    assert chosen(("tcp",), ("shm",), HERE, HERE) is None
    assert chosen(NAMES, NAMES, GPU_0, GPU_0) == "cuda_ipc"
    assert chosen(NAMES, NAMES, GPU_0, FAR_GPU) == "nccl"
    assert chosen(NAMES, both, GPU_0, HERE) == "shm", "one side has its pages in host memory"
    assert chosen(("nccl", "tcp"), NAMES, GPU_0, GPU_0) == "tcp"


def test_what_was_measured_decides_where_it_is_clear() -> None:
    names = ("cuda_ipc", "shm", "tcp")
    assert in_order(names, {}) == names
    assert in_order(names, {"cuda_ipc": 9.0, "shm": 10.0, "tcp": 3.0}) == names, "that may be noise"
    assert in_order(names, {"shm": 3.0, "tcp": 10.0}) == ("tcp", "shm", "cuda_ipc")
    assert in_order(("cuda_ipc", "nccl"), {"cuda_ipc": 1.0, "nccl": 10.0}) == ("nccl", "cuda_ipc")
    assert in_order(names, {"cuda_ipc": 1.0, "shm": 10.0, "tcp": 30.0}) == ("cuda_ipc", "tcp", "shm"), "unlike things"
    assert in_order(names, {"shm": 1.0, "tcp": 3.0}) == ("tcp", "shm", "cuda_ipc"), "what could not be opened is last"


@given(st.permutations(NAMES), st.dictionaries(st.sampled_from(NAMES), st.floats(1, 1e12)))
def test_the_order_names_each_once_and_puts_nothing_before_what_is_clearly_faster(
    names: list[str], rates: dict[str, float]
) -> None:
    ordered = in_order(names, rates)
    assert sorted(ordered) == sorted(names)
    measured = [name for name in ordered if name in rates]
    assert ordered[: len(measured)] == tuple(measured)
    on_device = [name for name in measured if name in DEVICE_NAMES]
    on_host = [name for name in measured if name not in DEVICE_NAMES]
    assert measured == on_device + on_host
    for alike in (on_device, on_host):
        for index, name in enumerate(alike):
            behind = [each for each in alike[index + 1 :] if rates[each] > CLEARLY_FASTER**3 * rates[name]]
            assert not behind
