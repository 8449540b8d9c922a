"""What runs while faults come: a fixed set of requests, their undisturbed answers, and streams that never pause."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from protos import inference_pb2
from tests.faults.client import (
    Answer,
    Broken,
    NotConnected,
    Refused,
    grpc_channel,
    grpc_generate,
    http_generate,
    http_json,
)
from tests.faults.harness import REPOSITORY, FaultCluster

ANSWER_TIMEOUT_S = 90.0
PROBE_INTERVAL_S = 0.1
STOPS = ("\n\n", "return", "self.", "def ")


@dataclass(frozen=True)
class Spec:
    """One request. The same again must give the same answer."""

    number: int
    is_http: bool
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    tenant: str = ""
    """Whose pages it may find at the workers. Has no part in the answer."""

    @property
    def min_tokens(self) -> int:
        """With a stop text the answer would often end at once."""
        return self.max_tokens // 2 if self.stop else 0

    def message(self, request_id: str = "") -> inference_pb2.GenerateRequest:
        sampling = inference_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            seed=self.seed,
            stop=self.stop,
            ignore_eos=True,
        )
        if self.logprobs is not None:
            sampling.logprobs = self.logprobs
        return inference_pb2.GenerateRequest(
            request_id=request_id, text=self.prompt, sampling=sampling, tenant=self.tenant
        )

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "tenant": self.tenant or None,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.n,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.stop:
            body["stop"] = list(self.stop)
        if self.logprobs is not None:
            body["logprobs"] = self.logprobs
        return body


def make_specs(chance: random.Random, count: int, *, tokens: tuple[int, int] = (64, 256)) -> list[Spec]:
    """A mix: greedy and seeded, with and without stop texts, both APIs, n=2, prompts of about 20 to 400 tokens."""
    text = "".join((REPOSITORY / "benchmarks" / name).read_text() for name in ("cluster.py", "system.py", "gateway.py"))
    specs = []
    for number in range(count):
        start = chance.randrange(len(text) - 1400)
        is_http = number % 2 == 1
        specs.append(
            Spec(
                number=number,
                is_http=is_http,
                # Three to four characters are a token.
                prompt=text[start : start + chance.randrange(70, 1200)],
                max_tokens=chance.randrange(*tokens),
                temperature=0.0 if number % 4 < 2 else 0.8,
                seed=number,
                stop=tuple(chance.sample(STOPS, 2)) if number % 3 == 0 else (),
                n=2 if number % 8 == 3 else 1,
                logprobs=2 if number % 8 == 4 else None,
            )
        )
    return specs


@dataclass
class Run:
    """One request on its way, or what became of it."""

    spec: Spec
    answer: Answer
    error: str = ""
    is_over: bool = False
    gateway: str = ""
    num_resumed: int = 0
    has_begun_anew: bool = False

    @property
    def last_token_at(self) -> float:
        return self.answer.arrivals[-1][0] if self.answer.arrivals else 0.0


Runner = Callable[["Clients", Run], Awaitable[None]]


class Clients:
    """Connections of the load's clients to all gateways, and the load balancer before them.

    It asks each gateway whether it is ready. A client that is refused by one goes to another.
    """

    def __init__(self, cluster: FaultCluster, chance: random.Random) -> None:
        self.cluster = cluster
        self.chance = chance
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._is_ready = dict.fromkeys(cluster.names("gateway"), True)
        self._balancer = asyncio.create_task(self._balance())

    def gateway(self, *, other_than: str = "") -> str:
        """Any gateway in rotation, or any other one."""
        names = [name for name, is_ready in self._is_ready.items() if is_ready and name != other_than]
        return self.chance.choice(names or self.cluster.names("gateway"))

    def refused(self, gateway: str) -> None:
        """Nobody listens there: out of rotation until it is ready again."""
        if len(self._is_ready) > 1:
            self._is_ready[gateway] = False

    async def _balance(self) -> None:
        while len(self._is_ready) > 1:
            for name in self._is_ready:
                try:
                    await http_json(self.cluster[name].http, "/ready", timeout_s=1.0)
                    self._is_ready[name] = True
                except (Refused, Broken, TimeoutError):
                    self._is_ready[name] = False
            await asyncio.sleep(PROBE_INTERVAL_S)

    def channel(self, gateway: str) -> grpc.aio.Channel:
        if gateway not in self._channels:
            options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
            self._channels[gateway] = grpc_channel(self.cluster[gateway].grpc, options)
        return self._channels[gateway]

    async def close(self) -> None:
        self._balancer.cancel()
        await asyncio.wait([self._balancer])
        for channel in self._channels.values():
            await channel.close()

    async def run(self, run: Run) -> None:
        """Sends it once; a client whose connection is refused goes to another gateway, as behind a load balancer."""
        end = time.monotonic() + 10.0
        run.gateway = self.gateway()
        while True:
            try:
                await self.send(run)
                return
            except NotConnected:
                if run.answer.arrivals or time.monotonic() > end:
                    raise
                self.refused(run.gateway)
                run.gateway = self.gateway(other_than=run.gateway)
                await asyncio.sleep(0.01)

    async def send(self, run: Run, headers: dict[str, str] | None = None) -> None:
        spec = run.spec
        if spec.is_http:
            named = {"x-request-id": run.answer.request_id} if run.answer.request_id else {}
            address = self.cluster[run.gateway].http
            await http_generate(address, spec.body(), run.answer, headers=named | (headers or {}))
        else:
            await grpc_generate(self.channel(run.gateway), spec.message(run.answer.request_id), run.answer)


@dataclass
class Reference:
    """Undisturbed answers, and how long their parts take."""

    outcomes: dict[int, tuple[Any, ...]]
    prefill_s: dict[int, float]
    """By spec: time to the first token when nothing else runs."""
    loaded_wait_s: float
    """Median over the streams of what a first token takes longer beside the other streams. One number for all specs:
    each of them ran once or twice, and where it stood in the queues then says more of chance than of its prompt."""
    step_s: float
    """Median over the streams of the mean time per later token, beside the other streams."""


@dataclass
class Load:
    """`width` streams at once (one with n=2 counts as two), each followed by the next, until told to stop."""

    clients: Clients
    specs: Sequence[Spec]
    reference: Reference | None = None
    width: int = 16
    runner: Runner | None = None
    is_named: bool = True
    running: list[Run] = field(default_factory=list)
    done: list[Run] = field(default_factory=list)
    _is_stopping: bool = False
    _num: int = 0

    @contextlib.asynccontextmanager
    async def running_streams(self) -> AsyncIterator[Load]:
        """Streams run inside; leaving waits until the last has ended."""
        self._is_stopping = False
        tasks = [asyncio.create_task(self._slot(n)) for n in self._slots()]
        try:
            yield self
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        finally:
            self._is_stopping = True
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            task.result()

    async def run_all(self) -> None:
        """Each spec once, `width` at a time."""
        gate = asyncio.Semaphore(self.width)

        async def one(spec: Spec) -> None:
            async with gate:
                await self._run(spec)

        await asyncio.gather(*map(one, self.specs))

    def lost(self) -> list[Run]:
        return [run for run in self.done if run.error]

    def different(self) -> list[Run]:
        assert self.reference is not None
        expected = self.reference.outcomes
        return [run for run in self.done if not run.error and run.answer.outcome() != expected[run.spec.number]]

    def _slots(self) -> list[int]:
        num_double = 2 if self.width >= 8 and any(spec.n == 2 for spec in self.specs) else 0
        return [1] * (self.width - 2 * num_double) + [2] * num_double

    async def _slot(self, n: int) -> None:
        specs = [spec for spec in self.specs if spec.n == n]
        while not self._is_stopping:
            await self._run(self.clients.chance.choice(specs))

    async def _run(self, spec: Spec) -> Run:
        self._num += 1
        # Every other one is named by its client, and the server names the rest.
        request_id = f"f-{id(self):x}-{self._num}" if self.is_named and self._num % 2 else ""
        # One request in four finds the pages of others: if all did, hardly a page would be handed over.
        tenant = f"{id(self):x}-{self._num}" if self._num % 4 else ""
        run = Run(replace(spec, tenant=tenant), Answer(request_id=request_id))
        self.running.append(run)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await (self.runner(self.clients, run) if self.runner else self.clients.run(run))
        except (Refused, Broken, AssertionError, TimeoutError) as error:
            run.error = repr(error)
            # A client that is refused does not ask again at once for ever.
            await asyncio.sleep(0.05)
        finally:
            run.is_over = True
            self.running.remove(run)
            self.done.append(run)
        return run


async def undisturbed(clients: Clients, specs: Sequence[Spec], *, width: int = 16) -> Reference:
    """Runs everything while nothing fails, twice: beside each other, and the prompts alone. Raises RuntimeError."""
    together = Load(clients, specs, width=width, is_named=False)
    for _ in range(2):
        await together.run_all()
    if together.lost():
        raise RuntimeError(f"undisturbed requests failed: {[run.error for run in together.lost()][:3]}")
    outcomes = {run.spec.number: run.answer.outcome() for run in together.done}
    if any(run.answer.outcome() != outcomes[run.spec.number] for run in together.done):
        raise RuntimeError("an undisturbed request gave two different answers")
    alone: dict[int, float] = {}
    for spec in specs:
        answer = Answer()
        message = replace(spec, tenant=f"alone-{spec.number}").message()
        message.sampling.max_tokens = 1
        message.sampling.min_tokens = 0
        await grpc_generate(clients.channel(clients.gateway()), message, answer)
        alone[spec.number] = answer.ttft_s
    # The first ones all begin at once, which streams that follow each other never do.
    steady = together.done[width:]
    return Reference(
        outcomes=outcomes,
        prefill_s=alone,
        loaded_wait_s=statistics.median(run.answer.ttft_s - alone[run.spec.number] for run in steady),
        step_s=statistics.median(tpot_of(run.answer) for run in steady),
    )


def tpot_of(answer: Answer) -> float:
    """Mean seconds per token after the first, of the first choice."""
    times = [(time_s, count) for time_s, choice, count in answer.arrivals if choice == 0]
    num_later = sum(count for _, count in times[1:])
    return (times[-1][0] - times[0][0]) / num_later if num_later else 0.0


def gaps_of(answer: Answer) -> list[float]:
    """Gaps between arrivals of each choice."""
    gaps = []
    for index in answer.choices:
        times = [time_s for time_s, choice, _ in answer.arrivals if choice == index]
        gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    return gaps


def gap_around(answer: Answer, at: float, until: float) -> float | None:
    """Seconds of the largest gap that has `at` in it or begins between `at` and `until`; None: it had ended by then.

    A choice that had no token yet is measured from `at`.
    """
    largest: float | None = None
    for index in [*answer.choices] or [0]:
        times = [time_s for time_s, choice, _ in answer.arrivals if choice == index]
        before = [time_s for time_s in times if time_s <= at]
        after = [time_s for time_s in times if time_s > at]
        if after:
            points = [before[-1] if before else at, *after]
            window = [b - a for a, b in itertools.pairwise(points) if a <= max(at, until)]
            largest = max([largest or 0.0, *window])
    return largest
