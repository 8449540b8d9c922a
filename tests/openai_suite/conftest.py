"""One `tandem up` with the demo model and a file of API keys, for clients that know nothing of Tandem."""

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI

from benchmarks.cluster import Cluster, running_cluster
from tests.waiting import HANG_LIMIT_S

MODEL = "tandem-demo"


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """API keys by tenant, and under `file` where the cluster finds them."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys, tables = {"file": str(path)}, []
    for tenant, flags in (("operator", ["--admin"]), ("acme", []), ("trial", [])):
        command = [sys.executable, "-m", "cli.main", "keys", "new", "--tenant", tenant, *flags]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        tables.append(made.stdout)
        (keys[tenant],) = [word for word in made.stderr.split() if word.startswith("tandem-")]
    tables.append("[tenant.trial]\nrequests_per_minute = 1\n")
    path.write_text("\n".join(tables))
    return keys


@pytest.fixture(scope="session")
def cluster(keys: dict[str, str]) -> Iterator[Cluster]:
    with running_cluster("--api-keys", keys["file"], "--threads", "1") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def ready(cluster: Cluster) -> None:
    """On a busy machine a worker that gets no time counts as lost until it is heard of again."""
    end = time.monotonic() + HANG_LIMIT_S
    while httpx.get(f"{cluster.http}/ready", timeout=HANG_LIMIT_S).status_code != 200:
        assert time.monotonic() < end, "the cluster is not ready"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def client(cluster: Cluster, keys: dict[str, str]) -> Iterator[openai.OpenAI]:
    """As any program would make it: a base URL and a key."""
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key=keys["acme"], max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(cluster: Cluster, keys: dict[str, str]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key=keys["acme"], max_retries=0) as client:
        yield client


@pytest.fixture
def chat(cluster: Cluster, keys: dict[str, str]) -> ChatOpenAI:
    """LangChain's view of the same server."""
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{cluster.http}/v1",
        api_key=keys["acme"],
        max_retries=0,
        max_tokens=12,
        temperature=0,
        seed=1,
    )
