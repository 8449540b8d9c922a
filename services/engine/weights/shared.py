"""One copy of a model's weights for all processes of a host that serve the same files.

A prefill and a decode worker of one machine, or of one GPU, compute with the same weights. The first reads the
files and lays the weights out as it computes with them (packed, on a CPU) in memory that it hands to the others, a
piece for each layer and one for the rest (`services.engine.weights.sharing` says how they meet). These start without
reading or packing anything, and the host, its caches and a GPU hold the weights once.

Whatever fails, a process reads its own: nothing but memory and time depends on sharing. What must not happen:

- *Weights of other files, or laid out otherwise.* The name under which they meet is a digest of where the files are, of
  their sizes, times and inodes, of the dtype and what computes, of the device, and of the code that lays out. Files
  that change while they are opened or read are not shared. The digest of what was read travels with the weights, and
  workers compare it before they exchange pages.
- *Weights that change.* Memory of the host is sealed before it is handed on, and refused where it is not; a GPU's
  cannot be, and nothing of ours writes to it.
- *Cores that reach across sockets for their weights.* Processes share what lies on the same memory nodes.

Ranks of one worker do not share: each has a part of its own.
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
    """Where shared weights lie. Both raise OSError; what they return lives as long as its last tensor."""

    def make(self, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> tuple[torch.Tensor, int]:
        """Has new memory, uint8 [num_bytes], filled; returns it, and a descriptor that the caller closes."""
        ...

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        """Returns what another process made; the caller closes the descriptor."""
        ...

    def tidy(self) -> None:
        """Gives back what the allocator keeps of tensors that were moved."""
        ...


class HostMemory:
    """Memory of the host, which nobody can write to once it is filled."""

    def make(self, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> tuple[torch.Tensor, int]:
        """See Memory."""
        fd = os.memfd_create("tandem-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)  # what is not there is an error now, not the process's end later
            fill(torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8))
            # Fails where the memory is still mapped for writing.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
            return self.map(fd, num_bytes), fd
        except BaseException:
            os.close(fd)
            raise

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        """See Memory."""
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise OSError("the memory is not sealed")
        # Private, but never written to: the same memory. Older kernels map nothing sealed as shared.
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(memory, dtype=torch.uint8)

    def tidy(self) -> None:
        """See Memory."""
        with contextlib.suppress(AttributeError):  # of glibc only
            ctypes.CDLL(None).malloc_trim(0)


class GpuMemory:
    """Memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        from services.engine.weights.mapped import CudaMemory

        self._device = device
        self._memory = CudaMemory(torch.cuda.current_device() if device.index is None else device.index)

    def make(self, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> tuple[torch.Tensor, int]:
        """See Memory."""
        memory, fd = self._memory.make(num_bytes)
        try:
            fill(memory)
            torch.cuda.synchronize(self._device)
        except BaseException:
            os.close(fd)
            raise
        return memory, fd

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        """See Memory."""
        return self._memory.map(fd, num_bytes)

    def tidy(self) -> None:
        """See Memory."""
        torch.cuda.empty_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights, the digest of what was read of the checkpoint, and what has to be closed when they are not served."""

    weights: ModelWeights
    digest: str
    sharing: Sharing | None = None


class Files(NamedTuple):
    """Which files a folder has now, and when each was changed."""

    facts: tuple[tuple[str, int, int, int, int], ...]

    @classmethod
    def of(cls, folder: Path) -> Files:
        """Raises OSError for a folder that cannot be read."""
        found = []
        for path in sorted(folder.resolve().iterdir()):
            if path.suffix in (".json", ".safetensors") and path.exists():
                facts = path.stat()
                found.append((str(path), facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        return cls(tuple(found))


def load_shared_weights(
    config: ModelConfig, checkpoint: Checkpoint, placement: WeightPlacement, *, arithmetic: str, files: Files
) -> LoadedWeights:
    """Loads the weights, or maps those that another process of this user has loaded.

    `files` are those of before anything of the checkpoint was opened. Raises ModelError as `load_weights` does.
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
    """Moves one group after the other; what cannot be moved stays where it is. Raises OSError and RuntimeError."""
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
    """Returns the values of each layer in the order of its fields, and the rest; nothing else holds them afterwards."""
    rest = [_parts(weights.embedding), _parts(weights.final_norm), _parts(weights.lm_head)]
    fields = [field.name for field in dataclasses.fields(LayerWeights)]
    return [[_parts(getattr(layer, name)) for name in fields] for layer in weights.layers] + [rest]


def _parts(value: torch.Tensor | Linear | None) -> Value:
    return value if value is None or isinstance(value, torch.Tensor) else value.parts


def _join(groups: Sequence[Sequence[Value]], placement: WeightPlacement) -> ModelWeights:
    """Returns the weights of `_take_apart`."""

    def whole(value: Value) -> Any:
        return placement.linear_of(value) if isinstance(value, LinearParts) else value

    *layers, (embedding, final_norm, lm_head) = ([*map(whole, group)] for group in groups)
    return ModelWeights(embedding, tuple(LayerWeights(*layer) for layer in layers), final_norm, lm_head)


def _move(group: Sequence[Value], memory: Memory, digest: str) -> tuple[list[Value], Piece]:
    """Copies the values to shared memory; returns them there, and what others need to find them."""
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
    """Returns what another process has moved. Raises OSError, or ValueError for what is not ours."""
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
    """Under which all processes meet whose weights would be the same bytes in the same place."""
    code = [(_HERE / name).read_bytes() for name in _LAYOUT_SOURCES]
    parts = (code, torch.__version__, os.getuid(), arithmetic, placement.dtype, _device_key(placement.device), files)
    return f"tandem-weights-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def _device_key(device: torch.device) -> str:
    """Returns the GPU, or the memory nodes of the processor cores that this process may use."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    cores = os.sched_getaffinity(0)
    nodes = [path.name for path in _NODES.glob("node[0-9]*") if cores & _numbers((path / "cpulist").read_text())]
    return ",".join(sorted(nodes))


def _numbers(text: str) -> set[int]:
    """Returns the numbers of a list as the kernel writes it: 0-3,8."""
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
