"""The images and the cluster of deploy/compose, as containers: answers, deaths, updates. `make test-containers`."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.containers.cluster import BASE, IMAGES, ContainerCluster, Podman, Unavailable, image_name
from tests.faults import cases
from tests.faults.cases import EVERY_PROMPT_IS_HANDED_OVER, Options
from tests.faults.client import http_json
from tests.faults.harness import REPOSITORY, FaultCluster
from tests.faults.load import Clients, Load, Reference, Spec, make_specs
from tests.faults.report import table

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

SEED = 27
NUM_ANSWERS = 200
GATEWAY_LIMIT_BYTES = 200_000_000
"""What the gateway's image may have beyond its base."""
START_STOP_S = 5.0
"""The time in which a container that is only just starting ends after SIGTERM."""
OPTIONS = Options(seed=SEED, is_quiet=True)
MANIFESTS = REPOSITORY / "deploy" / "kubernetes" / "base"


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    try:
        return Podman(tmp_path_factory.mktemp("podman"))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cluster(podman: Podman) -> Iterator[ContainerCluster]:
    with ContainerCluster(gateways=2, podman=podman) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def specs() -> list[Spec]:
    return make_specs(random.Random(SEED), 16, tokens=(16, 64))


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """What the first test under load made."""
    return {}


def under_load(cluster, fault, specs, references):  # type: ignore[no-untyped-def]
    return cases.under_load(cluster, fault, OPTIONS, specs, reference=references.get("reference"))


