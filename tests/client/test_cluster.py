"""The clients and the examples against a real cluster: `tandem up`, and a second gateway that can be killed."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tandem_client import (
    AlreadyExists,
    AsyncClient,
    Client,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    NotFound,
    Request,
    RetryPolicy,
    TandemError,
    Unavailable,
)

from benchmarks.cluster import running_cluster
from services.cluster.embedded_redis import EmbeddedRedis
from tests.free_ports import free_port
from tests.waiting import HANG_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "demo" / "model"
START_TIMEOUT_S = HANG_LIMIT_S
LONG = 300
"""Tokens of an answer that is not over before its gateway is killed."""

PATIENT = RetryPolicy(max_attempts=30, budget_reserve=100)
"""On a busy machine a gateway loses its workers for seconds."""

names = (f"test-{number}" for number in itertools.count())


@dataclass
class World:
    """One cluster with the gateway of `tandem up` at `address`, and room for more gateways."""

    address: str
    redis_url: str
    folder: Path

    def gateway(self) -> "Gateway":
        """One more gateway of the cluster, ready."""
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "gateway",
            f"--redis={self.redis_url}",
            f"--model={MODEL}",
            "--model-name=tandem-demo",
        ]
        command += [f"--grpc-port={port}", f"--http-port={free_port()}", "--ttft-target-s=0"]
        with (self.folder / f"gateway-{port}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        gateway = Gateway(f"127.0.0.1:{port}", process)
        end = time.monotonic() + START_TIMEOUT_S
        with Client(gateway.address, retries=PATIENT) as client:
            while not client.is_serving():
                if process.poll() is not None or time.monotonic() > end:
                    gateway.kill()
                    raise RuntimeError(f"the gateway did not start:\n{Path(log.name).read_text()}")
                time.sleep(0.05)
            # It listens before it has met the workers.
            try:
                client.generate(Request("a", max_tokens=1), timeout_s=START_TIMEOUT_S)
            except TandemError:
                gateway.kill()
                raise
        return gateway


@dataclass
class Gateway:
    """A gateway as a process of its own."""

    address: str
    process: "subprocess.Popen[bytes]"

    def __enter__(self) -> "Gateway":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        """At once, without a goodbye."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with EmbeddedRedis() as redis, running_cluster("--redis", redis.url, "--threads", "1") as cluster:
        yield World(cluster.grpc, redis.url, tmp_path_factory.mktemp("gateways"))


def test_a_blocking_client_meets_a_real_gateway(world: World) -> None:
    with Client(world.address, retries=PATIENT) as client:
        assert client.is_serving()
        request = Request("def length(", max_tokens=20, seed=5, logprobs=2, ignore_eos=True)
        whole = client.generate(request)
        assert len(whole.token_ids) == len(whole.logprobs) == 20
        assert {len(entry.top) for entry in whole.logprobs} == {2}
        assert (whole.finish_reason, whole.model) == (FinishReason.LENGTH, "tandem-demo")
        assert whole.usage is not None
        assert (whole.usage.completion_tokens, whole.usage.prompt_tokens > 0) == (20, True)
        streamed = client.stream(request).answer()
        assert (streamed.text, streamed.token_ids) == (whole.text, whole.token_ids)
        assert client.detokenize(whole.token_ids) == whole.text
        tokens = client.tokenize("def length(", without_special_tokens=True)
        assert client.detokenize(tokens) == "def length("
        assert [model.name for model in client.list_models()] == ["tandem-demo"]
        topology = client.topology()
        assert sorted(worker.role for worker in topology.workers) == ["decode", "prefill"]
        assert {worker.state for worker in topology.workers} == {"ready"}
        with client.watch_topology() as watch:
            assert len(next(watch).workers) == 2


def test_errors_of_a_real_gateway_have_their_class_and_field(world: World) -> None:
    with Client(world.address, retries=PATIENT) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.generate(Request("a", top_p=2.0))
        assert caught.value.field == "sampling.top_p"
        with pytest.raises(NotFound):
            client.generate(Request("a", model="nobody"))
        with pytest.raises(NotFound):
            client.resume("nobody-knows-it", 0).answer()
        # The gateway refuses at once what it knows to be too late.
        with pytest.raises((DeadlineExceeded, Unavailable)):
            client.generate(Request("a", max_tokens=LONG, ignore_eos=True), timeout_s=0.001)
        key = next(names)
        client.generate(Request("a", max_tokens=1, idempotency_key=key))
        with pytest.raises(AlreadyExists):
            client.generate(Request("b", max_tokens=1, idempotency_key=key))


