"""How large a checkpoint's weights are on disk, and how long a start that reads them may take."""

from pathlib import Path

START_BASE_S = 120.0
"""A start without weights on a slow machine: imports, compiling the kernels of a processor for the first time."""
SLOW_READ_BYTES_PER_S = 100e6
"""A network volume that is slow and not broken."""
LOADING = "loading weights"
"""The message of the log's lines that say how far a worker's weights are read."""


def weight_bytes(folder: Path) -> int:
    """Returns the bytes of all safetensors files in a checkpoint folder; 0 where it has none."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def start_budget_s(num_bytes: int) -> float:
    """Returns the seconds after which a worker with this much to read is no longer loading, but stuck."""
    return START_BASE_S + num_bytes / SLOW_READ_BYTES_PER_S
