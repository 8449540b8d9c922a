"""Weights that several processes map give the same answers, are read once, and nobody depends on their being shared."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.model import Model, load_model
from services.engine.weights import shared as shared_weights
from services.engine.weights.checkpoint import Checkpoint
from services.engine.weights.shared import HostMemory
from services.engine.weights.sharing import Piece, Sharing
from services.runtime.errors import ModelError
from tests.services.engine.weights.test_sharing import await_heir

CHILD = """
import sys
from services.engine.model import load_model
model = load_model(sys.argv[1], device=sys.argv[2], shares_weights=True)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Model]]:
    """Loads as workers do; closed in the end."""
    models = []

    def load_one(folder: Path, **settings: Any) -> Model:
        models.append(load_model(folder, device="cpu", shares_weights=True, **settings))
        return models[-1]

    yield load_one
    for model in models:
        model.close()


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on nobody reads a tensor from a file."""

    def forbid() -> None:
        def read(*args: Any, **settings: Any) -> torch.Tensor:
            raise AssertionError("a tensor is read")

        monkeypatch.setattr(Checkpoint, "tensor", read)

    return forbid


def name_of(model: Model) -> str:
    sharing = model._sharing
    assert sharing is not None
    return sharing._address[1:].decode()


@pytest.mark.parametrize("use_kernels", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama3-gqa-tied", "float32"),
        ("qwen3-tied-bias", "bfloat16"),
        ("qwen3-qk-norm", "float32"),
        ("llama-mha", "bfloat16"),
    ],
)
def test_mapped_weights_are_those_that_were_read(
    checkpoint: Callable[..., Path],
    random_ids: Callable[..., list[int]],
    paged_run: type,
    load: Callable[..., Model],
    no_reading: Callable[[], None],
    name: str,
    dtype: str,
    use_kernels: bool,
) -> None:
    folder = checkpoint(name)
    own = load_model(folder, device="cpu", dtype=dtype, use_kernels=use_kernels)
    first = load(folder, dtype=dtype, use_kernels=use_kernels)
    no_reading()
    second = load(folder, dtype=dtype, use_kernels=use_kernels)
    assert first.fingerprint == second.fingerprint == own.fingerprint
    ids = random_ids(13)
    expected, *others = (paged_run(model).step({0: ids})[0] for model in (own, first, second))
    for other in others:
        assert torch.equal(other, expected)


def test_what_differs_is_not_shared(
    checkpoint: Callable[..., Path], load: Callable[..., Model], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama-mha"), folder)
    names = [name_of(load(folder)), name_of(load(folder, dtype="bfloat16"))]
    names.append(name_of(load(folder, use_kernels=False)))
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns + 1))
    names.append(name_of(load(folder)))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    names.append(name_of(load(copy)))
    assert len(set(names)) == 5
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert name_of(load(link)) == names[3]


def test_files_that_change_on_the_way_are_not_shared(
    checkpoint: Callable[..., Path],
    load: Callable[..., Model],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While they are opened, and while they are read: the name would say that they are the new ones."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama-mha"), folder)
    expected = load_model(folder, device="cpu").fingerprint
    open_files, read = Checkpoint.__init__, Checkpoint.digest

    def replace() -> None:
        shutil.copy(folder / "model.safetensors", tmp_path / "new")
        (tmp_path / "new").replace(folder / "model.safetensors")

    for method, original in (("__init__", open_files), ("digest", read)):

        def change(self: Checkpoint, *args: Any, original: Callable[..., Any] = original) -> Any:
            result = original(self, *args)
            replace()
            return result

        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(Checkpoint, method, change)
            assert load(folder).fingerprint == expected
        assert "have changed while" in caplog.text
        caplog.clear()
    # Those who come then agree on a name that nobody has.
    assert load(folder).fingerprint == expected
    assert not caplog.text


def test_files_that_lead_nowhere_are_no_obstacle(
    checkpoint: Callable[..., Path], load: Callable[..., Model], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama-mha"), folder)
    (folder / "more.json").symlink_to(tmp_path / "nowhere")
    with caplog.at_level(logging.INFO):
        assert load(folder).fingerprint == load(folder).fingerprint
    assert "nothing was read" in caplog.text


def test_the_next_process_goes_on_sharing_where_the_first_is_killed(
    checkpoint: Callable[..., Path],
    random_ids: Callable[..., list[int]],
    paged_run: type,
    load: Callable[..., Model],
    no_reading: Callable[[], None],
) -> None:
    folder = checkpoint("llama3-gqa-tied")
    own = load_model(folder, device="cpu")
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), "cpu"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    no_reading()
    second = load(folder)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    await_heir(name_of(second))
    third = load(folder)
    ids = random_ids(9)
    expected = paged_run(own).step({0: ids})[0]
    for model in (second, third):
        assert torch.equal(paged_run(model).step({0: ids})[0], expected)


def test_a_folder_that_cannot_be_loaded_is_an_error_for_each(
    checkpoint: Callable[..., Path], load: Callable[..., Model], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama-mha"), folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1000])
    for _ in range(2):
        with pytest.raises(ModelError):
            load(folder)


@pytest.mark.parametrize("fault", ["no memory", "half of it", "no name"])
def test_without_sharing_each_reads_its_own(
    checkpoint: Callable[..., Path],
    random_ids: Callable[..., list[int]],
    paged_run: type,
    load: Callable[..., Model],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    folder = checkpoint("llama3-gqa-tied")
    expected = paged_run(load_model(folder, device="cpu")).step({0: random_ids(9)})[0]
    before = set(os.listdir("/proc/self/fd"))
    make = os.memfd_create
    made = []

    def refuse(*args: Any) -> int:
        if fault == "no memory" or made:
            raise OSError("out of memory")
        made.append(make(*args))
        return made[-1]

    if fault == "no name":
        monkeypatch.setattr(shared_weights, "_name", lambda *args: "x" * 200)
    else:
        monkeypatch.setattr(os, "memfd_create", refuse)
    with caplog.at_level(logging.WARNING):
        models = [load(folder) for _ in range(2)]
        made.clear()
    assert caplog.text.count("are not shared") == 2
    for model in models:
        assert torch.equal(paged_run(model).step({0: random_ids(9)})[0], expected)
    # A mapping has a descriptor of its own: what had been moved before memory ran out is in use.
    assert len(set(os.listdir("/proc/self/fd")) - before) == (fault == "half of it")


@pytest.mark.parametrize("num_missing", [0, 1])
@pytest.mark.parametrize(
    "description",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"num_bytes": 4096, "digest": "", "values": [{"at": 0, "shape": [9], "dtype": "float32"}]}',
        b'{"num_bytes": 4096, "digest": "", "values": [{"at": 0, "shape": [9, -1], "dtype": "path"}]}',
        b'{"num_bytes": 1000000, "digest": "", "values": []}',
        b'{"num_bytes": 4096, "digest": "", "values": [{"linear": [3, 4], "weight": null, "bias": null}]}',
    ],
)
def test_what_nobody_should_offer_is_not_taken(
    checkpoint: Callable[..., Path],
    load: Callable[..., Model],
    caplog: pytest.LogCaptureFixture,
    description: bytes,
    num_missing: int,
) -> None:
    folder = checkpoint("llama-mha")
    probe = load(folder)
    name, num_pieces = name_of(probe), probe.config.num_layers + 1
    probe.close()
    liar = Sharing(name)
    assert liar.join() is None
    pieces = [Piece(description, HostMemory().make(4096, lambda _: None)[1]) for _ in range(num_pieces - num_missing)]
    liar.offer(pieces)
    with caplog.at_level(logging.WARNING):
        assert load(folder).fingerprint == probe.fingerprint
    assert "are not shared" in caplog.text
    liar.close()


def test_memory_that_can_still_be_written_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(OSError, match="not sealed"):
        HostMemory().map(fd, 4096)
    os.close(fd)


def test_what_is_shared_can_be_written_by_nobody() -> None:
    def fill(target: torch.Tensor) -> None:
        target.fill_(7)

    data, fd = HostMemory().make(5000, fill)
    assert data.tolist() == [7] * 5000
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 10)
    os.close(fd)


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set())])
def test_lists_of_the_kernel(text: str, numbers: set[int]) -> None:
    assert shared_weights._numbers(text) == numbers
