"""A region whose workers are all killed, for real: two regions of processes, each with a gateway, under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest

from tests.faults.cases import EVERY_PROMPT_IS_HANDED_OVER
from tests.faults.client import Answer, Refused, http_generate
from tests.faults.harness import FaultCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

REGIONS = ("eu", "us")
LOST = "in the region eu, to which the request's data is held"
TIMEOUT_S = 60.0


@dataclass
class Load:
    """Streams that ask without a pause: what is held to a region, and what is not, at each gateway."""

    cluster: FaultCluster
    expected: dict[int, tuple[object, ...]] = field(default_factory=dict)
    answered: Counter[str] = field(default_factory=Counter)
    different: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    is_over: bool = False

    async def ask(self, number: int, region: str, *, is_held: bool) -> Answer:
        """One greedy answer; `number` decides its prompt."""
        chance = random.Random(number)
        words = " ".join(chance.choice(("region", "worker", "page", "token", "answer")) for _ in range(60))
        body = {"prompt": f"{number} {words}", "max_tokens": 48, "temperature": 0, "stream": True}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        headers = {"x-tandem-residency": region} if is_held else {}
        answer = Answer()
        async with asyncio.timeout(TIMEOUT_S):
            await http_generate(self.cluster[f"gateway-{REGIONS.index(region)}"].http, body, answer, headers=headers)
        return answer

    async def run(self, region: str, *, is_held: bool, first: int) -> None:
        whose = f"{region} held" if is_held else region
        for number in itertools.cycle(range(first, first + 4)):
            if self.is_over:
                return
            try:
                answer = await self.ask(number, region, is_held=is_held)
            except Refused as refusal:
                (self.refused if whose == "eu held" else self.failed).append(str(refusal))
                await asyncio.sleep(0.2)
                continue
            if answer.outcome() != self.expected[number]:
                self.different.append(number)
            self.answered[whose] += 1

    async def until_more(self, *names: str, num: int = 3) -> None:
        """Waits until streams have had further answers."""
        before = Counter(self.answered)
        async with asyncio.timeout(TIMEOUT_S):
            while any(self.answered[name] < before[name] + num for name in names):  # noqa: ASYNC110 - others' state
                await asyncio.sleep(0.05)

    async def until_refused(self) -> None:
        """Waits until what is held to the lost region has been refused a few more times."""
        before = len(self.refused)
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.refused) < before + 3:  # noqa: ASYNC110 - others' state
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def running(load: Load) -> AsyncIterator[None]:
    """Runs all streams, once each answer is known as an undisturbed cluster gives it."""
    kinds = [(region, is_held) for region in REGIONS for is_held in (True, False)]
    for number in range(4 * len(kinds)):
        load.expected[number] = (await load.ask(number, "us", is_held=False)).outcome()
    async with asyncio.TaskGroup() as tasks:
        for place, (region, is_held) in enumerate(kinds):
            tasks.create_task(load.run(region, is_held=is_held, first=4 * place))
        try:
            yield
        finally:
            load.is_over = True


@pytest.fixture
def cluster() -> Iterator[FaultCluster]:
    names = [f"{role}-{number}" for role in ("gateway", "prefill", "decode") for number in range(2)]
    flags = {name: [f"--region={REGIONS[int(name[-1])]}"] for name in names}
    shared = ["--region-distance=eu:us=0.02", "--max-attempts=20", "--failover-wait-s=1", EVERY_PROMPT_IS_HANDED_OVER]
    with FaultCluster(gateways=2, worker_flags=flags, flags={"gateway": shared}) as cluster:
        yield cluster


async def test_a_lost_region_costs_others_nothing_and_what_is_held_there_its_answers(cluster: FaultCluster) -> None:
    await cluster.ready()
    load = Load(cluster)
    workers = ("prefill-0", "decode-0")
    async with running(load):
        await load.until_more("eu", "eu held", "us", "us held")
        assert not load.refused
        for _ in range(2):
            for name in workers:
                cluster.kill(name)
            await load.until_refused()
            await load.until_more("eu", "us", "us held")
            for name in workers:
                await cluster.ended(name)
                cluster.start(name)
            await cluster.ready()
            await load.until_more("eu", "eu held", "us", "us held")
    assert load.failed == []
    assert load.different == []
    unnamed = [words for words in load.refused if LOST not in words]
    assert unnamed == []
    assert any(words.startswith("503") for words in load.refused), "requests that came while the region was away"
    assert await cluster.leaks() == []
