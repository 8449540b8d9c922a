"""What a benchmark leaves behind: its figures as JSON, its ratios in the history. One way for all of them.

    {"benchmark": "engine", "date": …, "commit": …, "machine": {…}, "ratios": {"decode 1": {"value": 2.4, …}},
     "figures": …}

Ratios are what two measurements in turn on one machine gave, and the only thing that is compared between runs; figures
are whatever the benchmark wants to keep. The history has a line for each run, without the figures.
"""

import argparse
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).with_name("results") / "history.jsonl"


@dataclass(frozen=True)
class Ratio:
    """A figure that travels between machines, what is wanted of it, and which direction is better."""

    value: float
    aim: float | None = None
    lower_is_better: bool = False

    @property
    def is_reached(self) -> bool:
        """Whether it is as good as wanted."""
        if self.aim is None:
            return True
        return self.value <= self.aim if self.lower_is_better else self.value >= self.aim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the benchmarks of `make bench`, and of some others."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--history",
        type=Path,
        metavar="FILE",
        nargs="?",
        const=HISTORY,
        help=f"also append the ratios to this file (default: benchmarks/results/{HISTORY.name})",
    )


def leave(
    arguments: argparse.Namespace, benchmark: str, figures: Mapping[str, Any], ratios: Mapping[str, Ratio]
) -> None:
    """Writes what the flags ask for. Ratios that are no number are left out of the history."""
    run = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "ratios": {name: asdict(ratio) for name, ratio in ratios.items() if math.isfinite(ratio.value)},
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**run, "figures": figures}, indent=2) + "\n")
    if arguments.history is not None:
        with arguments.history.open("a") as file:
            file.write(json.dumps(run) + "\n")


def machine() -> dict[str, Any]:
    """The kind of machine that this is; runs on the same kind are compared."""
    return {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "arch": platform.machine()}


def commit() -> str:
    """Which sources were measured, `-dirty` where they are not as committed; empty outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu_model() -> str:
    """As the kernel names it, with what distinguishes those that have the same name."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    name = facts.get("model name") or platform.processor() or "unknown"
    family = "/".join(facts[key] for key in ("cpu family", "model", "stepping") if key in facts)
    return f"{name} ({family})" if family else name
