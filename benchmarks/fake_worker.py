"""An instant fake prefill and decode worker: speaks the real Session protocol, registers in Redis, computes nothing.

`python -m benchmarks.fake_worker --redis URL --cluster NAME [--step-ms N] [--tokens-per-step N]`. As with an engine,
what happened in a step of N milliseconds goes out in one message; every running sequence gets its tokens in each step.
A step of 0 begins as soon as there is something to do, for latencies. Both roles live in one process, so that a handoff
is a function call.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvloop

from protos import cluster_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from services.cluster.registry import WorkerLease, WorkerRecord, new_incarnation
from services.runtime import rpc
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.cluster_secret import Secrets
from services.runtime.membership import Member
from worker.sessions import Emission, Reports, Session, SessionServer, StepTokens

NUM_PAGES = 1_000_000
FIRST_TOKEN_ID = 300
NUM_TOKEN_IDS = 200
"""Tokens are taken in turn from here on; ordinary ones in any vocabulary of 500 and more."""


@dataclass(slots=True)
class _Sequence:
    """An admitted attempt. `next_index` is the token that comes next."""

    session: Session
    request_id: str
    attempt: int
    max_tokens: int
    handle: int
    next_index: int = 0


@dataclass(slots=True)
class FakeWorkers:
    """One prefill and one decode worker that share a table of admitted attempts. Events wait for the end of a step."""

    step_s: float
    tokens_per_step: int
    from_prefill: list[Emission] = field(default_factory=list)
    from_decode: list[Emission] = field(default_factory=list)
    waiting: dict[tuple[str, int], _Sequence] = field(default_factory=dict)
    running: dict[tuple[str, int], _Sequence] = field(default_factory=dict)
    decode: SessionServer | None = None
    prefill: SessionServer | None = None
    has_work: asyncio.Event = field(default_factory=asyncio.Event)

    async def admit(self, session: Session, admit: worker_pb2.Admit) -> None:
        """Promises capacity, and begins at once where the prompt is computed here."""
        spec = admit.sequence
        key = (spec.id.request_id, spec.id.attempt)
        sequence = _Sequence(session, *key, spec.sampling.max_tokens, admit.handle, len(spec.emitted_token_ids))
        self.has_work.set()
        self.waiting[key] = sequence
        self.from_decode.append(Emission(session, *key, worker_pb2.Admitted()))
        if admit.local_prefill:
            self._start(key)

    async def compute(self, session: Session, prefill: worker_pb2.Prefill) -> None:
        """Sends the first token and hands the attempt over."""
        self.has_work.set()
        spec = prefill.sequence
        key = (spec.id.request_id, spec.id.attempt)
        if not spec.emitted_token_ids:
            first = worker_pb2.Tokens(first_index=0, token_ids=[FIRST_TOKEN_ID])
            self.from_prefill.append(Emission(session, *key, first))
            if spec.sampling.max_tokens == 1:
                self.waiting.pop(key, None)
                finished = worker_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH)
                self.from_prefill.append(Emission(session, *key, finished))
                return
            if key in self.waiting:
                self.waiting[key].next_index = 1
        handed_off = worker_pb2.HandedOff(num_pages=1, num_bytes=65536, transport="none")
        self.from_prefill.append(Emission(session, *key, handed_off))
        self._start(key)

    async def cancel(self, session: Session, cancel: worker_pb2.Cancel) -> None:
        """Forgets an attempt."""
        key = (cancel.id.request_id, cancel.id.attempt)
        self.waiting.pop(key, None)
        self.running.pop(key, None)

    def close(self, session: Session) -> None:
        """Forgets the attempts of a session."""
        for table in (self.waiting, self.running):
            for key in [key for key, sequence in table.items() if sequence.session is session]:
                del table[key]

    def load(self) -> worker_pb2.WorkerLoad:
        """Always room."""
        return worker_pb2.WorkerLoad(
            pages=cluster_pb2.PageCounts(total=NUM_PAGES, free=NUM_PAGES),
            running=len(self.running),
            waiting=len(self.waiting),
            state=cluster_pb2.WORKER_STATE_READY,
            unix_ms=SYSTEM_CLOCK.unix_ns() // 1_000_000,
        )

    async def step_forever(self) -> None:
        """Gives every running sequence its tokens, and sends what has happened, once per step."""
        assert self.decode is not None
        assert self.prefill is not None
        while True:
            if not self.step_s and not self.running:
                await self.has_work.wait()
                self.has_work.clear()
            await asyncio.sleep(self.step_s)
            step: dict[Session, StepTokens] = {}
            for key, sequence in list(self.running.items()):
                num_left = sequence.max_tokens - sequence.next_index
                self.from_decode += self._tokens(sequence, min(self.tokens_per_step, num_left), step)
                if sequence.next_index >= sequence.max_tokens:
                    del self.running[key]
            from_prefill, self.from_prefill = self.from_prefill, []
            from_decode, self.from_decode = self.from_decode, []
            self.prefill.emit_many(from_prefill)
            self.decode.emit_many(from_decode)
            for session, tokens in step.items():
                self.decode.emit_step(session, tokens)

    def _start(self, key: tuple[str, int]) -> None:
        sequence = self.waiting.pop(key, None)
        if sequence is not None:
            self.running[key] = sequence
            self.from_decode.append(Emission(sequence.session, *key, worker_pb2.DecodeStarted()))

    @staticmethod
    def _tokens(sequence: _Sequence, num_tokens: int, step: dict[Session, StepTokens]) -> list[Emission]:
        """The events of a sequence's next tokens; one alone goes into `step`, as real workers have it."""
        first, last = sequence.next_index, sequence.next_index + num_tokens
        sequence.next_index = last
        token_ids = [FIRST_TOKEN_ID + index % NUM_TOKEN_IDS for index in range(first, last)]
        if num_tokens == 1 and last < sequence.max_tokens:
            handles, indexes, tokens = step.setdefault(sequence.session, StepTokens([], [], []))
            handles.append(sequence.handle)
            indexes.append(first)
            tokens += token_ids
            return []
        name = (sequence.session, sequence.request_id, sequence.attempt)
        emissions = [Emission(*name, worker_pb2.Tokens(first_index=first, token_ids=token_ids))]
        if last >= sequence.max_tokens:
            reason = inference_pb2.FINISH_REASON_LENGTH
            emissions.append(Emission(*name, worker_pb2.Finished(reason=reason)))
        return emissions


