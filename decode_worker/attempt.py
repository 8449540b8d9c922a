"""One attempt at an answer: what is known of it, on the event loop. What happens to it is in `decode_worker.worker`."""

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
    """Where an attempt stands."""

    ADMITTED = auto()
    """Its pages are promised; a transfer may reserve them."""
    RECEIVING = auto()
    """A transfer holds its pages."""
    COMPUTING = auto()
    """The engine has it."""
    PAUSED = auto()
    """The engine has it outside the batch, and the gateway knows."""
    HANDING_OVER = auto()
    """As PAUSED, and its pages are on their way to another decode worker."""
    ENDED = auto()
    """It was answered, or nobody waits for it."""


@dataclass(eq=False, slots=True)
class DecodeAttempt(EngineAttempt):
    """A request from its admission to its last token, or to another decode worker."""

    admitted_s: float
    from_decode: bool
    is_local: bool
    handle: int = 0
    """Under which its tokens may be told together with others'; 0: they may not."""
    phase: Phase = Phase.ADMITTED
    wants_pause: bool = False
    paused: PausedSequence | None = None
    """Where it stands, in PAUSED and HANDING_OVER."""
    hand_over: "asyncio.Task[HandoffStats] | None" = None
    transfer: SendTransfer | None = None
    """What reads its pages while it is handed over."""
    grammar: "asyncio.Task[GrammarState] | None" = None
    """Makes what its tokens must keep to; None: they may be any."""
    deadline: asyncio.TimerHandle | None = None
    has_begun: bool = False
    """Whether the first tokens of a prompt that is computed here were computed."""
    num_tokens: int = 0
    """Tokens that were emitted here."""
    decoding_since_unix_ns: int = 0
    """0: it was in no step yet."""
    _stepped_until_unix_ns: int = 0
    """The end of its last step."""
    _num_steps: int = 0
    """Counted, as the next two are, if there is a trace."""
    _num_neighbours: int = 0
    """Sequences of all these steps together, itself included."""
    _max_batch: int = 0
    _span_events: list[Event] = field(default_factory=list)
    _num_preempted: int = 0
    _num_proposed: int = 0
    _num_accepted: int = 0

    @property
    def num_tokens_to_come(self) -> int:
        """Leading tokens whose pages a transfer brings: the prompt's, or all but the last of a decoding sequence."""
        spec = self.spec
        return len(spec.prompt_token_ids) + (len(spec.emitted_token_ids) - 1 if self.from_decode else 0)

    def note_step(self, report: DecodeReport) -> None:
        """Notes that it was in a step of the batch, after its prompt."""
        self.decoding_since_unix_ns = self.decoding_since_unix_ns or report.start_unix_ns
        self._stepped_until_unix_ns = report.end_unix_ns
        if self.spans.are_kept:
            num_sequences = len(report.advances)
            self._num_steps += 1
            self._num_neighbours += num_sequences
            self._max_batch = max(self._max_batch, num_sequences)

    def note_guesses(self, guesses: Guesses) -> None:
        """Notes what was proposed for it in a step."""
        self._num_proposed += guesses.num_tokens
        self._num_accepted += guesses.num_accepted

    def note_preemption(self, preemption: Preemption, unix_ns: int) -> None:
        """Notes that others got its place or its pages."""
        self._num_preempted += 1
        if self.spans.are_kept and len(self._span_events) < MAX_SPAN_EVENTS:
            said: dict[str, Value] = {"tandem.reason": preemption.reason, "tandem.tokens": self.num_tokens}
            self._span_events.append(Event("preempted", unix_ns, said))

    def note_steps(self, error: TandemError | None) -> None:
        """Has its steps recorded as a span, if it had any; `error` is what ended it, if it failed."""
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
