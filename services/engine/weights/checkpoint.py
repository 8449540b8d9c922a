"""Reads tensors from the safetensors files of a directory. Independent of the architecture. Never unpickles."""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from services.engine.weights.config import check_folder
from services.runtime.errors import ModelError
from services.runtime.model_size import LOADING, weight_bytes

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_FLOAT_TYPES = ("F32", "BF16", "F16")
_SUM_BYTES = 16
TELL_EVERY_S = 5.0
"""Time between two progress log lines, in seconds."""

logger = logging.getLogger(__name__)


class Checkpoint:
    """The tensors of one checkpoint directory, read on demand through a memory map.

    Every row that is read is included in the digest. After loading, `digest()` therefore identifies exactly the weights
    in use, however they are split into files, and however the reads are split among processes.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.folder = Path(model_dir)
        check_folder(self.folder)
        self._files: dict[str, Any] = {}
        self._file_of = self._map_tensors()
        self._sums: dict[str, int] = {}
        self._num_read_bytes = 0
        self._began_s = self._told_s = time.monotonic()

    def names(self) -> frozenset[str]:
        """Returns all tensor names in the folder."""
        return frozenset(self._file_of)

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        rows: range | None = None,
        is_counted: bool = True,
    ) -> torch.Tensor:
        """Returns the tensor `name` on the CPU, or `rows` of its first axis, converted to `dtype`. Checks `shape`.

        Exactly one reader must count each row. Set `is_counted` to false for rows that other readers count. A tensor
        with one axis counts as a single row, for any part of it.

        Raises ModelError if the tensor is missing, has another shape, or has no floating-point dtype.
        """
        if name not in self._file_of:
            raise ModelError(
                f"the checkpoint {self.folder} has no tensor {name}: it is incomplete or its config.json belongs to "
                "another model, download it again"
            )
        rows = range(shape[0]) if rows is None else rows
        try:
            stored = self._open(self._file_of[name]).get_slice(name)
            self._check(name, stored, shape)
            is_vector = len(shape) == 1
            part: torch.Tensor = stored[:] if is_vector else stored[rows.start : rows.stop]
        except SafetensorError as error:
            raise ModelError(f"the tensor {name} cannot be read ({error}): download the checkpoint again") from error
        self._note_read(part.nbytes)
        if is_counted:
            first_row = 0 if is_vector else rows.start
            header = f"{name} {part.dtype} {list(shape)}\n" if first_row == 0 else ""
            self._count(name, header, part.view(1, -1) if is_vector else part, first_row)
        return (part[rows.start : rows.stop] if is_vector else part).to(dtype)

    def row_sums(self) -> dict[str, int]:
        """Returns, for each tensor, the sum over the hashes of its counted rows and, with row 0, of its header."""
        return dict(self._sums)

    def digest(self, others: Iterable[Mapping[str, int]] = ()) -> str:
        """Returns 128 bits, in hex, over name, dtype, shape, and bytes of all tensors read here or by `others`."""
        totals = dict(self._sums)
        for sums in others:
            for name, value in sums.items():
                totals[name] = (totals.get(name, 0) + value) % 2 ** (8 * _SUM_BYTES)
        digest = xxhash.xxh3_128()
        for name in sorted(totals):
            digest.update(f"{name} {totals[name]:x}\n".encode())
        return str(digest.hexdigest())

    def close(self) -> None:
        """Closes the memory maps. Tensors that were read stay valid."""
        self._files.clear()

    def _map_tensors(self) -> dict[str, str]:
        if (self.folder / INDEX_NAME).exists():
            return self._map_by_index()
        found = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if SINGLE_NAME not in found and len(found) > 1:
            raise ModelError(
                f"the model folder {self.folder} has {len(found)} safetensors files and no {INDEX_NAME}: "
                "download the checkpoint again"
            )
        name = SINGLE_NAME if SINGLE_NAME in found else found[0]
        return dict.fromkeys(self._open(name).keys(), name)

    def _map_by_index(self) -> dict[str, str]:
        path = self.folder / INDEX_NAME
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            file_of = {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} is not a safetensors index: download the checkpoint again") from error
        for file in sorted(set(file_of.values())):
            # A name with a directory could refer to any file on this machine.
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ModelError(f"{path} names the file {file!r}, which is not a safetensors file of this folder")
            if not (self.folder / file).is_file():
                raise ModelError(f"the model folder {self.folder} lacks {file}: download the checkpoint again")
            missing = {tensor for tensor, where in file_of.items() if where == file} - set(self._open(file).keys())
            if missing:
                raise ModelError(f"{file} lacks the tensor {min(missing)}: download the checkpoint again")
        return file_of

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            try:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} {_why_unreadable(path)}: download the checkpoint again") from error
        return self._files[file]

    def _check(self, name: str, stored: Any, shape: Sequence[int]) -> None:
        if tuple(stored.get_shape()) != tuple(shape):
            raise ModelError(
                f"the tensor {name} has the shape {list(stored.get_shape())} and config.json means {list(shape)}: "
                "the weights and config.json belong to different models"
            )
        if stored.get_dtype() not in _FLOAT_TYPES:
            raise ModelError(
                f"the tensor {name} holds {str(stored[:].dtype).removeprefix('torch.')} values: use a checkpoint that "
                "is not quantised, in float32, bfloat16 or float16"
            )

    def _note_read(self, num_bytes: int) -> None:
        """Adds `num_bytes` to the bytes read, and periodically logs the progress."""
        self._num_read_bytes += num_bytes
        now_s = time.monotonic()
        if now_s - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now_s
        size_bytes = weight_bytes(self.folder)
        left_s = (now_s - self._began_s) * max(0, size_bytes - self._num_read_bytes) / self._num_read_bytes
        told = {"read_bytes": self._num_read_bytes, "of_bytes": size_bytes, "left_s": round(left_s)}
        logger.info(LOADING, extra=told)

    def _count(self, name: str, header: str, rows: torch.Tensor, first_row: int) -> None:
        """Adds the hashes of rows [n, K], each seeded with its row number, so that sums of several readers add up."""
        total = self._sums.get(name, 0) + (xxhash.xxh3_128_intdigest(header.encode()) if header else 0)
        # Hash one row at a time, because xxhash holds the GIL while it runs.
        content = memoryview(rows.contiguous().view(torch.uint8).numpy().data).cast("B")
        width = rows.shape[1] * rows.element_size()
        for index in range(rows.shape[0]):
            row = content[index * width : (index + 1) * width]
            total += xxhash.xxh3_128_intdigest(row, seed=first_row + index)
        self._sums[name] = total % 2 ** (8 * _SUM_BYTES)


def _why_unreadable(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights"
    return "is not a complete safetensors file"
