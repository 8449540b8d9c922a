"""Runs one scenario after the other on clusters of machines, and judges the answers."""

from __future__ import annotations

import asyncio
import random
import signal
import time

from tests.faults.cases import NUM_SPECS, Options, Session, resuming, under_load
from tests.faults.load import Reference, gaps_of, make_specs
from tests.faults.report import Row
from tests.machines import bed
from tests.machines.network import Network
from tests.machines.scenarios import SCENARIOS, Action, Change, Forget, Kill, Refuse, Replace, Scenario, Stop

TOKENS = (32, 128)


class Runner:
    """Runs scenarios on one cluster, another one for those with TLS, and own ones for those that need them."""

    def __init__(self, network: Network, *, seed: int, num_specs: int = NUM_SPECS) -> None:
        self._network = network
        self._options = Options(seed=seed, is_quiet=True)
        self._specs = make_specs(random.Random(seed), num_specs, tokens=TOKENS)
        self._reference: Reference | None = None
        self._shared: bed.Bed | None = None

    def run(self, scenario: Scenario) -> Row:
        """One scenario. What breaks off is a row too."""
        if self._reference is None and (scenario.needs_own_cluster or scenario.has_tls):
            self.run(SCENARIOS["undisturbed"])
        started = time.monotonic()
        try:
            row = asyncio.run(self._run(scenario))
        except (RuntimeError, TimeoutError) as error:
            row = Row(scenario.name, problems=[f"broke off: {error}"])
            self.close()
        row.figures["wall_s"] = round(time.monotonic() - started, 1)
        return row

    def close(self) -> None:
        """Ends the cluster that scenarios share."""
        if self._shared is not None:
            self._shared.__exit__(None, None, None)
            self._shared = None

    async def _run(self, scenario: Scenario) -> Row:
        self._network.reset()
        if not scenario.needs_own_cluster:
            if self._shared is None or self._shared.has_tls != scenario.has_tls:
                self.close()
                self._shared = bed.Bed(network=self._network, kv_pages=1024, has_tls=scenario.has_tls).__enter__()
            row = await self._under_load(scenario, self._shared)
            self._shared.keep_logs = self._shared.keep_logs or not row.is_good
            return row
        self.close()  # two clusters at once would be in each other's way
        for change in scenario.start:
            self._change(change)
        with bed.Bed(
            network=self._network,
            kv_pages=1024,
            flags=scenario.flags,
            has_tls=scenario.has_tls,
            clocks=scenario.clocks,
        ) as own:
            started = time.monotonic()
            await own.ready()
            ready_s = time.monotonic() - started
            row = await self._under_load(scenario, own)
            row.figures["ready_s"] = round(ready_s, 1)
            own.keep_logs = not row.is_good
        return row

    async def _under_load(self, scenario: Scenario, cluster: bed.Bed) -> Row:
        await cluster.ready()
        cluster.stale |= frozenset(await cluster.active_placements())
        if scenario.quiet_s:
            await asyncio.sleep(scenario.quiet_s)
        async with under_load(
            cluster, scenario.name, self._options, self._specs, resuming, reference=self._reference
        ) as opened:
            await self._disturb(scenario, opened)
            if not scenario.start:
                self._network.reset()
            await cluster.ready()
        self._reference = self._reference or opened.reference
        row = opened.row
        row.trials = 1
        row.gaps_s = [gap for run in opened.load.done for gap in gaps_of(run.answer)]
        row.figures["longest_gap_s"] = round(max(row.gaps_s, default=0.0), 2)
        first = max((run.answer.ttft_s for run in opened.load.done if run.answer.arrivals), default=0.0)
        row.figures["longest_first_token_s"] = round(first, 2)
        if row.figures["longest_gap_s"] > scenario.longest_gap_s:
            row.problems.append(f"an answer stood still for {row.figures['longest_gap_s']} s")
        if not row.answers:
            row.problems.append("no answer came")
        return row

    async def _disturb(self, scenario: Scenario, opened: Session) -> None:
        started = time.monotonic()
        pending = []
        for at_s, action in scenario.steps:
            await asyncio.sleep(max(0.0, started + at_s - time.monotonic()))
            doing = asyncio.create_task(self._act(action, opened))
            pending.append(doing)
            if isinstance(action, Replace):  # as an operator does: the next one when this one serves
                await doing
        await asyncio.sleep(max(0.0, started + scenario.run_s - time.monotonic()))
        await asyncio.gather(*pending)

    async def _act(self, action: Action, opened: Session) -> None:
        cluster = opened.cluster
        server = cluster.redis
        assert isinstance(server, bed.MachineRedis)
        if isinstance(action, Change):
            self._change(action)
        elif isinstance(action, Kill):
            opened.has_lost_gateway = opened.has_lost_gateway or action.machine.startswith("gateway")
            cluster.kill(action.machine)
            await asyncio.sleep(action.for_s)
            await cluster.replace(action.machine)
        elif isinstance(action, Stop):
            cluster.kill(action.machine, signal.SIGSTOP)
            try:
                await asyncio.sleep(action.for_s)
            finally:
                cluster.kill(action.machine, signal.SIGCONT)
        elif isinstance(action, Forget):
            server.flush()
        elif isinstance(action, Refuse):
            with server.another_password():
                await asyncio.sleep(action.for_s)
        else:
            cluster.kill(action.machine, signal.SIGTERM)
            await cluster.ended(action.machine)
            cluster.start(action.machine)
            await cluster.ready()

    def _change(self, change: Change) -> None:
        self._network.set(change.sources, change.targets, change.conditions, both=change.way_back)
