"""Three models on the same two real workers, by turns: every answer and vector is what its model gives alone."""

import json
import os
import random
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster, running_cluster
from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling
from tandem import LLM

VARIANTS = {"one": "llama-mha", "two": "llama-bias", "three": "qwen2-bias"}
PROMPTS = [[3 + n + position % 40 for position in range(12 + 20 * n)] for n in range(4)]
MAX_TOKENS = 24
TURN_S = 1.0
SIZE = ("--kv-pages", "256", "--threads", "1", "--max-queue-wait-s", "300")
TIMEOUT_S = 300.0

Answers = dict[str, list[list[int]]]
Vectors = dict[str, list[list[float]]]


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {name: checkpoint(variant) for name, variant in VARIANTS.items()}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> Answers:
    """What each model answers to each prompt in one process."""
    sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS)
    return {
        name: Engine(load_engine(folder, num_pages=256), chunk_tokens=48).generate(PROMPTS, sampling)
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def vectors(folders: dict[str, Path]) -> Vectors:
    """The vector that each model gives each prompt in one process."""
    found: Vectors = {}
    for name, folder in folders.items():
        with LLM(folder, embeddings="on", kv_pages=256, threads=1) as llm:
            found[name] = [output.outputs.embedding for output in llm.embed(PROMPTS)]
    return found


@pytest.fixture(scope="module")
def cluster(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tmp_path_factory.mktemp("models") / "models.toml"
    file.write_text("".join(f"[[model]]\nname = '{n}'\npath = '{p}'\nshare = 'all'\n" for n, p in folders.items()))
    with running_cluster("--models", str(file), "--model-turn-s", str(TURN_S), "--embeddings", "on", *SIZE) as running:
        yield running


def ask(cluster: Cluster, model: str, number: int) -> list[int]:
    body = {
        "model": model, "prompt": PROMPTS[number], "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = post(cluster, "/v1/completions", body)["choices"][0]["token_ids"]
    return tokens


def embed(cluster: Cluster, model: str, number: int) -> list[float]:
    vector: list[float] = post(cluster, "/v1/embeddings", {"model": model, "input": PROMPTS[number]})["data"][0][
        "embedding"
    ]
    return vector


def post(cluster: Cluster, path: str, body: Any) -> Any:
    request = urllib.request.Request(
        cluster.http + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    until_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            said = json.load(error)["error"]
            # While the only worker of a role starts again, the wait may be longer than what is promised.
            if said["code"] != "server_overloaded" or time.monotonic() > until_s:
                raise AssertionError(said) from error
            time.sleep(float(error.headers["retry-after"]))


def switch_counts(cluster: Cluster) -> dict[str, int]:
    """How many switches there were, by where the model was."""
    found = re.findall(
        r'tandem_model_switch_seconds_count\{from="([a-z]+)",model="[a-z]+"\} (\d+)', cluster.get_text("/metrics")
    )
    return {origin: sum(int(count) for its, count in found if its == origin) for origin in ("asleep", "disk")}


def until_both_are_awake(cluster: Cluster) -> dict[str, Any]:
    """Waits for the worker that the last answers did without; returns the turns then."""
    until_s = time.monotonic() + TIMEOUT_S
    while True:
        turns: dict[str, Any] = cluster.get("/cluster")["turns"]
        if [group["state"] for group in turns["groups"]] == ["awake"]:
            return turns
        assert time.monotonic() < until_s, turns
        time.sleep(0.05)


def run_load(
    cluster: Cluster, alone: Answers, vectors: Vectors, num_requests: int, *, num_clients: int, seed: int = 7
) -> int:
    """Asks at random, every third time for a vector; returns how many answers were another model's, or another one."""
    chance = random.Random(seed)
    asked = [(chance.choice(sorted(VARIANTS)), chance.randrange(len(PROMPTS))) for _ in range(num_requests)]

    def is_wrong(place: int) -> bool:
        model, number = asked[place]
        if place % 3:
            return ask(cluster, model, number) != alone[model][number]
        return embed(cluster, model, number) != vectors[model][number]

    with ThreadPoolExecutor(num_clients) as pool:
        return sum(pool.map(is_wrong, range(num_requests)))


def kill_now_and_then(cluster: Cluster, over: threading.Event, killed: list[int], *, every_s: float) -> None:
    chance = random.Random(11)
    while not over.wait(chance.uniform(0.5, 1.5) * every_s):
        workers: list[dict[str, Any]] = cluster.get("/cluster")["workers"]
        if workers:
            victim = chance.choice(workers)["pid"]
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)


def test_answers_are_those_of_each_model_alone_whichever_is_awake(
    cluster: Cluster, alone: Answers, vectors: Vectors
) -> None:
    assert len({tuple(tokens) for model in alone.values() for tokens in model}) == len(VARIANTS) * len(PROMPTS)
    assert cluster.get("/cluster")["turns"]["models"] == {"one": "awake", "two": "on_disk", "three": "on_disk"}
    assert run_load(cluster, alone, vectors, 18, num_clients=6) == 0
    counts = switch_counts(cluster)
    assert counts["disk"] >= 2
    assert sum(counts.values()) < 18, "a switch is for at least one request"
    turns = until_both_are_awake(cluster)
    assert sorted(turns["models"].values()) == ["asleep", "awake", "on_disk"]
    assert {one["id"]: one["state"] for one in cluster.get("/v1/models")["data"]} == turns["models"]


@pytest.mark.slow
def test_three_hundred_requests_with_workers_killed(cluster: Cluster, alone: Answers, vectors: Vectors) -> None:
    over, killed = threading.Event(), list[int]()
    killer = threading.Thread(target=kill_now_and_then, args=(cluster, over, killed), kwargs={"every_s": 12.0})
    before, began_s = switch_counts(cluster), time.monotonic()
    killer.start()
    try:
        num_different = run_load(cluster, alone, vectors, 300, num_clients=12)
    finally:
        over.set()
        killer.join()
    took_s = time.monotonic() - began_s
    counts = {origin: count - before[origin] for origin, count in switch_counts(cluster).items()}
    turns = cluster.get("/cluster")["turns"]
    print(f"300 requests in {took_s:.0f} s, {len(killed)} killed, switches {counts}, usual {turns['switch_s']} s")  # noqa: T201 - figures, for people
    assert num_different == 0
    assert killed
    assert sum(counts.values()) < 150, "they thrash"
