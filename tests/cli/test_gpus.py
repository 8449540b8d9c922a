"""Which GPU each worker gets."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.gpus import GpuShare, share_out_gpus, visible_gpus


def test_one_gpu_is_for_all_in_equal_parts() -> None:
    assert share_out_gpus(["0"], 2) == [GpuShare("0", 0.5)] * 2


def test_each_worker_has_a_gpu_of_its_own_where_there_are_enough() -> None:
    shares = share_out_gpus(["0", "1", "2"], 2)
    assert shares == [GpuShare("0,1,2", 1.0), GpuShare("1,2,0", 1.0)]


def test_two_prefill_and_two_decode_workers_do_not_share_a_gpu_across_roles() -> None:
    shares = share_out_gpus(["GPU-a", "GPU-b"], 4)
    assert shares == [GpuShare("GPU-a,GPU-b", 0.5)] * 2 + [GpuShare("GPU-b,GPU-a", 0.5)] * 2


def test_without_a_gpu_nobody_gets_one() -> None:
    assert share_out_gpus([], 3) == [None] * 3


@given(num_gpus=st.integers(1, 9), num_workers=st.integers(1, 40))
def test_no_gpu_is_promised_twice_or_left_over(num_gpus: int, num_workers: int) -> None:
    gpus = [str(number) for number in range(num_gpus)]
    shares = share_out_gpus(gpus, num_workers)
    promised: dict[str, list[float]] = {}
    for share in shares:
        assert share is not None
        names = share.visible.split(",")
        assert sorted(names) == sorted(gpus)
        promised.setdefault(names[0], []).append(share.memory_share)
    assert len(promised) == min(num_gpus, num_workers)
    assert all(sum(parts) == pytest.approx(1) for parts in promised.values())
    counts = [len(parts) for parts in promised.values()]
    assert max(counts) - min(counts) <= 1


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    nothing = tmp_path / "nothing"
    assert visible_gpus({}, tmp_path, nothing) == ("0", "1")
    assert visible_gpus({}, nothing, nothing) == ()


def test_gpus_without_device_files_yet_are_counted_by_the_drivers_list(tmp_path: Path) -> None:
    for address in ("0000:19:00.0", "0000:5d:00.0"):
        (tmp_path / "gpus" / address).mkdir(parents=True)
    assert visible_gpus({}, tmp_path / "nothing", tmp_path / "gpus") == ("0", "1")
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({}, tmp_path, tmp_path / "gpus") == ("0",), "a container has one of the host's two"


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("2,0", ("2", "0")),
        ("GPU-1234, MIG-5", ("GPU-1234", "MIG-5")),
        ("", ()),
        ("-1", ()),
        ("1,-1,0", ("1",)),
        ("1,,0", ("1",)),
    ],
)
def test_what_the_user_chose_is_not_extended(tmp_path: Path, said: str, names: tuple[str, ...]) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": said}, tmp_path) == names
