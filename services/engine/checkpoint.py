"""Reads tensors out of a folder's safetensors files; knows no architecture and never unpickles anything."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from services.engine.config import check_folder
from services.runtime.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# xxhash holds the interpreter lock while it runs: pieces of this size keep other threads alive (0.5 ms each).
HASH_PIECE_BYTES = 16 << 20

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The tensors of one checkpoint folder, read through a memory map.

    Every tensor that is read enters the digest, so that `digest()` after loading names exactly the weights in use,
    however they are split into files.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.folder = Path(model_dir)
        check_folder(self.folder)
        self._files: dict[str, Any] = {}
        self._file_of = self._map_tensors()
        self._tensor_digests: dict[str, bytes] = {}

    def names(self) -> frozenset[str]:
        """All tensor names in the folder."""
        return frozenset(self._file_of)

    def tensor(self, name: str, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` of exactly `shape`, converted to `dtype`, on the CPU.

        Raises ModelError where it is missing, has another shape or is not a floating-point tensor.
        """
        if name not in self._file_of:
            raise ModelError(
                f"the checkpoint {self.folder} has no tensor {name}: it is incomplete or its config.json belongs to "
                "another model, download it again"
            )
        stored = self._read(name)
        if tuple(stored.shape) != tuple(shape):
            raise ModelError(
                f"the tensor {name} has the shape {list(stored.shape)} and config.json means {list(shape)}: "
                "the weights and config.json belong to different models"
            )
        if stored.dtype not in _FLOAT_TYPES:
            raise ModelError(
                f"the tensor {name} holds {str(stored.dtype).removeprefix('torch.')} values: use a checkpoint that is "
                "not quantised, in float32, bfloat16 or float16"
            )
        self._tensor_digests[name] = _digest_tensor(name, stored)
        return stored.to(dtype)

    def digest(self) -> str:
        """128 bits, in hex, over name, dtype, shape and bytes of every tensor that was read."""
        digest = xxhash.xxh3_128()
        for name in sorted(self._tensor_digests):
            digest.update(self._tensor_digests[name])
        return str(digest.hexdigest())

    def close(self) -> None:
        """Drops the memory maps; tensors that were read stay valid."""
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
            # A name with a folder in it could point anywhere on this machine.
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

    def _read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"the tensor {name} cannot be read ({error}): download the checkpoint again") from error
        return tensor


def _why_unreadable(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights"
    return "is not a complete safetensors file"


def _digest_tensor(name: str, tensor: torch.Tensor) -> bytes:
    digest = xxhash.xxh3_128(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    content = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    for start in range(0, len(content), HASH_PIECE_BYTES):
        digest.update(content[start : start + HASH_PIECE_BYTES])
    return bytes(digest.digest())
