"""Shares one copy of a model's weights between all processes of a host that serve the same files.

A prefill worker and a decode worker on one machine or one GPU compute with the same weights. The first process reads
the files and writes the weights to shared memory in the layout that it computes with (packed, on a CPU): a piece for
each layer, and one for the rest. `services.engine.weights.sharing` connects the processes. The other processes start
without reading or packing weights, and the host, its page cache, and a GPU store the weights once.

If sharing fails, a process loads its own copy. Sharing only affects memory and load time. It prevents these errors:

- *Wrong weights or a wrong layout.* The name that connects processes is a digest of the files' paths, sizes, times, and
  inodes, the dtype, the kernels, the device, and the code that creates the layout. Files that change while they are
  opened or read are not shared. The digest of the weights is sent with them, and workers compare it before they
  exchange pages.
- *Weights that change.* Host memory is sealed before it is shared, and unsealed memory is rejected. GPU memory cannot
  be sealed, but our code never writes to it.
- *Access to weights on another socket.* Only processes that run on the same memory nodes share weights.

Ranks of one worker do not share weights, because each rank has a different part.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import json
import logging
import mmap
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from services.engine.weights.checkpoint import Checkpoint
from services.engine.weights.config import ModelConfig
from services.engine.weights.linear import Linear, LinearParts
from services.engine.weights.load import LayerWeights, ModelWeights, WeightPlacement, load_weights
from services.engine.weights.sharing import Piece, Sharing

_ALIGNMENT_BYTES = 256
_HERE = Path(__file__).parent
_LAYOUT_SOURCES = ("shared.py", "sharing.py", "load.py", "linear.py")
_NODES = Path("/sys/devices/system/node")
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")

logger = logging.getLogger(__name__)

Value = torch.Tensor | LinearParts | None


class Memory(Protocol):
    """Memory for shared weights. Both allocating methods raise OSError. Memory lives as long as its last tensor."""

    def make(self, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> tuple[torch.Tensor, int]:
        """Allocates memory, uint8 [num_bytes], and calls `fill`.

        Returns it with a descriptor that the caller closes.
        """
        ...

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        """Maps memory of another process. The caller closes the descriptor."""
        ...

    def tidy(self) -> None:
        """Releases memory that the allocator retains after tensors were moved."""
        ...


class HostMemory:
    """Host memory that is read-only for all processes once it is filled."""

    def make(self, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> tuple[torch.Tensor, int]:
        """Implements Memory."""
        fd = os.memfd_create("tandem-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)  # raises if memory is unavailable, instead of a crash later
            fill(torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8))
            # Fails if the memory is still mapped for writing.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
            return self.map(fd, num_bytes), fd
        except BaseException:
            os.close(fd)
            raise

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        """Implements Memory."""
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise OSError("the memory is not sealed")
        # A private mapping that is never written to uses the same memory. Older kernels reject shared mappings of
        # sealed memory.
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(memory, dtype=torch.uint8)

    def tidy(self) -> None:
        """Implements Memory."""
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)


class GpuMemory:
    """Shared memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        from services.engine.weights.mapped import CudaMemory

        self._device = device
        self._memory = CudaMemory(torch.cuda.current_device() if device.index is None else device.index)

    def make(self, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> tuple[torch.Tensor, int]:
        """Implements Memory."""
        memory, fd = self._memory.make(num_bytes)
        try:
            fill(memory)
            torch.cuda.synchronize(self._device)
        except BaseException:
            os.close(fd)
            raise
        return memory, fd

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        """Implements Memory."""
        return self._memory.map(fd, num_bytes)

    def tidy(self) -> None:
        """Implements Memory."""
        torch.cuda.empty_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Loaded weights, the digest of the checkpoint data that was read, and the object to close once they are unused."""

    weights: ModelWeights
    digest: str
    sharing: Sharing | None = None


class Files(NamedTuple):
    """The files of a directory, with their inodes, sizes, and modification times."""

    facts: tuple[tuple[str, int, int, int, int], ...]

    @classmethod
    def of(cls, folder: Path) -> Files:
        """Returns the current files. Raises OSError if the directory cannot be read."""
        found = []
        for path in sorted(folder.resolve().iterdir()):
            if path.suffix in (".json", ".safetensors") and path.exists():
                facts = path.stat()
                found.append((str(path), facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        return cls(tuple(found))


def load_shared_weights(
    config: ModelConfig, checkpoint: Checkpoint, placement: WeightPlacement, *, arithmetic: str, files: Files
) -> LoadedWeights:
    """Loads the weights, or maps the weights that another process of this user has loaded.

    `files` must be read before any file of the checkpoint is opened. Raises ModelError like `load_weights`.
    """
    sharing = None
    try:
        if Files.of(checkpoint.folder) != files:
            raise OSError("the files have changed while they were opened")
        memory = HostMemory() if placement.device.type == "cpu" else GpuMemory(placement.device)
        sharing = Sharing(_name(files, placement, arithmetic))
        pieces = sharing.join()
        if pieces is not None:
            weights, digest = _put_together(pieces, memory, placement, num_layers=config.num_layers)
            logger.info("the model's weights are those of another process: nothing was read")
            return LoadedWeights(weights, digest, sharing)
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning("the model's weights are not shared: %s", error)
        if sharing is not None:
            sharing.close()
        return LoadedWeights(load_weights(config, checkpoint, placement), checkpoint.digest())
    try:
        groups = _take_apart(load_weights(config, checkpoint, placement))
        digest = checkpoint.digest()
        try:
            found = _move_all(groups, memory, digest)
            if Files.of(checkpoint.folder) != files:
                _close(found)
                raise OSError("the files have changed while they were read")
            sharing.offer(found)
        except (OSError, RuntimeError) as error:
            logger.warning("the model's weights are not shared: %s", error)
            sharing.close()
        return LoadedWeights(_join(groups, placement), digest, sharing)
    except BaseException:
        sharing.close()
        raise


def _move_all(groups: list[list[Value]], memory: Memory, digest: str) -> list[Piece]:
    """Moves the groups one by one. On an error, the remaining groups stay in place. Raises OSError and RuntimeError."""
    pieces: list[Piece] = []
    try:
        for place in range(len(groups)):
            groups[place], piece = _move(groups[place], memory, digest)
            pieces.append(piece)
            memory.tidy()
    except BaseException:
        _close(pieces)
        raise
    return pieces


def _close(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        os.close(piece.fd)


def _take_apart(weights: ModelWeights) -> list[list[Value]]:
    """Returns the values of each layer in field order, and then the other values. No other references remain."""
    rest = [_parts(weights.embedding), _parts(weights.final_norm), _parts(weights.lm_head)]
    fields = [field.name for field in dataclasses.fields(LayerWeights)]
    return [[_parts(getattr(layer, name)) for name in fields] for layer in weights.layers] + [rest]


def _parts(value: torch.Tensor | Linear | None) -> Value:
    return value if value is None or isinstance(value, torch.Tensor) else value.parts


def _join(groups: Sequence[Sequence[Value]], placement: WeightPlacement) -> ModelWeights:
    """Rebuilds the weights from the result of `_take_apart`."""

    def whole(value: Value) -> Any:
        return placement.linear_of(value) if isinstance(value, LinearParts) else value

    *layers, (embedding, final_norm, lm_head) = ([*map(whole, group)] for group in groups)
    return ModelWeights(embedding, tuple(LayerWeights(*layer) for layer in layers), final_norm, lm_head)


def _move(group: Sequence[Value], memory: Memory, digest: str) -> tuple[list[Value], Piece]:
    """Copies values to shared memory. Returns the values there, and the piece that lets other processes map them."""
    tensors: dict[tuple[int, torch.Size], torch.Tensor] = {}
    offsets: dict[tuple[int, torch.Size], int] = {}
    num_bytes = 0

    def place(tensor: torch.Tensor | None) -> dict[str, Any] | None:
        nonlocal num_bytes
        if tensor is None:
            return None
        # A head that is tied to the embedding is the same tensor.
        key = tensor.data_ptr(), tensor.shape
        if key not in tensors:
            tensors[key], offsets[key] = tensor, num_bytes
            num_bytes += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return {"at": offsets[key], "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}

    values: list[dict[str, Any] | None] = []
    for value in group:
        if isinstance(value, LinearParts):
            shape = [value.out_features, value.in_features]
            values.append({"linear": shape, "weight": place(value.weight), "bias": place(value.bias)})
        else:
            values.append(place(value))

    def fill(target: torch.Tensor) -> None:
        for key, tensor in tensors.items():
            at = offsets[key]
            target[at : at + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))

    described = {"num_bytes": num_bytes, "values": values, "digest": digest}
    data, fd = memory.make(num_bytes, fill)
    return _values(described, data), Piece(json.dumps(described).encode(), fd)


def _put_together(
    pieces: Sequence[Piece], memory: Memory, placement: WeightPlacement, *, num_layers: int
) -> tuple[ModelWeights, str]:
    """Returns weights that another process has moved. Raises OSError, or ValueError for an invalid description."""
    if len(pieces) != num_layers + 1:
        raise ValueError(f"another process has {len(pieces)} pieces for {num_layers} layers and the rest")
    groups, digest = [], ""
    try:
        for piece in pieces:
            described = json.loads(piece.description)
            groups.append(_values(described, memory.map(piece.fd, described["num_bytes"])))
            digest = described["digest"]
        return _join(groups, placement), digest
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"another process described them as nobody should: {error!r}") from error


def _values(described: dict[str, Any], data: torch.Tensor) -> list[Value]:
    def tensor(said: dict[str, Any] | None) -> torch.Tensor | None:
        if said is None:
            return None
        dtype: torch.dtype = getattr(torch, said["dtype"])
        shape = torch.Size(said["shape"])
        return data[said["at"] : said["at"] + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def value(said: dict[str, Any] | None) -> Value:
        if said is None or "linear" not in said:
            return tensor(said)
        (out_features, in_features), weight = said["linear"], tensor(said["weight"])
        if weight is None:
            raise ValueError("another process has a layer without a weight")
        return LinearParts(out_features, in_features, weight, tensor(said["bias"]))

    return [*map(value, described["values"])]


def _name(files: Files, placement: WeightPlacement, arithmetic: str) -> str:
    """Returns the name that is equal for all processes whose weights would be the same bytes on the same device."""
    code = [(_HERE / name).read_bytes() for name in _LAYOUT_SOURCES]
    parts = (code, torch.__version__, os.getuid(), arithmetic, placement.dtype, _device_key(placement.device), files)
    return f"tandem-weights-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def _device_key(device: torch.device) -> str:
    """Returns the GPU's UUID, or the memory nodes of the CPU cores that this process may use."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    cores = os.sched_getaffinity(0)
    nodes = [path.name for path in _NODES.glob("node[0-9]*") if cores & _numbers((path / "cpulist").read_text())]
    return ",".join(sorted(nodes))


def _numbers(text: str) -> set[int]:
    """Parses a list in the kernel's format, for example 0-3,8."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _seals() -> int:
    seals = 0
    for name in _SEALS:
        seals |= getattr(fcntl, name)
    return seals