def grace_s(manifest: str) -> int:
    """The grace period that a manifest of Kubernetes gives its pods."""
    (workload,) = [
        document
        for document in yaml.safe_load_all((MANIFESTS / manifest).read_text())
        if document["kind"] in ("Deployment", "StatefulSet")
    ]
    return int(workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


def size_bytes(podman: Podman, image: str) -> int:
    return int(podman.image(image)["Size"])


def say(text: str) -> None:
    sys.stderr.write(f"\ncontainers: {text}\n")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_starts_and_stops_without_a_shell_or_root(podman: Podman, image: str) -> None:
    known = podman.image(image_name(image))["Config"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", known["User"]), "no name: only a number is known not to be root"
    assert known["Entrypoint"][0] in ("python3", "valkey-server", "prometheus")
    assert known["StopSignal"] in ("SIGTERM", "15")
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in known["Labels"].items()}
    assert labels.keys() >= {"title", "description", "version", "revision", "licenses", "base.name"}
    if labels["base.name"] == BASE:
        for shell in ("/bin/sh", "sh", "bash"):
            ran = podman.run("run", "--rm", "--network=none", f"--entrypoint={shell}", image_name(image), check=False)
            assert ran.returncode in (126, 127), f"{shell} exists"


def test_the_gateway_is_small_and_holds_no_torch(podman: Podman) -> None:
    sizes = {image: size_bytes(podman, image_name(image)) for image in IMAGES}
    base = podman.image(image_name("gateway"))["Config"]["Labels"]["org.opencontainers.image.base.name"]
    base_bytes = size_bytes(podman, base)
    say(f"base {base_bytes / 1e6:.1f} MB; " + ", ".join(f"{one} {size / 1e6:.1f} MB" for one, size in sizes.items()))
    assert sizes["gateway"] - base_bytes < GATEWAY_LIMIT_BYTES
    found = podman.run(
        "run", "--rm", "--network=none", "--entrypoint=python3", image_name("gateway"),
        "-c", "import importlib.util as u; print([n for n in ('torch', 'numpy', 'pip') if u.find_spec(n)])",
    )  # fmt: skip
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("after_s", [0.2, 1.0, 2.0])
def test_a_container_that_is_starting_ends_soon_after_sigterm(podman: Podman, after_s: float) -> None:
    """The first process of a container gets no signal for which it has no handler yet."""
    settings = ["--env=TANDEM_ID=decode-9", "--env=TANDEM_MODEL=/opt/tandem/models/tandem-demo"]
    flags = ["--detach", "--network=none", "--read-only", "--cap-drop=all", *settings]
    container = podman.run("run", *flags, image_name("worker"), "decode_worker").stdout.strip()
    try:
        time.sleep(after_s)
        began = time.monotonic()
        podman.run("stop", "--time=30", container)
        state = podman.inspect(container)["State"]
        say(f"SIGTERM {after_s} s after the start: ended in {time.monotonic() - began:.1f} s with {state['ExitCode']}")
        assert time.monotonic() - began < START_STOP_S
        assert state["ExitCode"] in (0, 128 + signal.SIGTERM)
    finally:
        podman.run("rm", "--force", "--time=0", container, check=False)


async def test_containers_are_hardened(podman: Podman, cluster: ContainerCluster) -> None:
    await cluster.ready()
    for name, program in cluster.programs.items():
        assert podman.inspect(cluster.container(name))["HostConfig"]["ReadonlyRootfs"], name
        held = rights(program.pid)
        assert {int(held[kind], 16) for kind in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")} == {0}, name
        assert (held["NoNewPrivs"], held["Seccomp"]) == ("1", "2"), name
        assert set(held["Uid"].split()) == {"10001"}, name
        assert leads_outside(program.pid) == (program.role == "gateway"), name


def rights(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def leads_outside(pid: int) -> bool:
    """Whether the network of a process has a way to anywhere."""
    routes = Path(f"/proc/{pid}/net/route").read_text().splitlines()[1:]
    return any(route.split()[1] == "00000000" for route in routes)


async def test_answers_are_those_of_processes_without_containers(cluster: ContainerCluster) -> None:
    many = make_specs(random.Random(SEED + 1), NUM_ANSWERS, tokens=(8, 32))
    outcomes = []
    flags = {"gateway": [EVERY_PROMPT_IS_HANDED_OVER]}
    await cluster.ready()
    for tried in (cluster, FaultCluster(prefill=1, decode=1, flags=flags)):
        if tried is cluster:
            outcomes.append(await answers(tried, many))
        else:
            with tried:
                await tried.ready()
                outcomes.append(await answers(tried, many))
    different = [number for number in outcomes[0] if outcomes[0][number] != outcomes[1][number]]
    say(f"{len(outcomes[0])} answers compared with those of processes: {len(different)} different")
    assert len(outcomes[0]) == NUM_ANSWERS
    assert different == []
    assert len(set(outcomes[0].values())) > NUM_ANSWERS / 2, "the answers say nothing"


async def answers(cluster: FaultCluster, specs: list[Spec]) -> dict[int, tuple[object, ...]]:
    clients = Clients(cluster, random.Random(SEED))
    try:
        load = Load(clients, specs, width=16, is_named=False)
        await load.run_all()
    finally:
        await clients.close()
    assert [run.error for run in load.lost()] == []
    return {run.spec.number: run.answer.outcome() for run in load.done}


async def test_prometheus_reaches_every_program(cluster: ContainerCluster) -> None:
    end = time.monotonic() + 60
    while True:
        targets = (await http_json(cluster.prometheus, "/api/v1/targets"))["data"]["activeTargets"]
        up = [target for target in targets if target["health"] == "up"]
        if len(up) == len(cluster.programs) or time.monotonic() > end:
            break
        await asyncio.sleep(0.5)
    assert len(up) == len(cluster.programs), json.dumps(targets, indent=1)


async def test_a_container_that_is_killed_costs_no_answer(cluster, specs, references) -> None:  # type: ignore[no-untyped-def]
    async with under_load(cluster, "kill_container", specs, references) as opened:
        references["reference"] = opened.reference
        await cases.kill_some(opened, ["decode"], 2)
        await cases.kill_some(opened, ["prefill"], 1)
    assert opened.hits, "no stream was hit"
    say(f"killed: {opened.row.answers} answers, {opened.row.lost} lost, {opened.row.different} different")
    assert opened.row.is_good, table([opened.row])


async def test_a_rolling_update_of_every_container_costs_no_answer(cluster, specs, references) -> None:  # type: ignore[no-untyped-def]
    """As Kubernetes does it: one pod of a set at a time, the highest number first, each ready before the next."""
    graces = {
        "decode": grace_s("workers/decode.yaml"),
        "prefill": grace_s("workers/prefill.yaml"),
        "gateway": grace_s("gateway/gateway.yaml"),
    }
    took: dict[str, float] = {}
    async with under_load(cluster, "rolling_update", specs, references) as opened:
        opened.has_lost_gateway = True
        for role, grace in graces.items():
            for name in sorted(cluster.names(role), reverse=True):
                took[name] = round(await asyncio.to_thread(cluster.stop, name, grace_s=grace), 1)
                await cluster.recreate(name)
                await cluster.ready()
    row = opened.row
    say(f"rolling update: {row.answers} answers, {row.lost} lost, {row.different} different; seconds to stop: {took}")
    assert took.keys() == cluster.programs.keys()
    assert row.answers > len(specs)
    assert row.is_good, table([row])


async def test_from_blue_to_green_no_answer_is_lost_and_none_mixes_both(cluster, specs, references) -> None:  # type: ignore[no-untyped-def]
    """Green computes in another type: its answers are others, and one that was half of each would be neither's."""
    blue = cluster.workers
    green = {"green-prefill-0": "prefill", "green-decode-0": "decode"}
    async with under_load(cluster, "blue_green", specs, references) as opened:
        of_blue = opened.reference.outcomes
        await asyncio.to_thread(lambda: cluster.up(*green, blue_green=True))
        for name, role in green.items():
            cluster.add_worker(name, role)
        await cluster.ready()
        for name in blue:
            await asyncio.to_thread(cluster.stop, name, grace_s=grace_s("workers/decode.yaml"))
            cluster.forget(name)
        last = opened.mark()
        await opened.until_resumed(last.running, last.at)
    of_green = await answers(cluster, specs)
    told = {number for number in of_blue if of_blue[number] != of_green[number]}
    done = [run for run in opened.load.done if not run.error]
    outcomes = [(run.spec.number, run.answer.outcome()) for run in done]
    mixed = [number for number, outcome in outcomes if outcome not in (of_blue[number], of_green[number])]
    of_each = [
        sum(told_by[number] == outcome for number, outcome in outcomes if number in told)
        for told_by in (of_blue, of_green)
    ]
    row = opened.row
    cluster.keep_logs |= row.lost > 0
    say(f"blue to green: {row.answers} answers, {row.lost} lost, {len(mixed)} mixed; {of_each} told apart")
    assert all(of_each), "nothing tells the answers of one from those of the other"
    assert (row.lost, mixed, row.leaks) == (0, [], []), [run.error for run in opened.load.lost()]
