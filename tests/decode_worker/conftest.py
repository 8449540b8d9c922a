"""A decode worker without a model, a network or a prefill worker: its engine adds tokens up, transfers do as told."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from decode_worker.engine_loop import decode_loop
from decode_worker.features import StepFeature
from decode_worker.mask_pace import PacedMasks
from decode_worker.worker import DecodeWorker, Limits
from kv_transfer.protocol.messages import TransferId
from protos import inference_pb2, worker_pb2
from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout, PagePool
from services.engine.steps.limits import SequenceLimits
from services.engine.steps.step import NonFiniteLogits, SampledToken, StepPlan, StepResult
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import TandemError
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

    replays_in_chunks = False

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.broken: set[str] = set()
        self.num_steps = 0
        self.pause_at_step = 0

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def compute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.num_steps == self.pause_at_step:
            self.gate.clear()
        assert self.gate.wait(HANG_LIMIT_S)
        if self.error is not None:
            raise self.error
        return StepResult([self._outcome(item) for item in plan.items])

    def _outcome(self, item: Any) -> Any:
        if item.sequence.sequence_id.request_id in self.broken:
            return NonFiniteLogits("NaN")
        if not item.is_sampled:
            return None
        allowed = item.sequence.allowed_tokens()
        if allowed is None:
            return SampledToken(sum(item.sequence.token_ids) % VOCAB_SIZE)
        token_id = allowed_token(allowed)
        return NonFiniteLogits("nothing is allowed") if token_id is None else SampledToken(token_id)


@dataclass
class FakeReceiver:
    """Stands for LinkReceiver: a transfer lets go of its pages at once, or when the test says so."""

    worker: DecodeWorker
    holds_pages: bool = False
    aborted: dict[TransferId, TandemError] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def abort(self, transfer_id: TransferId, error: TandemError) -> None:
        self.aborted[transfer_id] = error
        if not self.holds_pages:
            self.let_go(transfer_id)

    def let_go(self, transfer_id: TransferId) -> None:
        self.tasks.append(asyncio.ensure_future(self.worker.arrivals.release(transfer_id, self.aborted[transfer_id])))

    async def close(self) -> None:
        for transfer_id in self.aborted:
            await self.worker.arrivals.release(transfer_id, self.aborted[transfer_id])


class Gateway:
    """One session with the worker: sends commands, keeps what comes up.

    In `events`, a token that came together with others' is an event of its own.
    """

    def __init__(self, worker: DecodeWorker) -> None:
        self._handles: dict[int, worker_pb2.AttemptId] = {}
        self._commands: asyncio.Queue[worker_pb2.DecodeCommand | None] = asyncio.Queue()
        self.events: list[worker_pb2.WorkerEvent] = []
        self.messages: list[worker_pb2.StepEvents] = []
        self._arrived = asyncio.Condition()
        hello = worker_pb2.SessionHello(gateway_incarnation=f"{id(self):032x}")
        self._commands.put_nowait(worker_pb2.DecodeCommand(hello=hello))
        self._task = asyncio.create_task(self._read(worker))

    async def _read(self, worker: DecodeWorker) -> None:
        async for message in worker.sessions.serve(self._sent()):
            async with self._arrived:
                for event in message.events:
                    self.events += self._told_apart(event)
                self.messages.append(message)
                self._arrived.notify_all()

    def _told_apart(self, event: worker_pb2.WorkerEvent) -> list[worker_pb2.WorkerEvent]:
        step = event.step_tokens
        if not event.HasField("step_tokens"):
            return [event]
        assert not event.HasField("id")
        return [
            worker_pb2.WorkerEvent(id=self._handles[handle], tokens={"first_index": index, "token_ids": [token_id]})
            for handle, index, token_id in zip(step.handles, step.indexes, step.token_ids, strict=True)
        ]

    async def _sent(self) -> AsyncIterator[worker_pb2.DecodeCommands]:
        while (command := await self._commands.get()) is not None:
            yield worker_pb2.DecodeCommands(commands=[command])

    def admit(self, request_id: str, prompt: list[int], *, attempt: int = 1, **fields: Any) -> None:
        is_local, from_decode = fields.pop("local", False), fields.pop("from_decode", False)
        handle = len(self._handles) + 1 if fields.pop("knows_handles", True) else 0
        self._handles[handle] = worker_pb2.AttemptId(request_id=request_id, attempt=attempt)
        sampling = inference_pb2.SamplingParams(max_tokens=fields.pop("max_tokens", 4), temperature=0.0, seed=1)
        spec = worker_pb2.SequenceSpec(
            id=worker_pb2.AttemptId(request_id=request_id, attempt=attempt),
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_ms=fields.pop("deadline_ms", 30_000),
            **fields,
        )
        admit = worker_pb2.Admit(sequence=spec, local_prefill=is_local, from_decode=from_decode, handle=handle)
        self._commands.put_nowait(worker_pb2.DecodeCommand(admit=admit))

    def cancel(self, request_id: str, *, attempt: int = 1, wants_word: bool = False) -> None:
        attempt_id = worker_pb2.AttemptId(request_id=request_id, attempt=attempt)
        cancel = worker_pb2.Cancel(id=attempt_id, wants_word=wants_word)
        self._commands.put_nowait(worker_pb2.DecodeCommand(cancel=cancel))

    def pause(self, request_id: str, *, attempt: int = 1) -> None:
        attempt_id = worker_pb2.AttemptId(request_id=request_id, attempt=attempt)
        self._commands.put_nowait(worker_pb2.DecodeCommand(pause=worker_pb2.Pause(id=attempt_id)))

    def unpause(self, request_id: str, *, attempt: int = 1) -> None:
        attempt_id = worker_pb2.AttemptId(request_id=request_id, attempt=attempt)
        self._commands.put_nowait(worker_pb2.DecodeCommand(unpause=worker_pb2.Unpause(id=attempt_id)))

    def hand_over(self, request_id: str, *, attempt: int = 1, next_attempt: int = 2) -> None:
        attempt_id = worker_pb2.AttemptId(request_id=request_id, attempt=attempt)
        message = worker_pb2.HandOver(
            id=attempt_id, next_attempt=next_attempt, decode_address="other:1", decode_incarnation="d" * 32
        )
        self._commands.put_nowait(worker_pb2.DecodeCommand(hand_over=message))

    def send(self, command: worker_pb2.DecodeCommand) -> None:
        self._commands.put_nowait(command)

    def kinds(self, request_id: str, *, attempt: int = 1) -> list[str | None]:
        return [e.WhichOneof("event") for e in self._events_of(request_id, attempt)]

    def tokens(self, request_id: str, *, attempt: int = 1) -> dict[int, int]:
        """Tokens by index; an index twice is an error."""
        tokens: dict[int, int] = {}
        for event in self._events_of(request_id, attempt):
            for offset, token_id in enumerate(event.tokens.token_ids):
                assert event.tokens.first_index + offset not in tokens
                tokens[event.tokens.first_index + offset] = token_id
        return tokens

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
        """Ends the stream in order."""
        self._commands.put_nowait(None)
        await asyncio.wait((self._task,))

    def drop(self) -> None:
        """Ends the stream as a lost connection would."""
        self._task.cancel()


@dataclass
class Bench:
    """A worker and what surrounds it."""

    worker: DecodeWorker
    receiver: FakeReceiver
    links: FakeLinks
    runner: GatedRunner
    allocator: PageAllocator
    metrics: WorkerMetrics
    gateways: list[Gateway] = field(default_factory=list)

    def gateway(self) -> Gateway:
        self.gateways.append(Gateway(self.worker))
        return self.gateways[-1]

    async def hand_over(self, request_id: str, prompt: list[int], *, attempt: int = 1, first: int = -1) -> None:
        """Does what the receiving end of a transfer does for a prompt whose pages arrived."""
        transfer_id = TransferId(request_id, attempt)
        await self.worker.arrivals.reserve(transfer_id, len(prompt))
        first_token_id = sum(prompt) % VOCAB_SIZE if first < 0 else first
        await self.worker.arrivals.commit(transfer_id, first_token_id=first_token_id, sampling_position=len(prompt) + 1)

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
            none = (0, 0, 0, 0, 0)
            free = Load(
                NUM_PAGES, NUM_PAGES - cached, cached, 0, 0, promised_pages_by_class=none, running_by_class=none
            )
            return load == free

        await self.until(is_even)
        assert not len(self.worker._attempts)
        assert not self.worker.arrivals._receiving
        self.allocator.check_integrity()


@pytest.fixture
async def make_bench() -> AsyncIterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(
        *,
        max_batch: int = 4,
        max_admitted: int = 8,
        chunk_tokens: int = 8,
        step_timeout_s: float = 0.0,
        exact: bool = False,
        swap_bytes: int = 0,
        is_optimistic: bool = True,
        features: Sequence[StepFeature] = (),
        **fields: Any,
    ) -> Bench:
        allocator = PageAllocator(NUM_PAGES)
        runner = GatedRunner()
        runner.replays_in_chunks = exact
        layout = PageLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=PAGE_SIZE, dtype=torch.float32)
        parts = SimpleNamespace(
            pool=PagePool(layout, NUM_PAGES),
            allocator=allocator,
            runner=runner,
            model=SimpleNamespace(exact=exact),
            first_steps=(),
            tier=None,
        )
        metrics = WorkerMetrics(worker_id="decode-0")
        links = FakeLinks()
        around = Around(
            incarnation="a" * 32,
            links=cast(Any, links),
            metrics=metrics,
            clock=SYSTEM_CLOCK,
            step_timeout_s=step_timeout_s,
            **fields,
        )
        worker = DecodeWorker(
            around,
            EngineFacts(SequenceLimits(200, VOCAB_SIZE, NUM_PAGES, PAGE_SIZE), "a model"),
            make_engine=lambda on_report: decode_loop(
                cast(Any, parts),
                max_batch=max_batch,
                chunk_tokens=chunk_tokens,
                swap_bytes=swap_bytes,
                clock=SYSTEM_CLOCK,
                on_report=on_report,
                features=[PacedMasks(), *features],
            ),
            limits=Limits(max_admitted, is_optimistic),
        )
        receiver = FakeReceiver(worker)
        worker.arrivals.attach(cast(Any, receiver))
        benches.append(Bench(worker, receiver, links, runner, allocator, metrics))
        return benches[-1]

    yield make
    for bench in benches:
        bench.runner.gate.set()
        bench.links.may_reserve.set()
        for transfer in bench.links.transfers.values():
            transfer.may_abort.set()
        await bench.worker.close()
        for gateway in bench.gateways:
            gateway.drop()
            await asyncio.wait((gateway._task,))
        if bench.worker.failed.done():
            bench.worker.failed.exception()
