"""`tandem plan`: which workers a workload needs, what they cost, and where it becomes infeasible."""

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from cli.commands import CommandParser
from cli.regions import RegionSettings
from planning.planner import page
from planning.planner.question import (
    CATALOGUE,
    MAX_BATCH,
    NUM_PARAMETERS,
    Gpu,
    Kind,
    LatencyTargets,
    Question,
    Workload,
    kinds_for,
)
from planning.planner.search import answer
from planning.simulator.measured import Measured, read_measured
from planning.simulator.profiles import PROFILES_FOLDER, profiles
from planning.simulator.traces import read_trace
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import choice, comma_separated, folder, integer, number, path, text

INFEASIBLE = 1
TELL_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class PlanSettings(RegionSettings):
    """Finds the cheapest workers that keep targets. Exit code 1: no workers can, and it says why."""

    model: str = option(choice(*NUM_PARAMETERS), default="llama-3.1-70b", help="Model, by the names of step times.")
    gpus: tuple[str, ...] = option(comma_separated(choice(*CATALOGUE)), default=("h100",), help="Kinds of GPUs.")
    kinds: str = option(text(), default="", help="Takes only step times whose names begin so.")
    price: float | None = option(number(0), default=None, help="Dollars an hour of one GPU; else a round figure.")
    rate: float = option(number(1e-6), default=1.0, help="Requests per second.")
    input: int = option(integer(1), default=1000, help="Tokens of a prompt, without --lengths.")
    output: int = option(integer(1), default=200, help="Tokens of an answer, without --lengths.")
    lengths: Path | None = option(path(), default=None, help="A recorded workload to draw lengths from.")
    ttft: float | None = option(number(1e-6), default=None, help="Target: seconds to the first token.")
    tpot: float | None = option(number(1e-6), default=None, help="Target: seconds per later token.")
    e2e: float | None = option(number(1e-6), default=None, help="Target: seconds to the last token.")
    percentile: float = option(number(1, 100), default=99.0, help="Percentile at which targets are kept.")
    max_gpus: int = option(integer(1), default=100_000, help="The most GPUs.")
    redundancy: int = option(integer(0), default=0, help="Workers of each role that may be lost.")
    profiles: Path = option(folder(), default=PROFILES_FOLDER, help="Folder of the measured step times.")
    measured: Path | None = option(
        path(), default=None, help="A file that `tandem profile` wrote: workers of this kind only, with one GPU each."
    )
    json: Path | None = option(path(), default=None, help="Writes the answer to this file.")
    report: Path | None = option(path(), default=None, help="Writes a report with charts to this HTML file.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(PlanSettings, lambda settings: run(settings, sys.stdout))


def run(settings: PlanSettings, stdout: TextIO) -> int:
    """Plans, prints and writes. Returns the exit code."""
    asked = replace(question(settings), tell=_Progress())
    facts = page.facts(asked, answer(asked))
    print(page.text(facts), end="", file=stdout)
    if settings.json is not None:
        _write(settings.json, json.dumps(facts, indent=1, sort_keys=True) + "\n")
    if settings.report is not None:
        _write(settings.report, page.page(facts))
    return INFEASIBLE if facts["infeasible"] else 0


def question(settings: PlanSettings) -> Question:
    """Returns what is asked. Raises ConfigError."""
    if settings.ttft is settings.tpot is settings.e2e is None:
        raise ConfigError("a plan needs a target: give --ttft, --tpot or --e2e")
    catalogue = CATALOGUE
    if settings.price is not None:
        catalogue = {name: replace(gpu, price_per_h=settings.price) for name, gpu in CATALOGUE.items()}
    known = {name: one for name, one in profiles(settings.profiles).items() if name.startswith(settings.kinds)}
    lengths = [(settings.input, settings.output)]
    if settings.lengths is not None:
        trace = read_trace(settings.lengths, rate_per_s=settings.rate)
        lengths = [(one.num_prompt_tokens, one.num_output_tokens) for one in trace.requests]
    if settings.measured is None:
        kinds = kinds_for(settings.model, known, gpus=settings.gpus, catalogue=catalogue)
    else:
        kinds = [_kind(read_measured(settings.measured), catalogue[settings.gpus[0]])]
    return Question(
        Workload(settings.rate, lengths),
        LatencyTargets(settings.ttft, settings.tpot, settings.e2e, settings.percentile / 100),
        kinds,
        settings.max_gpus,
        settings.redundancy,
        settings.geography,
    )


class _Progress:
    """Says on stderr, now and then, what is being simulated: a plan may take minutes."""

    def __init__(self) -> None:
        self._last_s, self._num = time.monotonic(), 0

    def __call__(self, text: str) -> None:
        self._num += 1
        if (now_s := time.monotonic()) - self._last_s >= TELL_EVERY_S:
            self._last_s = now_s
            print(f"simulation {self._num}: {text}", file=sys.stderr)


def _kind(measured: Measured, gpu: Gpu) -> Kind:
    """Returns the kind of worker that was measured."""
    if measured.kv_tokens == 0:
        raise ConfigError(f"the step times of {measured.name} do not say how many tokens its pages hold")
    return Kind(
        measured.name,
        measured.profile,
        1,
        gpu.price_per_h,
        gpu.watts,
        measured.kv_tokens,
        measured.max_batch or MAX_BATCH,
    )


def _write(file: Path, content: str) -> None:
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror})") from None
