"""Runs the scenarios of `pairs`: a cluster for each, under a load whose responses are compared."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any

from cli import doctor
from cli.findings import Level
from tests.faults.client import http_json
from tests.faults.load import Clients, Load, Reference, Run, make_specs, undisturbed
from tests.faults.report import Row
from tests.machines import bed
from tests.machines.network import Network
from tests.machines.pairs import FAULT_S, MODES, TRANSFER_PORT, Evidence, PairScenario, Stream, accused, judge, ruleset

GATEWAY = "gateway-0"
DECODE_FLAGS = [f"--transfer-port={TRANSFER_PORT}"]
NUM_SPECS, TOKENS = 24, (16, 64)
WIDTH, MAX_PAUSE_S = 3, 0.5
"""Streams at once, and the longest pause between two of a client. On busy cores, healthy workers are slow too."""
WARM_UP_S, AFTER_S = 4.0, 3.0
LOOK_EVERY_S = 0.25
DIAL_TIMEOUT_S = 1.0
SLOW_STEP_S = 0.15
EJECTED_TIMEOUT_S = 30.0
MAX_PAGE = 200


class PairRunner:
    """Runs one scenario after the other."""

    def __init__(self, network: Network, *, seed: int) -> None:
        self._network = network
        self._specs = make_specs(random.Random(seed), NUM_SPECS, tokens=TOKENS)
        self._reference: Reference | None = None

    def run(self, scenario: PairScenario) -> Row:
        """Runs one scenario. A scenario that breaks off is a row with a problem."""
        started = time.monotonic()
        try:
            row = asyncio.run(self._run(scenario))
        except (RuntimeError, TimeoutError) as error:
            row = Row(scenario.name, problems=[f"broke off: {error}"])
        row.figures["wall_s"] = round(time.monotonic() - started, 1)
        return row

    async def _run(self, scenario: PairScenario) -> Row:
        if self._reference is None:
            with bed.Bed(network=self._network, gateways=1, kv_pages=1024) as cluster:
                await cluster.ready()
                async with _clients(cluster, "reference") as clients:
                    self._reference = await undisturbed(clients, self._specs, width=WIDTH)
        with self._named(scenario), self._cluster(scenario) as cluster:
            await cluster.ready()
            row = await self._under_load(scenario, cluster)
            cluster.keep_logs = not row.is_good
            return row

    @contextlib.contextmanager
    def _named(self, scenario: PairScenario) -> Iterator[None]:
        """Prepares names and rules that must exist before the workers start, and removes all rules at the end."""
        bed.write_names(self._network, silent=[scenario.pair[1]] if scenario.fault.has_silent_address else [])
        if scenario.fault.from_start:
            self._filter(scenario, is_on=True)
        try:
            yield
        finally:
            self._filter(scenario, is_on=False)
            bed.write_names(self._network)

    def _cluster(self, scenario: PairScenario) -> bed.Bed:
        decode = scenario.pair[1]
        advertised = [f"--advertise-host={decode}"] if scenario.fault.has_silent_address else []
        return bed.Bed(
            network=self._network,
            gateways=1,
            # A second prefill worker would leave requests a good path to the decode worker of the pair.
            prefill=1 if scenario.slow else 2,
            kv_pages=1024,
            flags={"gateway": MODES[scenario.mode], "decode": DECODE_FLAGS},
            worker_flags={decode: advertised},
            plans={scenario.slow: {"slow_step_s": SLOW_STEP_S}} if scenario.slow else {},
        )

    def _filter(self, scenario: PairScenario, *, is_on: bool) -> None:
        prefill, decode = (self._network.machines[name] for name in scenario.pair)
        fault = scenario.fault
        for target, source, rule in ((decode, prefill, fault.to_decode), (prefill, decode, fault.to_prefill)):
            text = ruleset([(source.address, rule if is_on else "")])
            command = ["nsenter", f"--net={target.path}", "nft", "-f", "-"]
            subprocess.run(command, input=text, text=True, check=True, timeout=10, capture_output=True)

    async def _under_load(self, scenario: PairScenario, cluster: bed.Bed) -> Row:
        seen = Evidence(began_s=time.monotonic())
        async with _clients(cluster, scenario.name) as clients:
            load = Load(clients, self._specs, self._reference, width=WIDTH, runner=_identified)
            looking = asyncio.create_task(_look(cluster, seen))
            try:
                async with load.running_streams():
                    await asyncio.sleep(WARM_UP_S)
                    if scenario.slow:
                        cluster.kill(scenario.slow, signal.SIGUSR2)
                        await _until_open(cluster, scenario.slow)
                    if not scenario.fault.from_start:
                        seen.began_s = time.monotonic()
                        self._filter(scenario, is_on=True)
                    await asyncio.sleep(FAULT_S)
                    self._filter(scenario, is_on=False)
                    await asyncio.sleep(AFTER_S)
            finally:
                looking.cancel()
                await asyncio.wait([looking])
            if not looking.cancelled():
                looking.result()
        await _read_history(scenario, cluster, seen)
        seen.streams = [_stream(run) for run in load.done]
        row = Row(scenario.name, trials=1, answers=len(load.done))
        row.lost, row.different = len(load.lost()), len(load.different())
        row.problems += [f"{count} lost: {text}" for text, count in Counter(run.error for run in load.lost()).items()]
        row.leaks += await cluster.leaks()
        judge(scenario, seen, row)
        return row


@contextlib.asynccontextmanager
async def _clients(cluster: bed.Bed, seed: str) -> AsyncIterator[Clients]:
    clients = Clients(cluster, random.Random(seed))
    try:
        yield clients
    finally:
        await clients.close()


async def _identified(clients: Clients, run: Run) -> None:
    """Sends a request once, after a pause, under an identifier by which its history is found even if it fails."""
    await asyncio.sleep(clients.chance.uniform(0.0, MAX_PAUSE_S))
    run.answer.request_id = run.answer.request_id or f"p-{id(run):x}-{time.monotonic_ns()}"
    await clients.run(run)


def _stream(run: Run) -> Stream:
    choices = [[at_s for at_s, index, _ in run.answer.arrivals if index == number] for number in run.answer.choices]
    return Stream(run.answer.sent_at, choices)


async def _look(cluster: bed.Bed, seen: Evidence) -> None:
    """Runs the gateway checks of `tandem doctor` again and again."""
    settings = doctor.DoctorSettings(url=f"http://{cluster[GATEWAY].http}", timeout=DIAL_TIMEOUT_S)
    while True:
        findings = await asyncio.to_thread(lambda: list(doctor.gateway(settings)))
        texts = [finding.what for finding in findings if finding.level is not Level.OK]
        seen.accused.append((time.monotonic(), accused(texts)))
        await asyncio.sleep(LOOK_EVERY_S)


async def _until_open(cluster: bed.Bed, name: str) -> None:
    """Waits until the gateway keeps a worker from work. Raises TimeoutError."""
    async with asyncio.timeout(EJECTED_TIMEOUT_S):
        while True:
            circuits = {worker["id"]: worker["circuit"] for worker in (await cluster.topology())["workers"]}
            if circuits[name] != "closed":
                return
            await asyncio.sleep(LOOK_EVERY_S)


async def _read_history(scenario: PairScenario, cluster: bed.Bed, seen: Evidence) -> None:
    """Adds the attempts on the pair, as the gateway's history and log show them."""
    failed: set[str] = set()
    async for request in _history(cluster):
        story = await http_json(cluster[GATEWAY].http, f"/dashboard/requests/@{request['number']}")
        seen.max_attempts = max([seen.max_attempts, *(len(answer["attempts"]) for answer in story["answers"])])
        for attempt in (attempt for answer in story["answers"] for attempt in answer["attempts"]):
            if (attempt["prefill"], attempt["decode"]) == scenario.pair:
                seen.num_handoffs += 1
                if attempt["failure"]:
                    failed.add(request["request_id"])
    ahead_s = time.time() - time.monotonic()
    for line in cluster.lines(GATEWAY):
        if '"attempt failed"' in line:
            record = json.loads(line)
            if record["request_id"].rsplit(".", 2)[0] in failed:
                seen.failed_s.append(datetime.fromisoformat(record["time"]).timestamp() - ahead_s)


async def _history(cluster: bed.Bed) -> AsyncIterator[dict[str, Any]]:
    before = ""
    while True:
        page = await http_json(cluster[GATEWAY].http, f"/dashboard/requests?limit={MAX_PAGE}{before}")
        for request in page["requests"]:
            yield request
        if not page["has_more"]:
            return
        before = f"&before={page['requests'][-1]['number']}"
