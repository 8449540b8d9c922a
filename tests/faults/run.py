"""`python -m tests.faults.run [CASE …]`: runs fault cases and prints a table. Exit code 1 if anything was not right."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from tests.faults.cases import CASES, Options
from tests.faults.report import Row, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none: all")
    parser.add_argument("--trials", type=int, help="trials of each case, or injections, cancels, clients")
    parser.add_argument(
        "--seconds",
        type=float,
        help="how long Redis is away or slow clients read, or at most how long corruption takes",
    )
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds between trials, in which breakers close again"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="of the random moments")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    settings = parser.parse_args()
    unknown = set(settings.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes and namespaces are tidied up after it too
    options = Options(trials=settings.trials, seed=settings.seed, seconds=settings.seconds, pause_s=settings.pause)
    rows = []
    for name in settings.cases or CASES:
        started = time.monotonic()
        row = asyncio.run(_run(name, options))
        row.figures["wall_s"] = round(time.monotonic() - started, 1)
        rows.append(row)
        # Written after each case: a long run that is broken off has told what it found.
        if settings.json:
            settings.json.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")
        sys.stderr.write(table([row]) + "\n")
    sys.stdout.write(table(rows) + "\n")
    return 0 if all(row.is_good for row in rows) else 1


async def _run(name: str, options: Options) -> Row:
    try:
        return await CASES[name](options)
    except RuntimeError as error:
        return Row(name, problems=[f"the case broke off: {error}"])


if __name__ == "__main__":
    sys.exit(main())
