"""Two real models in a cluster that one command started: each answers as it does alone, one stands in for the other."""

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster, running_cluster
from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling
from tests.waiting import HANG_LIMIT_S, wait_until

DEMO = Path(__file__).resolve().parents[3] / "demo"
FOLDERS = {"large": DEMO / "model", "small": DEMO / "draft"}
PROMPTS = [[5 + 3 * n + position % 40 for position in range(10 + 30 * n)] for n in range(4)]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """What each model answers to each prompt in one process."""
    sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS)
    answers = {
        name: Engine(load_engine(folder, num_pages=256), chunk_tokens=48).generate(PROMPTS, sampling)
        for name, folder in FOLDERS.items()
    }
    assert answers["large"] != answers["small"]
    return answers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tmp_path_factory.mktemp("models") / "models.toml"
    file.write_text(
        f"[[model]]\nname = 'large'\npath = '{FOLDERS['large']}'\naliases = ['default']\nfallback = ['small']\n"
        f"[[model]]\nname = 'small'\npath = '{FOLDERS['small']}'\nprefill = 0\n"
    )
    with running_cluster("--models", str(file), "--kv-pages", "256", "--threads", "1") as running:
        yield running


def ask(cluster: Cluster, model: str, prompt: Any, **fields: Any) -> tuple[list[list[int]], dict[str, str]]:
    """The tokens of each answer, and the headers."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    request = urllib.request.Request(
        cluster.http + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HANG_LIMIT_S) as response:
        answer = json.load(response)
        headers = {key.lower(): value for key, value in response.headers.items()}
    assert answer["model"] == headers["x-tandem-model"]
    return [choice["token_ids"] for choice in answer["choices"]], headers


def workers(cluster: Cluster) -> dict[str, Any]:
    return {worker["id"]: worker for worker in cluster.get("/cluster")["workers"]}


def test_one_command_serves_two_models_each_as_it_is_alone(
    cluster: Cluster, alone: dict[str, list[list[int]]], wait_until_idle: Callable[[Cluster], Any]
) -> None:
    served = {name: (worker["role"], worker["model"]) for name, worker in workers(cluster).items()}
    assert served == {
        "prefill-large-0": ("prefill", "large"),
        "decode-large-0": ("decode", "large"),
        "decode-small-0": ("decode", "small"),
    }
    for _ in range(2):
        for name, model in (("large", "large"), ("default", "large"), ("small", "small")):
            tokens, headers = ask(cluster, name, PROMPTS)
            assert tokens == alone[model]
            assert headers["x-tandem-model"] == model
            assert "x-tandem-fallback" not in headers
    wait_until_idle(cluster)


def test_the_other_model_stands_in_while_the_workers_of_one_are_gone(
    cluster: Cluster, alone: dict[str, list[list[int]]], wait_until_idle: Callable[[Cluster], Any]
) -> None:
    victim = workers(cluster)["decode-large-0"]["pid"]
    # Stopped and not killed at first, so that nobody starts it again before it was asked for.
    os.kill(victim, signal.SIGSTOP)
    try:
        wait_until(lambda: workers(cluster).get("decode-large-0", {}).get("state") != "ready")
        tokens, headers = ask(cluster, "default", PROMPTS, allow_fallback=True)
        assert tokens == alone["small"]
        assert headers["x-tandem-fallback"] == "large -> small; reason=unavailable"
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(cluster, "large", PROMPTS)
        with contextlib.closing(refused.value):
            assert refused.value.code == 503
    finally:
        os.kill(victim, signal.SIGKILL)
    # It comes back, and with it the answers of the model that was asked for.
    wait_until(lambda: workers(cluster).get("decode-large-0", {}).get("pid") not in (None, victim))
    wait_until(lambda: workers(cluster).get("decode-large-0", {}).get("state") == "ready")
    tokens, headers = ask(cluster, "large", PROMPTS, allow_fallback=True)
    assert tokens == alone["large"]
    assert "x-tandem-fallback" not in headers
    wait_until_idle(cluster)
