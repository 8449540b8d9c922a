"""What a look at a machine or a deployment finds: its severity, its subject, and what to do about it."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding. Only `bad` ones make the exit code 1."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation of a subject, and what to do about it; `advice` is empty where nothing needs doing."""

    level: Level
    subject: str
    what: str
    advice: str = ""


def size_text(num_bytes: float) -> str:
    """Returns a number of bytes for people, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
