"""One attempt at a prompt: what is known of it, on the event loop. What happens to it is in `prefill_worker.worker`."""

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
    """What was fetched of a prompt's beginning from another worker, and how long that took."""

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
    """The worker from which the prompt's beginning is to be fetched."""
    embedding: EmbeddingWish | None = None
    """What becomes of its hidden states; None: it is answered, and its pages are handed over."""
    pulled: Pulled = NOTHING_PULLED
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False
    """The engine may hold pages for it."""
    former: Kept | None = None
    """What an earlier attempt has computed of the same."""
    kept: Kept | None = None
    """What this one has computed or taken over."""
    grammar: Grammar | None = None
    """What the first token must keep to; None: it may be any, or is known."""
    transfer: SendTransfer | None = None
    chunks: "asyncio.Queue[tuple[PrefillReport, ComputedChunk]]" = field(default_factory=asyncio.Queue)
    sending_since_unix_ns: int | None = None
    outcome: str = "cancelled"
    abort_reason: TandemError | None = field(default_factory=lambda: RequestCancelled("the attempt was cancelled"))
    started_unix_ns: int = 0
    """When the gateway was told that it has begun."""
    _computed: list[tuple[int, int, int]] = field(default_factory=list)
    """Its first chunks: when the step began and ended, in Unix nanoseconds, and tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def needs_grammar(self) -> bool:
        """Whether a token is sampled here that must keep to a form: one that has emitted tokens samples nothing."""
        return self.spec.form is not None and not self.spec.emitted_token_ids

    @property
    def reports_prompt(self) -> bool:
        """Whether the prompt's tokens are reported, so that it is computed in the background."""
        return self.spec.sampling.prompt_logprobs is not None and not self.spec.emitted_token_ids

    async def next_chunk(self) -> ComputedChunk:
        """Returns what the next step computes of the prompt, which is then in its spans. Raises NonFiniteLogits."""
        report, chunk = await self.chunks.get()
        self.spans.chunk(report.start_unix_ns, report.end_unix_ns, start=chunk.start, num_tokens=chunk.num_tokens)
        if isinstance(chunk.outcome, NonFiniteLogits):
            raise chunk.outcome
        return chunk

    def note_chunk(self, report: PrefillReport, chunk: ComputedChunk) -> None:
        """Notes what a step computed of the prompt."""
        self.chunks.put_nowait((report, chunk))
        if len(self._computed) < MAX_TOLD_CHUNKS:
            self._computed.append((report.start_unix_ns, report.end_unix_ns, chunk.num_tokens))

    def told_chunks(self) -> list[worker_pb2.PromptChunk]:
        """How its prompt was computed; a step may have begun before its beginning was told."""
        return [
            worker_pb2.PromptChunk(
                began_s=max(0, start_unix_ns - self.started_unix_ns) / 1e9,
                spent_s=(end_unix_ns - start_unix_ns) / 1e9,
                num_tokens=num_tokens,
            )
            for start_unix_ns, end_unix_ns, num_tokens in self._computed
        ]

    def end(self, outcome: str, abort_reason: TandemError | None) -> None:
        """Notes how it ended, and why its transfer, if it has one, must be aborted; None: it was committed."""
        self.outcome = outcome
        self.abort_reason = abort_reason
