"""`python -m tests.attack.run [ATTACK …]`: attacks a cluster, prints a table. Exit code 1 if anything did not hold."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tests.attack.base import ADMIN, ATTACKER, ATTACKS, VICTIM, Attack, Row, Target, cluster


def load() -> dict[str, Attack]:
    """All attacks by name. They are in the modules `on_…` of this package."""
    for file in sorted(Path(__file__).parent.glob("on_*.py")):
        importlib.import_module(f"tests.attack.{file.stem}")
    return ATTACKS


async def run(attacks: Iterable[Attack], target: Target | None = None) -> dict[str, list[Row]]:
    """Runs attacks: those that want the same flags on one cluster, or all on `target` but those that want one alone."""
    rows: dict[str, list[Row]] = {}
    if target is not None:
        for one in attacks:
            if one.alone or one.flags:
                rows[one.name] = [Row(one.name, "", "needs a cluster of its own: run it without --http", None)]
            else:
                rows[one.name] = await _rows(one, target)
        return rows
    wanted = sorted(attacks, key=_start_of)
    for _, group in itertools.groupby(wanted, key=_start_of):
        together = list(group)
        if together[0].alone:
            for one in together:
                rows[one.name] = await _rows(one, Target("", ""))
            continue
        async with cluster(*together[0].flags, has_keys=together[0].has_keys) as own:
            for one in together:
                rows[one.name] = await _rows(one, own)
    return rows


WORDS = {True: "held", False: "**did not hold**", None: "not tried"}


def table(attacks: dict[str, Attack], rows: dict[str, list[Row]]) -> str:
    """Markdown, a line for each row."""
    lines = ["| findings | attack | what | expected | happened | |", "|---|---|---|---|---|---|"]
    for name, found in rows.items():
        numbers = ", ".join(map(str, attacks[name].findings))
        lines += [
            f"| {numbers} | {name} | {row.what} | {row.expected} | {row.happened} | {WORDS[row.held]} |"
            for row in found
        ]
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    attacks = load()
    parser = argparse.ArgumentParser(prog="python -m tests.attack.run", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(attacks)}; none: all")
    parser.add_argument("--http", help="URL of a running cluster's HTTP API; without it clusters are started for this")
    parser.add_argument("--grpc", default="", help="host:port of its gRPC API")
    parser.add_argument("--gateway-pid", type=int, default=0, help="its gateway's process, whose memory is looked at")
    for who in (ADMIN, VICTIM, ATTACKER):
        parser.add_argument(f"--{who}-key", default="", help=f"API key of {who}, where the cluster asks for keys")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    settings = parser.parse_args()
    unknown = set(settings.attacks) - set(attacks)
    if unknown:
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clusters are ended after it too
    target = None
    if settings.http:
        keys = {who: getattr(settings, f"{who}_key") for who in (ADMIN, VICTIM, ATTACKER)}
        target = Target(settings.http, settings.grpc, keys if any(keys.values()) else {}, settings.gateway_pid)
    chosen = [attacks[name] for name in settings.attacks or attacks]
    rows = asyncio.run(run(chosen, target))
    if settings.json:
        settings.json.write_text(json.dumps({name: [asdict(row) for row in found] for name, found in rows.items()}))
    sys.stdout.write(table(attacks, rows) + "\n")
    return 0 if all(row.held is not False for found in rows.values() for row in found) else 1


async def _rows(one: Attack, target: Target) -> list[Row]:
    started = time.monotonic()
    found = list(await one.run(target))
    # As they come: a run that is stopped in the middle has shown what it found.
    said = "".join(f"    {WORDS[row.held]}: {row.what}: {row.happened}\n" for row in found)
    sys.stderr.write(f"{one.name}: {time.monotonic() - started:.1f} s\n{said}")
    return found


def _start_of(one: Attack) -> tuple[bool, bool, tuple[str, ...]]:
    return one.alone, one.has_keys, one.flags


if __name__ == "__main__":
    sys.exit(main())
