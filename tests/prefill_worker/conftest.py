"""A prefill worker without a model, a network or a decode worker: its engine adds tokens up, its links do as told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from prefill_worker.engine_loop import prefill_loop
from prefill_worker.worker import Limits, PrefillWorker
from protos import inference_pb2, worker_pb2
from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout
from services.engine.steps.limits import SequenceLimits
from services.engine.steps.step import NonFiniteLogits, PooledState, SampledToken, StepItem, StepPlan, StepResult
from services.runtime.clock import SYSTEM_CLOCK
from tests.fake_grammars import allowed_token
from tests.fake_links import FakeLinks
from tests.waiting import HANG_LIMIT_S
from worker.engine import EngineFacts
from worker.engine_worker import Around
from worker.metrics import Load, WorkerMetrics

PAGE_SIZE = 4
NUM_PAGES = 16
VOCAB_SIZE = 1000


class GatedRunner:
    """Stands for a model: the next token is the sum of all so far, or the lowest one that the grammar allows.

    Steps wait while `gate` is closed.
    """

    def __init__(self) -> None:
        import threading

        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.num_begun = 0
        self.num_steps = 0
        self.closes_gate = False
        """After each step."""

    def run(self, plan: StepPlan) -> StepResult:
        self.num_begun += 1
        assert self.gate.wait(HANG_LIMIT_S)
        if self.error is not None:
            raise self.error
        self.num_steps += 1
        if self.closes_gate:
            self.gate.clear()
        return StepResult([self._outcome(item) for item in plan.items])

    def _outcome(self, item: StepItem) -> SampledToken | PooledState | NonFiniteLogits | None:
        if item.num_pooled:
            token_ids = item.sequence.token_ids
            return PooledState(np.array([sum(token_ids), len(token_ids)], np.float32))
        if not item.is_sampled:
            return None
        allowed = item.sequence.allowed_tokens()
        if allowed is None:
            return SampledToken(sum(item.sequence.token_ids) % VOCAB_SIZE)
        token_id = allowed_token(allowed)
        return NonFiniteLogits("nothing is allowed") if token_id is None else SampledToken(token_id)


class Gateway:
    """One session with the worker: sends commands, keeps what comes up."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._commands: asyncio.Queue[worker_pb2.PrefillCommand | None] = asyncio.Queue()
        self.events: list[worker_pb2.WorkerEvent] = []
        self.loads: list[worker_pb2.WorkerLoad] = []
        self.gpus: list[worker_pb2.GpuFacts] = []
        self._arrived = asyncio.Condition()
        hello = worker_pb2.SessionHello(gateway_incarnation=f"{id(self):032x}")
        self._commands.put_nowait(worker_pb2.PrefillCommand(hello=hello))
        self._task = asyncio.create_task(self._read(worker))

    async def _read(self, worker: PrefillWorker) -> None:
        async for message in worker.sessions.serve(self._sent()):
            async with self._arrived:
                self.events += message.events
                self.loads.append(message.load)
                self.gpus += [message.gpu] if message.HasField("gpu") else []
                self._arrived.notify_all()

    async def _sent(self) -> AsyncIterator[worker_pb2.PrefillCommands]:
        while (command := await self._commands.get()) is not None:
            yield worker_pb2.PrefillCommands(commands=[command])

    def prefill(self, request_id: str, prompt: list[int], *, attempt: int = 1, **fields: Any) -> None:
        sampling = inference_pb2.SamplingParams(
            max_tokens=fields.pop("max_tokens", 8), temperature=0.0, seed=fields.pop("seed", 1)
        )
        pull = fields.pop("pull", None)
        if "logprobs" in fields:
            sampling.logprobs = fields.pop("logprobs")
        spec = worker_pb2.SequenceSpec(
            id=worker_pb2.AttemptId(request_id=request_id, attempt=attempt),
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_ms=fields.pop("deadline_ms", 30_000),
            **fields,
        )
        message = worker_pb2.Prefill(sequence=spec, decode_address="decode:1", decode_incarnation="d" * 32, pull=pull)
        self._commands.put_nowait(worker_pb2.PrefillCommand(prefill=message))

    def embed(
        self,
        request_id: str,
        prompt: list[int],
        *,
        pooling: Any = worker_pb2.POOLING_LAST,
        dimensions: int = 0,
        traceparent: str = "",
    ) -> None:
        spec = worker_pb2.SequenceSpec(
            id=worker_pb2.AttemptId(request_id=request_id, attempt=1),
            prompt_token_ids=prompt,
            sampling=inference_pb2.SamplingParams(max_tokens=1, temperature=0.0, seed=1),
            deadline_ms=30_000,
            traceparent=traceparent,
        )
        message = worker_pb2.Embed(sequence=spec, pooling=pooling, dimensions=dimensions, is_normalized=True)
        self._commands.put_nowait(worker_pb2.PrefillCommand(embed=message))

    def cancel(self, request_id: str, *, attempt: int = 1, wants_word: bool = False) -> None:
        attempt_id = worker_pb2.AttemptId(request_id=request_id, attempt=attempt)
        cancel = worker_pb2.Cancel(id=attempt_id, wants_word=wants_word)
        self._commands.put_nowait(worker_pb2.PrefillCommand(cancel=cancel))

    def send(self, command: worker_pb2.PrefillCommand) -> None:
        self._commands.put_nowait(command)

    def kinds(self, request_id: str, *, attempt: int = 1) -> list[str | None]:
        return [e.WhichOneof("event") for e in self._events_of(request_id, attempt)]

    async def event(self, request_id: str, kind: str, *, attempt: int = 1) -> Any:
        """The first event of a kind, as soon as it is here."""

        def found() -> Any:
            of_kind = [e for e in self._events_of(request_id, attempt) if e.WhichOneof("event") == kind]
            return of_kind[0] if of_kind else None

        async with asyncio.timeout(HANG_LIMIT_S), self._arrived:
            await self._arrived.wait_for(found)
            return getattr(found(), kind)

    def _events_of(self, request_id: str, attempt: int) -> list[worker_pb2.WorkerEvent]:
        return [e for e in self.events if (e.id.request_id, e.id.attempt) == (request_id, attempt)]

    async def leave(self) -> None:
        """Ends the stream as a lost connection would."""
        self._commands.put_nowait(None)
        await asyncio.wait((self._task,))

    def drop(self) -> None:
        self._task.cancel()


