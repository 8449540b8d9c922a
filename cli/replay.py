"""`tandem replay`: a recorded workload through a simulated cluster, with the gateway's own policies."""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from cli.commands import CommandParser
from cli.regions import RegionSettings
from planning.simulator import html_report, report
from planning.simulator.block_cache import EVICTIONS, LRU_LEAF_FIRST, hit_rate
from planning.simulator.cluster import ClusterSpec, Run, simulate
from planning.simulator.faults import LOST_REGION, Fault, with_faults
from planning.simulator.jobs import CHUNKINGS, TANDEM, WorkerSpec
from planning.simulator.measured import read_measured
from planning.simulator.profiles import DEFAULT_LINK, PROFILES_FOLDER, Profile, linear_profile, profile
from planning.simulator.traces import Trace, compressed, read_trace
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import (
    Kind,
    argument,
    choice,
    comma_separated,
    flag,
    folder,
    integer,
    number,
    path,
    size_bytes,
    text,
)
from services.scheduling.disaggregation import DisaggregationSettings
from services.scheduling.overload import Targets
from services.scheduling.prediction import DecodeSpeed, LinkSpeed
from services.scheduling.regions import REGION
from services.scheduling.routing.policies import POLICY_NAMES
from services.scheduling.routing.price import RoutingSettings

LADDER = ("random", "least_loaded", "prefix_aware", "hybrid")
"""What `--policy all` means: from the one that looks at nothing to the one that looks at everything."""
DEFAULT_POLICY = "hybrid"
NUM_LONG = 5_000
"""Requests from which on a run says how far it is."""


def _tokens_or_auto() -> Kind[int | None]:
    whole = integer(0)

    def parse(value: str) -> int | None:
        return None if value == "auto" else whole.parse(value)

    return Kind(parse, "auto or a whole number of at least 0")


class Loss(NamedTuple):
    """A region whose workers are lost `at_s` seconds after the first request, for `duration_s`; 0: for good."""

    region: str
    at_s: float
    duration_s: float


