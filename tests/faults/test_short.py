"""A short selection of the fault cases; `make test-faults` runs them all, and longer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.faults import cases
from tests.faults.cases import EVERY_PROMPT_IS_HANDED_OVER, Options, corrupting_plans, judge_corruption
from tests.faults.client import Answer
from tests.faults.harness import FaultCluster
from tests.faults.load import Reference, Spec, gap_around, make_specs
from tests.faults.report import table

SEED = 11


@dataclass
class Short:
    """One cluster for all tests; the first makes the undisturbed answers."""

    cluster: FaultCluster
    specs: list[Spec]
    options: Options = field(default_factory=lambda: Options(seed=SEED, is_quiet=True))
    reference: Reference | None = None

    def under_load(self, fault: str):  # type: ignore[no-untyped-def]
        return cases.under_load(self.cluster, fault, self.options, self.specs, reference=self.reference)


@pytest.fixture(scope="module")
def short() -> Iterator[Short]:
    flags = {"gateway": ["--max-attempts=20", EVERY_PROMPT_IS_HANDED_OVER]}
    with FaultCluster(kv_pages=1024, plans=corrupting_plans(SEED), flags=flags) as cluster:
        yield Short(cluster, make_specs(random.Random(SEED), 16, tokens=(16, 64)))


async def test_kill_9_of_workers_changes_no_answer(short: Short) -> None:
    async with short.under_load("kill_decode") as opened:
        short.reference = opened.reference
        await cases.kill_some(opened, ["decode"], 3)
        await cases.kill_some(opened, ["prefill"], 2)
        await cases.kill_some(opened, ["prefill", "decode"], 1)
    assert opened.hits, "no stream was hit"
    assert opened.row.is_good, table([opened.row])


async def test_every_corruption_is_detected_and_changes_no_answer(short: Short) -> None:
    async with short.under_load("corruption") as opened:
        await cases.corrupt_some(opened, 40, timeout_s=80.0)
    judge_corruption(opened)
    assert opened.row.trials >= 40, "the faults were not injected"
    assert len(opened.row.figures["injected"]) >= 6, opened.row.figures
    assert opened.row.is_good, table([opened.row])


async def test_cancelled_requests_leave_nothing_behind(short: Short) -> None:
    await short.cluster.ready()
    row = await cases.cancel_some(short.cluster, short.options, 100)
    assert row.figures["phases"].get("decoding"), "no cancel found its request running"
    assert row.is_good, table([row])


async def test_workers_that_change_their_role_change_no_answer() -> None:
    options = Options(seed=SEED, is_quiet=True)
    flags = {"gateway": [EVERY_PROMPT_IS_HANDED_OVER]}
    with FaultCluster(kv_pages=1024, flags=flags, changes_roles=True) as cluster:
        specs = make_specs(random.Random(SEED), 16, tokens=(16, 64))
        async with cases.under_load(cluster, "role_changes", options, specs) as opened:
            await cases.change_some_roles(opened, 6, mortal=["decode-1"])
    assert opened.row.figures["streams_hit"] > 0, "nothing ran while roles changed"
    assert opened.row.is_good, table([opened.row])


def test_gaps_count_that_begin_before_all_have_a_token_again() -> None:
    answer = Answer()
    for choice, time_s in ((0, 1.0), (0, 2.5), (0, 2.6), (0, 4.0), (1, 2.2)):
        answer.choice(choice)
        answer.arrivals.append((time_s, choice, 1))
    assert gap_around(answer, 2.0, 2.5) == pytest.approx(1.5), "the one in which the fault lies"
    assert gap_around(answer, 2.55, 2.55) == pytest.approx(0.1), "not what comes when all are well again"
    assert gap_around(answer, 2.55, 2.6) == pytest.approx(1.4)
    assert gap_around(answer, 0.5, 0.6) == pytest.approx(1.7), "the choice that had none yet is measured from the fault"
    assert gap_around(answer, 4.0, 5.0) is None