@dataclass
class Bench:
    """A worker and what surrounds it."""

    worker: PrefillWorker
    links: FakeLinks
    runner: GatedRunner
    allocator: PageAllocator
    metrics: WorkerMetrics
    gateways: list[Gateway] = field(default_factory=list)

    def gateway(self) -> Gateway:
        self.gateways.append(Gateway(self.worker))
        return self.gateways[-1]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds that no event announces."""
        async with asyncio.timeout(HANG_LIMIT_S):
            while not holds():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.002)

    async def until_free(self, *, num_cached: int | None = None) -> None:
        """Waits until no page is held, `num_cached` are cached, all others are free, and every account is even."""

        def is_even() -> bool:
            load = self.worker.load()
            cached = load.pages_cached if num_cached is None else num_cached
            return load == Load(NUM_PAGES, NUM_PAGES - cached, cached, 0, 0)

        await self.until(is_even)
        assert not self.worker._tasks
        assert not len(self.worker._attempts)
        self.allocator.check_integrity()


@pytest.fixture
async def make_bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Bench]]:
    # Far away, so that what is kept is still there however long a test takes.
    monkeypatch.setattr("prefill_worker.kept.KEPT_S", 600.0)
    benches: list[Bench] = []

    def make(
        *,
        chunk_tokens: int = 8,
        max_waiting: int = 4,
        step_timeout_s: float = 0.0,
        embeds: bool = True,
        **fields: Any,
    ) -> Bench:
        allocator = PageAllocator(NUM_PAGES)
        runner = GatedRunner()
        links = FakeLinks()
        layout = PageLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=PAGE_SIZE, dtype=torch.float32)
        parts = SimpleNamespace(
            pool=SimpleNamespace(num_pages=NUM_PAGES, layout=layout),
            allocator=allocator,
            runner=runner,
            first_steps=(),
            tier=None,
        )
        metrics = WorkerMetrics(worker_id="prefill-0")
        around = Around(
            incarnation="a" * 32,
            links=cast(Any, links),
            metrics=metrics,
            clock=SYSTEM_CLOCK,
            step_timeout_s=step_timeout_s,
            **fields,
        )
        worker = PrefillWorker(
            around,
            EngineFacts(SequenceLimits(200, VOCAB_SIZE, NUM_PAGES, PAGE_SIZE), "a model", embeds=embeds),
            make_engine=lambda on_report: prefill_loop(
                cast(Any, parts), chunk_tokens=chunk_tokens, clock=SYSTEM_CLOCK, on_report=on_report
            ),
            limits=Limits(chunk_tokens=chunk_tokens, max_waiting=max_waiting),
        )
        benches.append(Bench(worker, links, runner, allocator, metrics))
        return benches[-1]

    yield make
    for bench in benches:
        bench.runner.gate.set()
        bench.links.may_ask.set()
        bench.links.may_reserve.set()
        for transfer in bench.links.transfers.values():
            transfer.may_abort.set()
        await bench.worker.close()
        if not bench.worker.failed.done():
            assert bench.allocator.num_free_pages + bench.allocator.num_cached_pages == NUM_PAGES
            bench.allocator.check_integrity()
        for gateway in bench.gateways:
            gateway.drop()
            await asyncio.wait((gateway._task,))
        if bench.worker.failed.done():
            bench.worker.failed.exception()
