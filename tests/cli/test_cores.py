"""Which cores each worker gets, on machines of all kinds."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.cores import Machine, Share, physical_cores, share_out, this_machine


def machine(num_cores: int, *, threads_of_each: int = 1, quota: float = math.inf) -> Machine:
    """Cores whose threads are numbered as Linux does: first one thread of each, then the next."""
    cores = tuple(tuple(core + num_cores * thread for thread in range(threads_of_each)) for core in range(num_cores))
    return Machine(cores, quota=quota)


def test_two_workers_on_two_cores() -> None:
    assert share_out(machine(2), 2) == [Share(1, (0,)), Share(1, (1,))]


def test_whole_cores_before_their_second_threads() -> None:
    first, second = share_out(machine(32, threads_of_each=2), 2)
    assert first == Share(16, (*range(16), *range(32, 48)))
    assert second == Share(16, (*range(16, 32), *range(48, 64)))


def test_the_two_threads_of_a_core_are_better_than_one_that_is_shared() -> None:
    assert share_out(machine(1, threads_of_each=2), 2) == [Share(1, (0,)), Share(1, (1,))]


def test_what_does_not_divide_is_left_for_the_others() -> None:
    assert share_out(machine(5), 2) == [Share(2, (0, 1)), Share(2, (2, 3))]


def test_one_worker_uses_whatever_there_is() -> None:
    assert share_out(machine(4, threads_of_each=2), 1) == [Share(4)]


@pytest.mark.parametrize("num_workers", [2, 3, 256])
def test_one_core_is_shared_by_all(num_workers: int) -> None:
    assert share_out(machine(1), num_workers) == [Share(1)] * num_workers


def test_more_workers_than_threads_keep_to_nothing() -> None:
    assert share_out(machine(2, threads_of_each=2), 5) == [Share(1)] * 5


def test_a_container_with_less_time_than_cores_keeps_to_nothing() -> None:
    assert share_out(machine(64, quota=5.5), 2) == [Share(2)] * 2
    assert share_out(machine(64, quota=0.5), 2) == [Share(1)] * 2
    assert share_out(machine(4, quota=4.0), 2) == [Share(2, (0, 1)), Share(2, (2, 3))]


def test_a_system_that_cannot_do_it_is_not_asked() -> None:
    assert share_out(Machine(((0,), (1,)), can_pin=False), 2) == [Share(1), Share(1)]


@given(
    num_cores=st.integers(1, 80),
    threads_of_each=st.integers(1, 4),
    num_workers=st.integers(1, 300),
    quota=st.one_of(st.just(math.inf), st.floats(0.01, 400)),
)
def test_shares_are_disjoint_equal_and_never_empty_of_threads(
    num_cores: int, threads_of_each: int, num_workers: int, quota: float
) -> None:
    given = machine(num_cores, threads_of_each=threads_of_each, quota=quota)
    shares = share_out(given, num_workers)
    assert len(shares) == num_workers
    assert len({(share.threads, len(share.cpus)) for share in shares}) == 1
    cpus = [cpu for share in shares for cpu in share.cpus]
    assert len(cpus) == len(set(cpus))
    assert set(cpus) <= {cpu for core in given.cores for cpu in core}
    assert shares[0].threads >= 1
    if shares[0].cpus:
        assert shares[0].threads <= len(shares[0].cpus)
        assert shares[0].threads * num_workers <= num_cores * threads_of_each
    elif shares[0].threads > 1:
        assert shares[0].threads * num_workers <= min(num_cores, quota)


def lay_out(folder: Path, packages: dict[int, tuple[int, str]]) -> Path:
    for cpu, (package, siblings) in packages.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    return folder


def test_cores_of_a_socket_are_side_by_side(tmp_path: Path) -> None:
    # Two sockets of two cores of two threads; cores are numbered in turn on both sockets, as some firmwares do.
    sys_cpu = lay_out(tmp_path, {cpu: (cpu % 2, f"{cpu % 4},{cpu % 4 + 4}") for cpu in range(8)})
    assert physical_cores(range(8), sys_cpu) == ((0, 4), (2, 6), (1, 5), (3, 7))


def test_only_the_cores_that_we_may_use_are_there(tmp_path: Path) -> None:
    sys_cpu = lay_out(tmp_path, {cpu: (0, f"{cpu % 4},{cpu % 4 + 4}") for cpu in range(8)})
    assert physical_cores([1, 2, 6], sys_cpu) == ((1,), (2, 6))


@pytest.mark.parametrize("text", [None, "-\n"])
def test_a_kernel_that_says_nothing_of_threads(tmp_path: Path, text: str | None) -> None:
    sys_cpu = lay_out(tmp_path, {0: (0, "0"), 1: (0, "1")})
    for name in ("physical_package_id", "thread_siblings_list"):
        file = sys_cpu / "cpu1" / "topology" / name
        file.unlink() if text is None else file.write_text(text)
    assert physical_cores([0, 1], sys_cpu) == ((0,), (1,))


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000\n", math.inf), ("150000 100000\n", 1.5), ("nonsense", math.inf)]
)
def test_the_time_of_a_container(tmp_path: Path, text: str, quota: float) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert this_machine(cgroup=tmp_path).quota == quota


def test_this_machine_is_one() -> None:
    found = this_machine()
    assert found.num_cores >= 1
    assert {cpu for core in found.cores for cpu in core} == os.sched_getaffinity(0)
