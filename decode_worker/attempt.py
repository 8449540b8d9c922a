"""State of one decode attempt, on the event loop. `decode_worker.worker` changes it."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto

from kv_transfer.send_link import HandoffStats, SendTransfer
from services.runtime.errors import TandemError
from services.runtime.telemetry import Event, Value
from services.structured.grammar import GrammarState
from worker.engine import DecodeReport, Guesses, PausedSequence, Preemption
from worker.engine_worker import EngineAttempt

MAX_SPAN_EVENTS = 64


class Phase(Enum):
    """Phase of an attempt."""

    ADMITTED = auto()
    """Its pages are promised. A transfer may reserve them."""
    RECEIVING = auto()
    """A transfer holds its pages."""
    COMPUTING = auto()
    """The engine computes it."""
    PAUSED = auto()
    """The engine holds it outside the batch, and the gateway has been notified."""
    HANDING_OVER = auto()
    """Paused, and its pages are being sent to another decode worker."""
    ENDED = auto()
    """The gateway has received the outcome, or no longer waits for one."""


@dataclass(eq=False, slots=True)
class DecodeAttempt(EngineAttempt):
    """A request from its admission to its last token, or to its handoff to another decode worker."""

    admitted_s: float
    from_decode: bool
    is_local: bool
    handle: int = 0
    """Handle for reporting its tokens together with tokens of other attempts. 0 if they are reported separately."""
    phase: Phase = Phase.ADMITTED
    wants_pause: bool = False
    paused: PausedSequence | None = None
    """Position of the sequence while the phase is PAUSED or HANDING_OVER."""
    hand_over: "asyncio.Task[HandoffStats] | None" = None
    transfer: SendTransfer | None = None
    """Reads the pages of the sequence during a handoff."""
    grammar: "asyncio.Task[GrammarState] | None" = None
    """Compiles the constraint on its tokens. None if the output is unconstrained."""
    deadline: asyncio.TimerHandle | None = None
    has_begun: bool = False
    """Whether the first tokens of a locally computed prompt have been computed."""
    num_tokens: int = 0
    """Number of tokens emitted by this worker."""
    decoding_since_unix_ns: int = 0
    """Start of its first decode step, in Unix nanoseconds. 0 before that step."""
    _stepped_until_unix_ns: int = 0
    """End of its last step, in Unix nanoseconds."""
    _num_steps: int = 0
    """Counted only if the request is traced, like the next two fields."""
    _num_neighbours: int = 0
    """Sum of the batch sizes of the attempt's steps, with this sequence included."""
    _max_batch: int = 0
    _span_events: list[Event] = field(default_factory=list)
    _num_preempted: int = 0
    _num_proposed: int = 0
    _num_accepted: int = 0

    @property
    def num_tokens_to_come(self) -> int:
        """Returns the number of leading tokens that a transfer delivers.

        These are the tokens of the prompt, or all but the last token of a decoding sequence.
        """
        spec = self.spec
        return len(spec.prompt_token_ids) + (len(spec.emitted_token_ids) - 1 if self.from_decode else 0)

    def note_step(self, report: DecodeReport) -> None:
        """Records that the attempt was part of a decode step."""
        self.decoding_since_unix_ns = self.decoding_since_unix_ns or report.start_unix_ns
        self._stepped_until_unix_ns = report.end_unix_ns
        if self.spans.are_kept:
            num_sequences = len(report.advances)
            self._num_steps += 1
            self._num_neighbours += num_sequences
            self._max_batch = max(self._max_batch, num_sequences)

    def note_guesses(self, guesses: Guesses) -> None:
        """Records the draft tokens that a step verified for this sequence."""
        self._num_proposed += guesses.num_tokens
        self._num_accepted += guesses.num_accepted

    def note_preemption(self, preemption: Preemption, unix_ns: int) -> None:
        """Records that the sequence lost its batch slot or its pages to other sequences."""
        self._num_preempted += 1
        if self.spans.are_kept and len(self._span_events) < MAX_SPAN_EVENTS:
            said: dict[str, Value] = {"tandem.reason": preemption.reason, "tandem.tokens": self.num_tokens}
            self._span_events.append(Event("preempted", unix_ns, said))

    def note_steps(self, error: TandemError | None) -> None:
        """Records a span of its steps if it had any. `error` is the reason of a failure."""
        if not self._num_steps:
            return
        said: dict[str, Value] = {
            "tandem.tokens": self.num_tokens,
            "tandem.steps": self._num_steps,
            "tandem.batch_mean": self._num_neighbours / self._num_steps,
            "tandem.batch_max": self._max_batch,
            "tandem.preemptions": self._num_preempted,
            "tandem.proposed": self._num_proposed,
            "tandem.accepted": self._num_accepted,
        }
        since_unix_ns, until_unix_ns = self.decoding_since_unix_ns, self._stepped_until_unix_ns
        self.spans.steps(since_unix_ns, until_unix_ns, attributes=said, events=self._span_events, error=error)
