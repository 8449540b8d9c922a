"""The images that few clusters have: Phoenix, workers with vLLM. A test is skipped where its image is missing."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.containers.cluster import ContainerCluster, Podman, Unavailable, image_name
from tests.containers.test_containers import say
from tests.faults.harness import REPOSITORY
from tests.free_ports import free_port

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

LIMIT_S = 120.0
START_VLLM_S = 300.0
NUM_TOKENS = 24
PHASES = {"queue", "route", "prefill", "kv_transfer", "decode"}
OF_WORKERS = {"prefill.chunk", "kv_transfer.send", "decode.steps"}


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    try:
        return Podman(tmp_path_factory.mktemp("podman"))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        yield client


def need(podman: Podman, image: str) -> None:
    if podman.run("image", "exists", image_name(image), check=False).returncode:
        pytest.skip(f"{image_name(image)} is missing; `make images ARGS={image}` builds it")


async def ask(client: httpx.AsyncClient, cluster: ContainerCluster, model: str, **headers: str) -> dict[str, Any]:
    """The only choice of a completion."""
    body = {"model": model, "prompt": "def length(", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    url = f"http://{cluster['gateway-0'].http}/v1/completions"
    answer = (await client.post(url, json=body, headers=headers)).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    (choice,) = answer["choices"]
    return dict(choice)


async def until(client: httpx.AsyncClient, url: str, **asked: str) -> dict[str, Any]:
    """What is answered once somebody answers."""
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            return dict((await client.get(url, params=asked)).raise_for_status().json())
        except (httpx.HTTPError, ValueError):
            assert time.monotonic() < end, url
            await asyncio.sleep(0.5)


async def test_phoenix_shows_a_request_from_its_arrival_to_its_last_step(
    podman: Podman, client: httpx.AsyncClient
) -> None:
    need(podman, "phoenix")
    port, trace = free_port(), uuid.uuid4().hex
    environment = {"COMPOSE_PROFILES": "cpu,phoenix", "OTLP": "http://phoenix:4317", "PHOENIX_PORT": str(port)}
    with ContainerCluster(prefill=1, decode=1, podman=podman, others=("phoenix",), environment=environment) as cluster:
        projects = await until(client, f"http://127.0.0.1:{port}/v1/projects")
        assert [one["name"] for one in projects["data"]] == ["default"]
        await cluster.ready()
        await ask(client, cluster, "tandem-demo", traceparent=f"00-{trace}-00f067aa0ba902b7-01")
        wanted, end = PHASES | OF_WORKERS | {"text_completion tandem-demo"}, time.monotonic() + LIMIT_S
        names: set[str] = set()
        while not names >= wanted:
            assert time.monotonic() < end, f"seen {sorted(names)}"
            await asyncio.sleep(0.5)
            spans = await until(client, f"http://127.0.0.1:{port}/v1/projects/default/spans", limit="1000")
            names = {one["name"] for one in spans["data"] if one["context"]["trace_id"] == trace}
        known = podman.inspect(cluster.container("phoenix"))
        assert known["HostConfig"]["ReadonlyRootfs"]
        took_s = cluster.stop("phoenix", grace_s=30)
    size = int(podman.image(image_name("phoenix"))["Size"])
    say(f"Phoenix: {size / 1e6:.1f} MB, {len(names)} kinds of spans, stopped in {took_s:.1f} s")


def make_model(folder: Path) -> None:
    """Writes a checkpoint of sizes for which vLLM has kernels on CPUs; every user may read its parent folder."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.3, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / "demo" / "model" / name, folder)
    for path in (folder.parent, *folder.parent.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


async def test_workers_with_vllm_start_answer_and_pass_the_doctor(
    podman: Podman, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    need(podman, "worker-vllm")
    make_model(tmp_path / "tiny")
    changes = Path(__file__).with_name("vllm.yaml")
    environment = {"MODELS": str(tmp_path), "MODEL": "/models/tiny"}
    with ContainerCluster(prefill=1, decode=1, podman=podman, changes=changes, environment=environment) as cluster:
        await cluster.ready(timeout_s=START_VLLM_S)
        answers = [await ask(client, cluster, "tiny") for _ in range(2)]
        assert answers[0]["text"] == answers[1]["text"]
        doctor = ("python3", "-m", "cli.main", "doctor", "--url", "http://gateway:8000", "--model", "/models/tiny")
        said = podman.run("exec", cluster.container("decode-0"), *doctor, check=False)
        took = {name: cluster.stop(name, grace_s=60) for name in cluster.workers}
    say(f"vLLM: {said.returncode} {said.stdout.strip()[-600:]}; seconds to stop: {took}")
    assert said.returncode == 0, said.stdout + said.stderr
