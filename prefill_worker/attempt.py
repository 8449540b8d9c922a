"""State of one prefill attempt, on the event loop. `prefill_worker.worker` changes it."""

import asyncio
from dataclasses import dataclass, field

from kv_transfer.send_link import SendTransfer
from prefill_worker.embeddings import EmbeddingWish
from prefill_worker.kept import Kept
from protos import worker_pb2
from services.engine.steps.sequence import Grammar
from services.engine.steps.step import NonFiniteLogits
from services.runtime.errors import RequestCancelled, TandemError
from worker.engine import ComputedChunk, PrefillReport
from worker.engine_worker import EngineAttempt

MAX_TOLD_CHUNKS = 32


@dataclass(frozen=True, slots=True)
class Pulled:
    """Size of a prefix fetched from another worker, and the time that the fetch took."""

    num_tokens: int
    num_bytes: int
    time_s: float


NOTHING_PULLED = Pulled(0, 0, 0.0)


@dataclass(eq=False, slots=True)
class PrefillAttempt(EngineAttempt):
    """A prompt from its command to the commit of its pages."""

    decode_address: str
    decode_incarnation: str
    arrived_s: float
    task: "asyncio.Task[None]" = field(init=False)
    pull: worker_pb2.Pull | None = None
    """The worker from which to fetch the beginning of the prompt."""
    embedding: EmbeddingWish | None = None
    """How to embed the prompt. None if the request generates a response and hands its pages over."""
    pulled: Pulled = NOTHING_PULLED
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False
    """Whether the engine may hold pages for it."""
    former: Kept | None = None
    """Pages of the same prompt from an earlier attempt."""
    kept: Kept | None = None
    """Pages that this attempt computed or adopted."""
    grammar: Grammar | None = None
    """Constraint on the first token. None if the token is unconstrained or already known."""
    transfer: SendTransfer | None = None
    chunks: "asyncio.Queue[tuple[PrefillReport, ComputedChunk]]" = field(default_factory=asyncio.Queue)
    sending_since_unix_ns: int | None = None
    outcome: str = "cancelled"
    abort_reason: TandemError | None = field(default_factory=lambda: RequestCancelled("the attempt was cancelled"))
    started_unix_ns: int = 0
    """Time at which the gateway was notified of the start."""
    _computed: list[tuple[int, int, int]] = field(default_factory=list)
    """Its first chunks: start and end of the step, in Unix nanoseconds, and the number of tokens."""

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens in the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def needs_grammar(self) -> bool:
        """Returns whether a constrained token is sampled here. A request that has emitted tokens samples none."""
        return self.spec.form is not None and not self.spec.emitted_token_ids

    @property
    def reports_prompt(self) -> bool:
        """Returns whether prompt log-probabilities are reported. Such prompts are computed in the background."""
        return self.spec.sampling.prompt_logprobs is not None and not self.spec.emitted_token_ids

    async def next_chunk(self) -> ComputedChunk:
        """Returns the next computed chunk of the prompt and records its span. Raises NonFiniteLogits."""
        report, chunk = await self.chunks.get()
        self.spans.chunk(report.start_unix_ns, report.end_unix_ns, start=chunk.start, num_tokens=chunk.num_tokens)
        if isinstance(chunk.outcome, NonFiniteLogits):
            raise chunk.outcome
        return chunk

    def note_chunk(self, report: PrefillReport, chunk: ComputedChunk) -> None:
        """Queues a computed chunk of the prompt."""
        self.chunks.put_nowait((report, chunk))
        if len(self._computed) < MAX_TOLD_CHUNKS:
            self._computed.append((report.start_unix_ns, report.end_unix_ns, chunk.num_tokens))

    def told_chunks(self) -> list[worker_pb2.PromptChunk]:
        """Returns the timing of the first chunks. A step may start before its start is reported to the gateway."""
        return [
            worker_pb2.PromptChunk(
                began_s=max(0, start_unix_ns - self.started_unix_ns) / 1e9,
                spent_s=(end_unix_ns - start_unix_ns) / 1e9,
                num_tokens=num_tokens,
            )
            for start_unix_ns, end_unix_ns, num_tokens in self._computed
        ]

    def end(self, outcome: str, abort_reason: TandemError | None) -> None:
        """Records the outcome, and the reason to abort its transfer if it has one.

        None if the transfer was committed.
        """
        self.outcome = outcome
        self.abort_reason = abort_reason
