"""Redis as an administrator wants it: a user with few rights, and sentinels that let another server take over."""

import asyncio
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from services.cluster.embedded_redis import EmbeddedRedis
from tests.faults import cases
from tests.faults.client import connected, http_json, http_request, read_head, read_pieces
from tests.faults.harness import REPOSITORY, FaultCluster
from tests.faults.load import make_specs
from tests.faults.report import table
from tests.limited_redis import LimitedRedis
from tests.sentinels import SentinelSet, sentinel_set
from tests.waiting import HANG_LIMIT_S

OPTIONS = cases.Options(seed=7, is_quiet=True)
ROWS = 6
BATCH_TIMEOUT_S = HANG_LIMIT_S
FAILOVER_S = HANG_LIMIT_S
"""Most time until each gateway writes to the next primary."""


@dataclass
class GuardedCluster(FaultCluster):
    """A cluster on a Redis that the test has made."""

    server: Any = field(kw_only=True)

    def _make_redis(self) -> EmbeddedRedis:
        return self.server  # type: ignore[no-any-return]

    def _admin_url(self) -> str:
        return str(self.server.admin_url)


class WatchedRedis:
    """The sentinels' URL for programs, and the primary for tests that look at its keys."""

    def __init__(self, watched: SentinelSet) -> None:
        self._watched = watched

    @property
    def url(self) -> str:
        return self._watched.url

    def start(self) -> None:
        """It runs."""

    def stop(self) -> None:
        """It ends with the test."""


class FailoverCluster(GuardedCluster):
    async def active_placements(self) -> list[str]:
        return []  # what the last moment of the primary wrote expires


@pytest.fixture(scope="module")
def watched() -> Iterator[SentinelSet]:
    with sentinel_set() as found:
        yield found


async def test_a_failover_under_load_loses_no_answer_and_changes_none(watched: SentinelSet) -> None:
    specs = make_specs(random.Random(OPTIONS.seed), 12, tokens=(16, 64))
    with FailoverCluster(server=WatchedRedis(watched), gateways=2, kv_pages=1024) as cluster:
        async with cases.under_load(cluster, "redis_failover", OPTIONS, specs, cases.resuming) as opened:
            await asyncio.sleep(1.0)
            first = watched.primary
            watched.kill(first, signal.SIGKILL)
            await asyncio.to_thread(watched.failed_over, first)
            await asyncio.sleep(2.0)  # some of the load goes by on the next primary
            await cluster.ready()
            async with asyncio.timeout(FAILOVER_S):
                for name in cluster.names("gateway"):
                    while not (await cluster.topology(name))["redis"]["available"]:  # noqa: ASYNC110 - of another process
                        await asyncio.sleep(0.1)
            cluster.kill("gateway-0")  # what it has told the next primary is how the other one continues
            await cluster.replace("gateway-0")
            await cluster.ready()
    assert opened.row.answers > 10
    assert opened.row.is_good, table([opened.row])


async def test_the_rights_of_the_guide_suffice_for_everything() -> None:
    specs = make_specs(random.Random(OPTIONS.seed), 12, tokens=(16, 64))
    server = LimitedRedis()
    with GuardedCluster(server=server, gateways=2, kv_pages=1024) as cluster:
        async with cases.under_load(cluster, "rights", OPTIONS, specs, cases.resuming) as opened:
            opened.has_lost_gateway = True
            batch = await run_batch(cluster["gateway-1"].http)
            cluster.kill("gateway-0")
            await cluster.replace("gateway-0")
            await cluster.ready()
        address = cluster["gateway-1"].http
        async with asyncio.timeout(FAILOVER_S):
            while "tandem_redis_up 1.0" not in await http_json(address, "/metrics"):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)
        doctor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli.main", "doctor", f"--redis={server.url}", "--json"),
            *("--url", f"http://{cluster['gateway-1'].http}"),
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
        )
        findings = msgspec.json.decode((await doctor.communicate())[0])
        refused = server.refused()
    assert refused == []
    assert opened.row.is_good, table([opened.row])
    assert batch["request_counts"] == {"total": ROWS, "completed": ROWS, "failed": 0}
    assert [finding["level"] for finding in findings if finding["subject"] == "redis"].count("bad") == 0


async def run_batch(address: str) -> Any:
    """A file of rows through a batch, to its end."""
    row = {"method": "POST", "url": "/v1/completions", "body": {"model": "model", "prompt": "def f(", "max_tokens": 4}}
    lines = b"".join(msgspec.json.encode({"custom_id": f"{n}", **row}) + b"\n" for n in range(ROWS))
    parts = [
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="rows.jsonl"\r\n\r\n' + lines + b"\r\n--x--\r\n",
    ]
    async with connected(address) as (reader, writer):
        request = http_request("POST", "/v1/files", b"".join(parts))
        writer.write(request.replace(b"application/json", b"multipart/form-data; boundary=x"))
        status, headers = await read_head(reader)
        text = b"".join([piece async for piece in read_pieces(reader, headers)])
        assert status == 200, text
    file_id = msgspec.json.decode(text)["id"]
    order = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await http_json(address, "/v1/batches", order)
    async with asyncio.timeout(BATCH_TIMEOUT_S):
        while batch["status"] not in ("completed", "failed", "expired"):
            await asyncio.sleep(0.1)
            batch = await http_json(address, f"/v1/batches/{batch['id']}")
    return batch