def _loss() -> Kind[Loss]:
    def parse(value: str) -> Loss:
        match = re.fullmatch(rf"({REGION})@([0-9.]+)(?:\+([0-9.]+))?", value, re.ASCII)
        if match is None:
            raise ValueError(value)
        return Loss(match[1], float(match[2]), float(match[3] or 0.0))

    return Kind(parse, "REGION@SECONDS or REGION@SECONDS+SECONDS", metavar="REGION@SECONDS[+SECONDS]")


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(RegionSettings):
    """Replays TRACE through a simulated cluster. Exit code 2 for a bad trace or flag."""

    trace: Path = option(argument(path()), help="File of the recorded workload.")
    policy: tuple[str, ...] | None = option(
        comma_separated(choice(*POLICY_NAMES, "all")),
        default=None,
        help="Routing policies, several for a table; may be given more than once. all: "
        + ", ".join(LADDER)
        + f". Not given: {DEFAULT_POLICY}.",
    )
    prefill: int = option(integer(0, 4096), default=1, help="Prefill workers; 0: decode workers compute prompts.")
    decode: int = option(integer(1, 4096), default=1, help="Decode workers.")
    profile: str = option(text(), default="llama-3.1-8b", help="Measured step times. A wrong name lists all.")
    profiles: Path = option(folder(), default=PROFILES_FOLDER, help="Folder of the measured step times.")
    measured: Path | None = option(path(), default=None, help="A file that `tandem profile` wrote, in their place.")
    prefill_tokens_per_s: float | None = option(
        number(1e-3), default=None, help="A linear model instead of a profile: prompt tokens per second."
    )
    prefill_overhead_s: float = option(number(0), default=0.0, help="Linear model: seconds of every prefill step.")
    decode_step_s: float = option(number(0), default=0.01, help="Linear model: seconds of every decode step.")
    decode_sequence_s: float = option(number(0), default=0.0, help="Linear model: more for each sequence of a step.")
    decode_context_s: float = option(number(0), default=0.0, help="Linear model: more for each token looked back on.")
    kv_bytes_per_token: int | None = option(integer(0), default=None, help="What a transfer moves; else the profile's.")
    prefill_kv_tokens: int = option(integer(1), default=400_000, help="Tokens that a prefill worker's pages hold.")
    decode_kv_tokens: int = option(integer(1), default=400_000, help="Tokens that a decode worker's pages hold.")
    page_size: int = option(integer(1, 65536), default=16, help="Tokens of a page, where the trace has no blocks.")
    eviction: str = option(choice(*EVICTIONS), default=LRU_LEAF_FIRST, help="Which remembered block goes first.")
    chunk_tokens: int = option(integer(1), default=8192, help="Most prompt tokens of a prefill worker's step.")
    decode_chunk_tokens: int = option(integer(1), default=512, help="Most prompt tokens of a decode worker's step.")
    chunking: str = option(
        choice(*CHUNKINGS),
        default=TANDEM,
        help="Which tokens of prompts a step has: by the workers' own scheduler, as many as fit, or whole prompts.",
    )
    max_batch: int = option(integer(1), default=256, help="Most sequences of a decode step.")
    max_sequence_tokens: int = option(integer(2), default=262_144, help="Longest prompt and answer together.")
    link_bytes_per_s: int | None = option(
        size_bytes(), default=None, help="Bytes per second of a worker's link; what --measured says, or 25 GB."
    )
    link_latency_s: float | None = option(
        number(0), default=None, help="Seconds before the first byte; what --measured says, or 0.002."
    )
    local_prefill_tokens: int | None = option(
        _tokens_or_auto(), default=None, help="Uncached prompts up to this length stay on D; auto decides by price."
    )
    queue_strategy: str = option(choice("fcfs", "priority", "sla", "fair"), default="fcfs", help="Order of the queue.")
    max_queued_requests: int = option(integer(1), default=1024, help="Requests that may wait at the gateway.")
    max_queue_wait_s: float | None = option(number(0), default=None, help="Longest wait there; else without bound.")
    overload: bool = option(flag(), default=False, help="Refuses requests that would miss the targets.")
    slo_ttft: float = option(number(0), default=2.0, help="Target: seconds to the first token.")
    slo_tpot: float = option(number(0), default=0.1, help="Target: seconds per later token.")
    lose_region: tuple[Loss, ...] | None = option(
        comma_separated(_loss()),
        default=None,
        help="Regions whose workers all fall silent some seconds after the first request, and for how long, such as "
        "us@60+30; us@60: for good.",
    )
    limit: int | None = option(
        integer(1), default=None, help="Number of requests to replay, from the first on; all if not given."
    )
    speed: float = option(number(1e-6), default=1.0, help="Factor by which arrivals come faster than recorded.")
    rate: float | None = option(
        number(1e-6), default=None, help="Requests per second of Poisson arrivals, in place of the recorded ones."
    )
    seed: int = option(integer(0), default=0, help="Seed of the arrivals and of the router.")
    capacity_sweep: tuple[int, ...] | None = option(
        comma_separated(integer(0)),
        default=None,
        help="Hit rates of one prefix cache of these sizes in blocks, 0: any; nothing else unless --policy is given.",
    )
    json: Path | None = option(path(), default=None, help="Writes all numbers to this file.")
    report: Path | None = option(path(), default=None, help="Writes a report with charts to this HTML file.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(ReplaySettings, lambda settings: run(settings, sys.stdout, sys.stderr))


def run(settings: ReplaySettings, stdout: TextIO, stderr: TextIO) -> int:
    """Reads, simulates, prints and writes. Returns the exit code."""
    trace = read_trace(settings.trace, rate_per_s=settings.rate, seed=settings.seed)
    trace = compressed(trace, speed=settings.speed, limit=settings.limit)
    trace = settings.geography.placed(trace, seed=settings.seed)
    meddler = with_faults(_faults(settings))
    facts = report.trace_facts(trace)
    print(_headline(facts), file=stdout)
    hit_rates = _sweep(trace, settings.capacity_sweep) if settings.capacity_sweep else []
    if hit_rates:
        print("\n" + _sweep_table(hit_rates), end="", file=stdout)
    runs: list[Run] = []
    summaries: list[dict[str, Any]] = []
    if settings.capacity_sweep is None or settings.policy is not None:
        speeds = _profile(settings)
        spec = cluster_spec(settings, trace, speeds=speeds)
        for error in speeds.errors:
            print(f"{speeds.name}: {error}", file=stdout)
        targets = report.Targets(settings.slo_ttft, settings.slo_tpot)
        for policy in _policies(settings):
            progress = _Progress(policy, stderr) if len(trace.requests) >= NUM_LONG else None
            runs.append(simulate(trace, spec, policy, seed=settings.seed, progress=progress, meddler=meddler))
            summaries.append(report.summary(runs[-1], targets))
        is_mooncake = trace.format == "mooncake"
        print("\n" + report.ladder_table(summaries, with_paper=is_mooncake), file=stdout)
        if is_mooncake and len(summaries) >= len(LADDER):
            print(
                "PAPER ×: arXiv:2407.00079v4, figure 8; other requests of the same service, so compare the order.\n",
                file=stdout,
            )
        print("".join(report.details(one) for one in summaries), end="", file=stdout)
    parameters = _parameters(settings)
    if settings.json is not None:
        series = {run.policy: report.series(run) for run in runs}
        everything = {"trace": facts, "parameters": parameters, "runs": summaries, "hit_rates": hit_rates}
        _write(settings.json, json.dumps({**everything, "series": series}, indent=1, sort_keys=True) + "\n")
    if settings.report is not None:
        is_mooncake = trace.format == "mooncake"
        page = html_report.page(parameters, facts, runs, summaries, hit_rates, with_paper=is_mooncake)
        _write(settings.report, page)
    return 0


def cluster_spec(settings: ReplaySettings, trace: Trace, *, speeds: Profile) -> ClusterSpec:
    """The simulated cluster. Pages are the trace's blocks where it has any. Raises ConfigError."""
    page_size = trace.block_tokens or settings.page_size
    link = speeds.link or DEFAULT_LINK
    latency_s = link.latency_s if settings.link_latency_s is None else settings.link_latency_s
    bytes_per_s = settings.link_bytes_per_s or link.bytes_per_s
    workers = []
    for law, outside_s, kv_tokens, chunk_tokens in (
        (speeds.law, speeds.outside_s[0], settings.prefill_kv_tokens, settings.chunk_tokens),
        (speeds.decode_law or speeds.law, speeds.outside_s[1], settings.decode_kv_tokens, settings.decode_chunk_tokens),
    ):
        workers.append(
            WorkerSpec(
                num_pages=max(1, kv_tokens // page_size),
                page_size=page_size,
                law=law,
                link=LinkSpeed(latency_s, bytes_per_s),
                kv_bytes_per_token=speeds.kv_bytes_per_token,
                chunk_tokens=chunk_tokens,
                chunking=settings.chunking,
                max_batch=settings.max_batch,
                eviction=settings.eviction,
                outside_s=outside_s,
            )
        )
    how = DisaggregationSettings(
        local_prefill_tokens=settings.local_prefill_tokens, chunk_tokens=settings.decode_chunk_tokens
    )
    spec = ClusterSpec(
        num_prefill=settings.prefill,
        num_decode=settings.decode,
        prefill=workers[0],
        decode=workers[1],
        max_sequence_tokens=settings.max_sequence_tokens,
        max_waiting=settings.max_queued_requests,
        max_queue_wait_s=math.inf if settings.max_queue_wait_s is None else settings.max_queue_wait_s,
        queue_strategy=settings.queue_strategy,
        routing=RoutingSettings(disaggregation=how),
        targets=Targets(settings.slo_ttft, settings.slo_tpot) if settings.overload else None,
    )
    return settings.geography.cluster(spec)


def _faults(settings: ReplaySettings) -> list[Fault]:
    """Returns the losses of regions. Raises ConfigError where one has no workers."""
    losses = settings.lose_region or ()
    for loss in losses:
        if loss.region not in settings.geography.regions:
            raise ConfigError(f"no worker is in the region {loss.region} of --lose-region: name it in --regions")
    return [Fault(kind=LOST_REGION, region=loss.region, at_s=loss.at_s, duration_s=loss.duration_s) for loss in losses]


class _Progress:
    """Says on stderr how far a long run is."""

    def __init__(self, policy: str, stderr: TextIO) -> None:
        self._policy = policy
        self._stderr = stderr

    def __call__(self, num_ended: int, num_requests: int, now_s: float) -> None:
        print(f"{self._policy}: {now_s:.0f} s, {num_ended} of {num_requests} requests ended", file=self._stderr)


def _profile(settings: ReplaySettings) -> Profile:
    if settings.prefill_tokens_per_s is None:
        measured = settings.measured
        found = profile(settings.profile, settings.profiles) if measured is None else read_measured(measured).profile
        if settings.kv_bytes_per_token is None:
            return found
        return replace(found, kv_bytes_per_token=settings.kv_bytes_per_token)
    decode = DecodeSpeed(settings.decode_step_s, settings.decode_sequence_s, settings.decode_context_s)
    if decode == DecodeSpeed(0.0, 0.0, 0.0):
        raise ConfigError("a decode step must take some time: give --decode-step-s")
    num_bytes = settings.kv_bytes_per_token or 0
    return linear_profile(settings.prefill_tokens_per_s, settings.prefill_overhead_s, decode, num_bytes)


def _policies(settings: ReplaySettings) -> list[str]:
    """Each policy once, in the order given; `all` stands for the ladder."""
    names = settings.policy or (DEFAULT_POLICY,)
    return list(dict.fromkeys(one for name in names for one in (LADDER if name == "all" else (name,))))


def _sweep(trace: Trace, capacities: Sequence[int]) -> list[dict[str, Any]]:
    if not trace.block_tokens:
        raise ConfigError(f"{trace.name} has no blocks: --capacity-sweep needs a trace with hash_ids")
    prompts = [request.block_ids for request in trace.requests]
    return [
        {"capacity": capacity or None}
        | {name: round(hit_rate(prompts, capacity or None, name), report.DIGITS) for name in EVICTIONS}
        for capacity in capacities
    ]


def _sweep_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [["BLOCKS", *(name.upper() for name in EVICTIONS)]]
    for row in rows:
        cells.append([str(row["capacity"] or "no bound"), *(f"{row[name]:.4f}" for name in EVICTIONS)])
    return report.aligned(cells)


def _headline(facts: dict[str, Any]) -> str:
    rate = "" if facts["rate_per_s"] is None else f", {facts['rate_per_s']:.2f}/s over {facts['span_s']:.0f} s"
    return (
        f"{facts['name']}: {facts['requests']} requests{rate}; {facts['prompt_tokens'] / facts['requests']:.0f} prompt "
        f"and {facts['output_tokens'] / facts['requests']:.0f} answer tokens on average"
    )


def _parameters(settings: ReplaySettings) -> dict[str, Any]:
    """What the result depends on: no file names, which differ between machines."""
    left_out = {"trace", "json", "report", "profiles", "measured"}
    shown = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in left_out}
    shown["policy"] = settings.policy or (DEFAULT_POLICY,)
    shown["region_distance"] = {":".join(pair): far_s for pair, far_s in settings.geography.distances_s.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}


def _write(file: Path, content: str) -> None:
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror})") from None
