"""`tandem status`: the workers of a cluster as a table or as JSON, from its gateway's GET /cluster."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from cli.commands import CommandParser
from services.runtime.api_client import GatewaySettings, get_json
from services.runtime.config import option
from services.runtime.kinds import flag, number

HEADINGS = (
    "WORKER",
    "ROLE",
    "STATE",
    "PID",
    "ADDRESS",
    "PAGES",
    "FREE",
    "CACHED",
    "RESERVED",
    "USED",
    "RUN",
    "WAIT",
    "EXACT",
    "ENGINE",
)
NUMERIC = frozenset({"PID", "PAGES", "FREE", "CACHED", "RESERVED", "USED", "RUN", "WAIT"})


@dataclass(frozen=True, kw_only=True)
class StatusSettings(GatewaySettings):
    """Shows the workers of a running cluster. Exit code 1 if its gateway cannot be reached."""

    json: bool = option(flag(), default=False, help="Prints the answer as it is.")
    timeout: float = option(number(0.1, 600), default=5.0, help="Seconds to wait for the answer.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(StatusSettings, lambda settings: run(settings, sys.stdout))


def run(settings: StatusSettings, stdout: TextIO) -> int:
    """Prints the cluster; returns the exit code. Raises ApiUnreachable or ApiRefused."""
    tls = settings.tls()
    cluster = get_json(settings.url, "/cluster", timeout_s=settings.timeout, api_key=settings.api_key, tls=tls)
    stdout.write(json.dumps(cluster, indent=2) + "\n" if settings.json else table(cluster))
    return 0


def table(cluster: Mapping[str, Any]) -> str:
    """The cluster as aligned text, one worker a line."""
    workers = cluster.get("workers", [])
    requests = cluster.get("requests", {})
    rows = [_row(worker) for worker in (*workers, *({**gone, "state": "gone"} for gone in cluster.get("gone", ())))]
    lines = _aligned([HEADINGS, *rows]) if rows else ["no workers"]
    lines.append("")
    lines += [line for line in map(_gpu_line, workers) if line]
    lines += [line for trouble in cluster.get("troubles", ()) for line in trouble_lines(trouble)]
    models = sorted({str(worker.get("model", "-")) for worker in workers})
    if models:
        lines.append(f"model     {', '.join(models)}")
    lines += turn_lines(cluster.get("turns") or {})
    lines += _pool_lines(cluster.get("pools", ()), workers)
    lines.append(f"requests  {requests.get('running', '-')} running, {requests.get('queued', '-')} queued")
    return "\n".join(lines) + "\n"


def trouble_lines(trouble: Mapping[str, Any]) -> list[str]:
    """A line that says what is wrong and why, and one that says what to do."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(trouble.get("since_unix_s", 0.0))))
    what = f"{trouble.get('kind', '-')} {trouble.get('subject', '-')}: {trouble.get('cause', '-')}"
    return [f"! {what} (since {since})", f"  {trouble.get('remedy', '-')}"]


def _row(worker: Mapping[str, Any]) -> tuple[str, ...]:
    pages = worker.get("pages", {})
    values = [worker.get("id", "-"), worker.get("role", "-"), _state(worker)]
    values += [worker.get("pid", "-"), worker.get("address", "-")]
    values += [pages.get(key, "-") for key in ("total", "free", "cached", "reserved", "used")]
    values += [worker.get("running", "-"), worker.get("waiting", "-")]
    values.append({True: "yes", False: "no"}.get(worker.get("exact", False)))
    values.append((worker.get("identity") or {}).get("engine", "-"))
    return tuple(str(value) for value in values)


def _state(worker: Mapping[str, Any]) -> str:
    """The worker's state, and that of its circuit where it is not closed, in the words of `tandem top`."""
    state, circuit = worker.get("state", "-"), worker.get("circuit")
    return f"{state}, circuit {circuit['state']}" if circuit else str(state)


def turn_lines(turns: Mapping[str, Any]) -> list[str]:
    """Lines for the models that share workers: which of them is awake and where, and what a switch takes."""
    models, switch_s = turns.get("models") or {}, turns.get("switch_s") or {}
    if not models:
        return []
    states = ", ".join(f"{name} {str(state).replace('_', ' ')}" for name, state in models.items())
    places = {"asleep": "memory", "disk": "disk"}
    times = " and ".join(f"{seconds:.3g} s from {places.get(origin, origin)}" for origin, seconds in switch_s.items())
    lines = [f"by turns  {states}; {f'a switch takes {times}' if times else 'no switch was measured yet'}"]
    for group in turns.get("groups") or ():
        lines.append(f"          {group['group']}: {group['model']} {group['state']} for {float(group['for_s']):.0f} s")
    return lines


def _pool_lines(pools: Sequence[Mapping[str, Any]], workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each pool that the gateway or a worker names: its rule, and its workers."""
    rules = {str(pool.get("name", "-")): str(pool.get("rule", "-")) for pool in pools}
    labels = [str(worker.get("pool", "")) for worker in workers]
    rules |= {label: "without requests of its own" for label in sorted(set(labels)) if label and label not in rules}
    ids = {name: [str(worker.get("id", "-")) for worker in workers if worker.get("pool") == name] for name in rules}
    return [f"pool      {name}, {rule}: {', '.join(ids[name]) or 'no workers'}" for name, rule in rules.items()]


def _gpu_line(worker: Mapping[str, Any]) -> str:
    """What is wrong with the worker's GPU; empty where nothing is known to be wrong."""
    gpu = worker.get("gpu") or {}
    if gpu.get("state", "ok") == "ok":
        return ""
    return f"GPU of {worker.get('id', '-')}: {gpu['state']}, {', '.join(map(str, gpu.get('reasons', ())))}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return ["  ".join(_cell(*cell) for cell in zip(HEADINGS, row, widths, strict=True)).rstrip() for row in rows]


def _cell(heading: str, value: str, width: int) -> str:
    return value.rjust(width) if heading in NUMERIC else value.ljust(width)
