import ctypes
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from services.engine.kernels import build as build_module
from services.engine.kernels import library as library_module
from services.engine.kernels.build import KernelsUnavailable, build_library
from services.engine.kernels.library import Kernels, check_arithmetic
from services.engine.reference.attention import paged_attention
from tests.services.engine.attention_cases import CASES, SCALE, expected_attention, make_case
from tests.waiting import HANG_LIMIT_S

BUILD = """
import sys
from pathlib import Path
from services.engine.kernels import build
build.SOURCE_DIR = Path(sys.argv[2])
print(build.build_library(cache_dir=Path(sys.argv[1]), extra_flags=["-O1"]))
"""


@pytest.fixture
def tiny_source(monkeypatch, tmp_path):
    """A source that compiles at once, in place of the kernels."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tiny.cpp").write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
    monkeypatch.setattr(build_module, "SOURCE_DIR", folder)
    return folder


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fake-g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_processes_that_start_together_share_one_library(tmp_path, tiny_source):
    asked = tmp_path / "asked"
    compiler = fake_compiler(tmp_path, f'echo "$1" >> {asked}; [ "$1" = --version ] || sleep 1; exec g++ "$@"')
    script = BUILD.replace('extra_flags=["-O1"]', f"compiler={compiler!r}")
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), str(tiny_source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=HANG_LIMIT_S)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(paths) == 1
    assert sum(line != "--version" for line in asked.read_text().splitlines()) == 1
    left = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert left == [".lock", ".sha256", ".so"]


def test_second_build_only_looks(tmp_path, tiny_source):
    first = build_library(cache_dir=tmp_path / "cache")
    assert ctypes.CDLL(str(first)).answer() == 42
    changed = first.stat().st_mtime_ns
    assert build_library(cache_dir=tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == changed


def test_second_build_asks_the_compiler_for_its_version_only(tmp_path, tiny_source):
    asked = tmp_path / "asked"
    compiler = fake_compiler(tmp_path, f'echo "$@" >> {asked}; exec g++ "$@"')
    build_library(cache_dir=tmp_path / "cache", compiler=compiler)
    assert len(asked.read_text().splitlines()) == 2
    asked.unlink()
    build_library(cache_dir=tmp_path / "cache", compiler=compiler)
    assert asked.read_text() == "--version\n"


def test_other_flags_or_sources_are_another_library(tmp_path, tiny_source):
    first = build_library(cache_dir=tmp_path / "cache")
    assert build_library(cache_dir=tmp_path / "cache", extra_flags=["-DOTHER"]) != first
    (tiny_source / "tiny.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 43; }\n'
    )
    second = build_library(cache_dir=tmp_path / "cache")
    assert second != first
    assert ctypes.CDLL(str(second)).answer() == 43


@pytest.mark.parametrize("damage", ["cut", "empty", "digest"])
def test_damaged_library_is_built_again(tmp_path, tiny_source, damage):
    path = build_library(cache_dir=tmp_path / "cache")
    if damage == "digest":
        path.with_suffix(".sha256").write_text("")
    else:
        path.write_bytes(path.read_bytes()[: 1000 if damage == "cut" else 0])
    assert ctypes.CDLL(str(build_library(cache_dir=tmp_path / "cache"))).answer() == 42


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelsUnavailable, match="there is no C\\+\\+ compiler"):
        build_library(cache_dir=tmp_path / "cache")


def test_compiler_that_fails_says_why(tmp_path):
    compiler = fake_compiler(tmp_path, "echo 'error: no cigar' >&2; exit 1")
    with pytest.raises(KernelsUnavailable, match="error: no cigar"):
        build_library(cache_dir=tmp_path / "cache", compiler=compiler)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_compiler_without_openmp_gives_one_thread(tmp_path, caplog):
    script = 'for a in "$@"; do [ "$a" = -fopenmp ] && exit 1; done; exec g++ -O1 "$@"'
    compiler = fake_compiler(tmp_path, script)
    kernels = Kernels(build_library(cache_dir=tmp_path / "cache", compiler=compiler, extra_flags=["-O1"]))
    torch.set_num_threads(2)
    check_arithmetic(kernels)
    assert "one thread" in caplog.text


def test_process_that_died_while_compiling_does_not_block_others(tmp_path, tiny_source):
    compiler = fake_compiler(tmp_path, 'case "$1" in --version) echo fake;; *) sleep 60;; esac')
    script = BUILD.replace('extra_flags=["-O1"]', f"compiler={compiler!r}")
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), str(tiny_source)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        deadline = time.monotonic() + HANG_LIMIT_S
        while not list((tmp_path / "cache").glob("build-*")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait(timeout=HANG_LIMIT_S)
        fake_compiler(tmp_path, 'case "$1" in --version) echo fake;; *) exec g++ -O1 "$@";; esac')
        path = build_library(cache_dir=tmp_path / "cache", compiler=compiler)
        assert path.exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its compiler is still there


def test_cache_that_others_can_write_to_is_refused(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="can be written by other users"):
        build_library(cache_dir=folder)


def test_new_cache_is_private(tmp_path, tiny_source):
    build_library(cache_dir=tmp_path / "a" / "b")
    assert stat.S_IMODE(os.stat(tmp_path / "a" / "b").st_mode) == 0o700


@pytest.mark.parametrize(
    ("flags", "arithmetic"),
    [
        pytest.param(["-DTANDEM_NO_AMX"], "avx512+bf16", marks=pytest.mark.slow),
        pytest.param(["-mno-avx512bf16", "-DTANDEM_NO_AMX"], "avx512", marks=pytest.mark.slow),
        (["-march=haswell"], "avx2"),
        (["-march=x86-64"], "portable"),
    ],
)
def test_other_instruction_sets_keep_the_promise(tmp_path, flags, arithmetic):
    """As far as this processor has them."""
    if arithmetic.startswith("avx512") and "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512 with bfloat16")
    kernels = Kernels(build_library(cache_dir=tmp_path, extra_flags=["-O1", *flags]))
    assert kernels.arithmetic.startswith(arithmetic + "/")
    check_arithmetic(kernels)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for head_dim in (20, 64):
            q, pool, batch, kept = make_case(CASES["mixed"], head_dim=head_dim, dtype=dtype)
            out = paged_attention(q, pool, layer=1, batch=batch, scale=SCALE, kernels=kernels)
            expected = expected_attention(q, batch, kept)
            torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_wrong_arithmetic_is_noticed(monkeypatch):
    kernels = library_module.load_kernels()

    class Wrong:
        pack = staticmethod(kernels.pack)

        @staticmethod
        def linear(linear, x, *, out_dtype):
            return kernels.linear(linear, x, out_dtype=out_dtype) + (0.5 if len(x) == 1 else 0)

    with pytest.raises(KernelsUnavailable, match="rows depend on each other"):
        check_arithmetic(Wrong())
