"""`python -m tests.machines.troubles [NAME …]`: each trouble that needs links between machines, in every view.

Makes a trouble, waits until the gateway names it, prints what /cluster, status, doctor, metrics and the log say, mends
it and waits until it is over. Exit code 1 if one was not shown or did not end. Where namespaces are not permitted it
says so and exits with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.machines import bed
from tests.machines.link import Conditions
from tests.machines.network import Network, NotPermitted

GATEWAY, PREFILL, DECODE = "gateway-0", "prefill-0", "decode-0"
TIMEOUT_S = 60.0
FLAGS = {"gateway": ["--expect=prefill=1,decode=2", "--local-prefill-tokens=0"]}


@dataclass(frozen=True)
class Trouble:
    """Links between `source` and `targets` become like this; `kind` and `subject` are what must be named then."""

    name: str
    kind: str
    subject: str
    source: str
    targets: Sequence[str]
    conditions: Conditions
    needs_requests: bool = False


EVERYBODY = (GATEWAY, PREFILL, "decode-1", bed.REDIS)
TROUBLES = (
    Trouble("redis far", "redis_slow", "redis", GATEWAY, [bed.REDIS], Conditions(delay_s=0.1)),
    Trouble("redis cut", "redis", "redis", GATEWAY, [bed.REDIS], Conditions(is_cut=True)),
    Trouble("redis frozen", "redis", "redis", GATEWAY, [bed.REDIS], Conditions(is_frozen=True)),
    Trouble("a machine is gone", "gone", DECODE, DECODE, EVERYBODY, Conditions(is_cut=True)),
    Trouble("no way to a worker", "unreachable", DECODE, DECODE, [GATEWAY], Conditions(is_cut=True)),
    Trouble(
        "large packets vanish",
        "circuit",
        f"{PREFILL} to {DECODE}",
        PREFILL,
        [DECODE],
        Conditions(max_packet_bytes=1300),
        needs_requests=True,
    ),
)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.machines.troubles", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(one.name for one in TROUBLES))
    names = parser.parse_args().names
    chosen = [one for one in TROUBLES if not names or one.name in names]
    missing = [program for program in ("ip", *bed.ENTER) if shutil.which(program) is None]
    try:
        if missing:
            raise NotPermitted(f"{', '.join(missing)} is not installed")
        with Network(bed.machine_names(gateways=1, prefill=1)) as network:
            bed.become_clients(network)
            with bed.Bed(network=network, gateways=1, prefill=1, decode=2, kv_pages=256, flags=FLAGS) as cluster:
                return asyncio.run(_try_all(network, cluster, chosen))
    except NotPermitted as error:
        sys.stdout.write(f"skipped: machines cannot be made here: {error}\n")
        return 0


async def _try_all(network: Network, cluster: bed.Bed, chosen: Sequence[Trouble]) -> int:
    await cluster.ready()
    problems = 0
    for trouble in chosen:
        found = await _try(network, cluster, trouble)
        problems += bool(found)
        sys.stdout.write(f"{trouble.name}: {found or 'shown in all views, and over'}\n\n")
    return 1 if problems else 0


async def _try(network: Network, cluster: bed.Bed, trouble: Trouble) -> str:
    """What was not as it should be; empty: nothing."""
    wanted = (trouble.kind, trouble.subject)
    if not await _until(cluster, wanted, is_there=False):
        return "it existed before"
    before = len(_said(cluster, wanted))
    began_s = time.monotonic()
    network.set([trouble.source], trouble.targets, trouble.conditions, both=True)
    asking = asyncio.create_task(_ask(cluster)) if trouble.needs_requests else None
    try:
        if not await _until(cluster, wanted, is_there=True):
            return f"it is not shown: {await cluster.topology()}"
        sys.stdout.write(f"{trouble.name}: named after {time.monotonic() - began_s:.1f} s\n")
        faults = await asyncio.to_thread(_views, cluster, wanted)
    finally:
        network.reset()
    began_s = time.monotonic()
    is_over = await _until(cluster, wanted, is_there=False)
    if asking is not None:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    if not is_over:
        return "it does not end"
    sys.stdout.write(f"{trouble.name}: over after {time.monotonic() - began_s:.1f} s\n")
    await cluster.ready()
    num_lines = len(_said(cluster, wanted)) - before
    return ", ".join([*faults, *([] if num_lines == 2 else [f"{num_lines} lines in the log instead of 2"])])


async def _until(cluster: bed.Bed, wanted: tuple[str, str], *, is_there: bool) -> bool:
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        troubles = (await cluster.topology())["troubles"]
        if (wanted in {(one["kind"], one["subject"]) for one in troubles}) == is_there:
            return True
        await asyncio.sleep(0.2)
    return False


async def _ask(cluster: bed.Bed) -> None:
    """Requests, one after the other, whose pages are larger than a packet."""
    from tests.faults.client import Broken, Refused, http_json

    number = 0
    while True:
        number += 1
        body: dict[str, Any] = {"model": cluster.model.name, "prompt": f"{number} " * 200, "max_tokens": 4}
        try:
            await http_json(cluster[GATEWAY].http, "/v1/completions", body, timeout_s=30.0)
        except (Broken, Refused, TimeoutError):
            await asyncio.sleep(0.5)


def _views(cluster: bed.Bed, wanted: tuple[str, str]) -> list[str]:
    """Prints what each view says of a trouble; returns the views that do not."""
    import urllib.request

    from cli import doctor, status

    url = f"http://{cluster[GATEWAY].http}"
    kind, subject = wanted
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    texts = {"metrics": metrics, "log": "\n".join(_said(cluster, wanted))}
    for name, run in (
        ("status", lambda out: status.run(status.StatusSettings(url=url), out)),
        ("doctor", lambda out: doctor.run(doctor.DoctorSettings(url=url), out)),
    ):
        out = io.StringIO()
        run(out)
        texts[name] = out.getvalue()
    faults = []
    for name, text in texts.items():
        word = f'tandem_troubles{{kind="{kind}"}}' if name == "metrics" else subject
        lines = [line for line in text.splitlines() if name == "log" or (word in line and kind in line)]
        sys.stdout.write("".join(f"  {name}: {line}\n" for line in lines[:2]))
        if not lines or (name == "metrics" and lines[0].endswith(" 0.0")):
            faults.append(f"{name} does not show it")
    if "nothing is wrong" in texts["doctor"]:
        faults.append("doctor finds nothing wrong")
    return faults


def _said(cluster: bed.Bed, wanted: tuple[str, str]) -> list[str]:
    """The gateway's log lines about a trouble. For a blocked pair, they name its two workers."""
    lines = [line for line in cluster.lines(GATEWAY) if line.startswith("{")]
    return [line for line in lines if _trouble_of(json.loads(line)) == wanted]


def _trouble_of(record: dict[str, Any]) -> tuple[str, str]:
    if record.get("message") in ("pair blocked", "pair unblocked"):
        return "circuit", f"{record['prefill']} to {record['decode']}"
    return record.get("kind", ""), record.get("subject", "")


if __name__ == "__main__":
    sys.exit(main())