async def test_a_stream_that_is_closed_leaves_nothing_running(world: World) -> None:
    async with AsyncClient(world.address, retries=PATIENT) as client:
        async with client.stream(Request("def f(", max_tokens=LONG, ignore_eos=True)) as stream:
            await anext(aiter(stream))
        async with client.watch_topology(timeout_s=HANG_LIMIT_S) as watch:
            async for topology in watch:
                workers = topology.workers
                if topology.running == 0 and all(w.pages.used == w.pages.reserved == w.running == 0 for w in workers):
                    return


@pytest.mark.parametrize("name", ["idempotency_key", "request_id"])
async def test_a_named_stream_survives_its_gateway(world: World, name: str) -> None:
    sampling: dict[str, Any] = {"max_tokens": LONG, "seed": 11, "ignore_eos": True}
    async with AsyncClient(world.address, retries=PATIENT) as client:
        expected = await client.generate(Request("class Stack:", **sampling))
    with world.gateway() as gateway:
        async with AsyncClient([gateway.address, world.address], retries=PATIENT) as client:
            request = Request("class Stack:", **{name: next(names)}, **sampling)
            token_ids: list[int] = []
            text = ""
            stream = client.stream(request)
            async for delta in stream:
                token_ids += delta.token_ids
                text += delta.text
                if gateway.process.poll() is None and len(token_ids) >= 5:
                    assert len(token_ids) < LONG
                    gateway.kill()
            assert stream._order.course.resumes
    assert (tuple(token_ids), text) == (expected.token_ids, expected.text)


async def test_another_client_goes_on_with_a_named_request(world: World) -> None:
    request = Request("import os", max_tokens=60, seed=3, ignore_eos=True, idempotency_key=next(names))
    async with AsyncClient(world.address, retries=PATIENT) as first, first.stream(request) as stream:
        begun = await anext(aiter(stream))
    async with AsyncClient(world.address, retries=PATIENT) as second:
        rest = await second.resume(stream.request_id, stream.next_index).answer()
        whole = await second.generate(request)
    assert begun.token_ids + rest.token_ids == whole.token_ids
    assert begun.text + rest.text == whole.text
    assert rest.request_id == whole.request_id


# The examples


def example(name: str, *arguments: str, text: str = "") -> "subprocess.Popen[str]":
    """Starts one, with `text` on its standard input."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
        cwd="/",
    )
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    process.stdin = None
    return process


def outcome(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Exit code, output and errors, once it has ended."""
    with process:
        out, err = process.communicate(timeout=HANG_LIMIT_S)
    return process.returncode, out, err


def test_the_chat_answers_each_line(world: World) -> None:
    code, out, err = outcome(
        example("chat_stream", f"--address={world.address}", "--max-tokens=12", text="Hello\nAgain\n")
    )
    assert (code, err) == (0, "")
    assert out.count("\n") >= 2
    assert out.strip()


def test_the_named_stream_survives_its_gateway(world: World) -> None:
    with Client(world.address, retries=PATIENT) as client:
        expected = client.generate(Request("class Stack:", max_tokens=LONG, seed=1)).text
    with world.gateway() as gateway:
        arguments = ["class Stack:", f"--key={next(names)}", f"--max-tokens={LONG}"]
        process = example("named_stream", *arguments, f"--addresses={gateway.address},{world.address}")
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1).decode()  # what a reader with a buffer keeps back would be missing
        gateway.kill()
        code, out, err = outcome(process)
    assert (code, first + out) == (0, expected)
    assert err.startswith("request key-")


def test_the_batch_answers_every_prompt_in_order(world: World) -> None:
    prompts = [f"def f{number}(" for number in range(12)]
    process = example(
        "batch", f"--address={world.address}", "--concurrency=4", "--max-tokens=8", text="\n".join(prompts)
    )
    code, out, err = outcome(process)
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert all(line["text"] and 0 < line["tokens"] <= 8 for line in lines)


@pytest.mark.parametrize("name", ["chat_stream", "named_stream"])
def test_an_example_says_what_is_wrong(name: str) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    given = ["a", "--key=k", f"--addresses={nobody}"] if name == "named_stream" else [f"--address={nobody}"]
    code, _, err = outcome(example(name, *given, text="Hello\n"))
    assert code == 1
    assert "Traceback" not in err
    assert "connect" in err.lower()