class _Decode(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepEvents]:
        async for events in self._sessions.serve(request_iterator):
            yield events


class _Prefill(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepEvents]:
        async for events in self._sessions.serve(request_iterator):
            yield events


async def serve(redis_url: str, cluster: str, *, step_s: float, tokens_per_step: int) -> None:
    """Runs both workers until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    workers = FakeWorkers(step_s, tokens_per_step)
    prefill_incarnation, decode_incarnation = new_incarnation(), new_incarnation()
    workers.prefill = SessionServer(
        incarnation=prefill_incarnation,
        handlers={"prefill": workers.compute, "cancel": workers.cancel},
        reports=Reports(workers.load, counts=lambda: worker_pb2.WorkerCounts(step_s=0.0)),
        on_session_closed=workers.close,
    )
    workers.decode = SessionServer(
        incarnation=decode_incarnation,
        handlers={"admit": workers.admit, "cancel": workers.cancel},
        reports=Reports(workers.load, counts=lambda: worker_pb2.WorkerCounts(step_s=0.0)),
        on_session_closed=workers.close,
    )
    secrets = Secrets()
    rpc.set_member(Member(secrets, "decode"))
    prefill_server = rpc.make_server(("tandem.v1.PrefillWorker",), incarnation=prefill_incarnation)
    decode_server = rpc.make_server(("tandem.v1.DecodeWorker",), incarnation=decode_incarnation)
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(_Prefill(workers.prefill), prefill_server.server)
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(_Decode(workers.decode), decode_server.server)
    prefill_port = await prefill_server.start("127.0.0.1", 0)
    decode_port = await decode_server.start("127.0.0.1", 0)
    records = [
        _record("prefill", prefill_port, prefill_incarnation),
        _record("decode", decode_port, decode_incarnation),
    ]
    leases = [WorkerLease(redis_url, cluster=cluster, record=record, secrets=secrets) for record in records]
    for lease in leases:
        lease.start()
    steps = asyncio.create_task(workers.step_forever())
    await stop.wait()
    steps.cancel()
    for lease in leases:
        lease.release()
    workers.prefill.close()
    workers.decode.close()
    await asyncio.gather(prefill_server.stop(0.2), decode_server.stop(0.2))


def _record(role: Any, port: int, incarnation: str) -> WorkerRecord:
    return WorkerRecord(
        id=f"{role}-0",
        role=role,
        pid=os.getpid(),
        host="localhost",
        address=f"127.0.0.1:{port}",
        incarnation=incarnation,
        started_unix_ns=SYSTEM_CLOCK.unix_ns(),
        state="ready",
        model="bench",
        exact=True,
        page_size=16,
        layout_fingerprint="fake",
        max_sequence_tokens=1_000_000,
        pages_total=NUM_PAGES,
        pages_free=NUM_PAGES,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--tokens-per-step", type=int, default=1_000_000)
    arguments = parser.parse_args()
    step_s = arguments.step_ms / 1000
    uvloop.run(serve(arguments.redis, arguments.cluster, step_s=step_s, tokens_per_step=arguments.tokens_per_step))


if __name__ == "__main__":
    main()
