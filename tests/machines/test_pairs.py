"""Faults between two workers: the bounds by table, the rules in a real namespace, the order of addresses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.faults.harness import REPOSITORY
from tests.faults.report import Row
from tests.machines.network import Network, NotPermitted
from tests.machines.pairs import (
    COLUMNS,
    FAULTS,
    MODES,
    PAIRS,
    Evidence,
    PairScenario,
    Stream,
    accused,
    judge,
    ruleset,
    table,
)

PAIR = ("prefill-0", "decode-1")
NAME = " to ".join(PAIR)
CUT, LOSS = (next(fault for fault in FAULTS if fault.name == name) for name in ("cut", "8 % loss"))
SCENARIO = PairScenario(CUT, PAIR, "remote")
GOOD = Evidence(
    began_s=100.0,
    streams=[Stream(99.0, [[99.5, 104.4, 104.9]]), Stream(101.5, [[104.5], [104.6, 105.0], []])],
    num_handoffs=3,
    failed_s=[103.0],
    accused=[(101.0, {}), (103.4, {NAME: f"circuit {NAME}: cannot be dialed"})],
)
ORDER = """
import json, socket
from tests.machines import bed
from tests.machines.network import Network, enter
with Network(["prefill-0", "decode-0", "decode-1"]) as network:
    bed.know_names(network)
    bed.write_names(network, silent=["decode-0"])
    enter(network.machines["prefill-0"].path)
    machine = network.machines["decode-0"]
    found = [info[4][0] for info in socket.getaddrinfo("decode-0", 80, type=socket.SOCK_STREAM)]
    print(json.dumps([found, [machine.silent_address, machine.address]]))
"""


def problems(evidence: Evidence, scenario: PairScenario = SCENARIO) -> list[str]:
    row = Row(scenario.name)
    judge(scenario, evidence, row)
    return row.problems


def test_a_failure_that_is_soon_named_and_delays_nobody_keeps_every_bound() -> None:
    row = Row(SCENARIO.name, answers=3)
    judge(SCENARIO, GOOD, row)
    assert row.is_good, row.problems
    assert (row.figures["gap_s"], row.figures["wait_s"], row.figures["named_s"]) == ("1.4", "1.6", "0.4")
    assert "ok" in table([row]).splitlines()[1].split()
    assert row.figures.keys() >= set(COLUMNS) - {"answers", "lost", "different"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"streams": [Stream(99.0, [[99.5, 105.1]])]}, "a gap of 2.1 s"),
        ({"streams": [Stream(103.5, [[105.6]])]}, "or a wait of 2.1 s"),
        ({"failed_s": []}, "no handoff failed"),
        ({"num_handoffs": 0}, "no handoff was tried"),
        ({"accused": [(108.1, {NAME: ""})]}, "doctor named the pair 5.1 s after"),
        ({"accused": []}, "doctor named the pair - s after"),
        ({"accused": [*GOOD.accused, (104.0, {"decode-0": "slow"})]}, "doctor named decode-0: slow"),
    ],
)
def test_each_bound_that_is_exceeded_is_a_problem(change: dict[str, object], problem: str) -> None:
    assert any(problem in found for found in problems(replace(GOOD, **change)))  # type: ignore[arg-type]


def test_a_lossy_path_may_delay_handoffs_and_may_be_named_as_slow() -> None:
    lossy = replace(SCENARIO, fault=LOSS)
    late = [Stream(101.0, [[105.0]])]
    assert not problems(replace(GOOD, failed_s=[], accused=[], streams=late), lossy)
    assert problems(replace(GOOD, failed_s=[], accused=[], streams=late), replace(SCENARIO, fault=FAULTS[0]))
    assert not problems(replace(GOOD, accused=[]), lossy)
    assert not problems(replace(GOOD, failed_s=[], streams=[]), lossy)
    assert problems(replace(GOOD, failed_s=[], streams=[]), replace(SCENARIO, fault=FAULTS[0])) == [
        "doctor named the pair although none of its handoffs failed"
    ]


def test_a_worker_that_is_slow_on_purpose_may_be_named_too() -> None:
    evidence = replace(GOOD, accused=[*GOOD.accused, (104.0, {"decode-0": "slow"})])
    assert not problems(evidence, replace(SCENARIO, slow="decode-0"))


def test_a_finding_about_two_workers_accuses_their_pair() -> None:
    pair = "circuit prefill-0 to decode-1: prefill-0 cannot dial decode-1 at 10.77.0.112:7000"
    found = accused([pair, "decode-0 is lost", "version 0.1"])
    assert found == {"prefill-0 to decode-1": pair, "decode-0": "decode-0 is lost"}


def test_every_fault_occurs_for_each_pair_in_each_mode() -> None:
    for fault in FAULTS[1:]:
        pairs = [scenario.pair for scenario in PAIRS.values() if scenario.fault is fault and not scenario.slow]
        assert len(pairs) == 4 * len(MODES)
        assert len(set(pairs)) == 4


def test_the_rules_of_every_fault_are_accepted_in_a_namespace() -> None:
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed")
    try:
        with Network(["prefill-0", "decode-0"]) as network:
            path = network.machines["decode-0"].path
            for fault in FAULTS:
                rules = [("10.77.0.16", fault.to_decode), ("10.77.0.16", fault.to_prefill)]
                nft(path, "-f", "-", rules=ruleset(rules))
                assert nft(path, "list", "ruleset").count(" drop") == sum(bool(rule) for _, rule in rules)
    except NotPermitted as error:
        pytest.skip(f"machines cannot be made here: {error}")


def test_the_silent_address_of_a_name_is_tried_first() -> None:
    command = [sys.executable, "-c", ORDER]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    if "NotPermitted" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    found, wanted = json.loads(done.stdout)
    assert found == wanted


def nft(path: str, *arguments: str, rules: str = "") -> str:
    command = ["nsenter", f"--net={path}", "nft", *arguments]
    done = subprocess.run(command, input=rules, capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
