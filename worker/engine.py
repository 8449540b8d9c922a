"""The seam between a worker and what computes for it: what an engine is asked, and what it says.

A worker knows its engine by this file only, and an engine knows no worker, message, task or deadline. `PrefillEngine`
and `DecodeEngine` are the two interfaces; the engine of this project is behind them in `prefill_worker.engine_loop` and
`decode_worker.engine_loop`. What another engine must keep to:

- **Thread.** The worker runs everything here on one thread (`services.engine.thread`), which owns what the engine
  changes. An engine reads no other thread's data and takes no lock.
- **Commands.** Each method but `step` is a command: it runs between two steps, in the order of submission, and returns
  at once. What has to wait (for pages) is a future that the engine sets later, on its thread.
- **Steps.** `step` is called for as long as it returns true, and again after each command.
- **Reports.** Each step, and each change of the pages between steps, leaves as one report through the function that the
  engine was made with. It is called on the engine thread and does not block. Reports come in the order of what they
  say, at the latest before `step` returns false.
- **Pages.** Page numbers are places in the pool that `kv_transfer` reads and writes. The engine does not touch reserved
  pages until `start`. A report calls a page complete, and a pause names one, only after the last write to it by every
  rank and device: `kv_transfer` reads it at once, and its checksum covers what it contains. The page does not change
  until the key is released. Attention reads only pages that were computed here or committed by a transfer.
- **Abort.** `free` or `release` ends a key in any phase and does nothing for one that is unknown. A report may still
  mention it; the worker has forgotten it by then and drops that.
- **Failure.** A sequence that fails alone is an outcome in a report (`NonFiniteLogits`), and the others continue.
  Whatever `step` raises, and InvariantViolated of a command, ends the worker.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.engine.cache.pages import PageChanges, PageCounts
from services.engine.steps.limits import SequenceLimits
from services.engine.steps.sequence import FinishReason, Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, PooledState, SampledToken, SampledTokens
from services.runtime.errors import TandemError
from services.scheduling.chunks import DEFAULT_CLASS
from services.scheduling.speedometer import Speedometer


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a worker knows of its engine before it asks anything of it."""

    limits: SequenceLimits
    fingerprint: str
    """Two workers exchange pages only if theirs agree; part of the names of pages."""
    loss: Callable[[], TandemError | None] = lambda: None
    """Returns what has made the engine useless while nobody used it, from any thread."""
    check: Callable[[Sampling], None] = lambda sampling: None
    """Raises NotOffered for what the engine cannot give."""
    adapters: frozenset[str] = frozenset()
    """Names of the adapters that it can compute with."""
    embeds: bool = False
    """Whether it gives the hidden states of prompts (`Sequence.pooling`)."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, or a change of the pages between steps. Times are Unix nanoseconds.

    `changes` says which pages have come to be found, and which no longer are, since the report before.
    """

    start_unix_ns: int
    end_unix_ns: int
    pages: PageCounts
    changes: PageChanges

    @property
    def seconds(self) -> float:
        """Time that the step took."""
        return (self.end_unix_ns - self.start_unix_ns) / 1e9


@dataclass(frozen=True, slots=True)
class ReservedPages:
    """Pages in the order of the tokens; the first `num_cached_tokens` tokens, whole pages, are cached already."""

    page_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class KeptPages:
    """Pages that nobody holds, and the generations by which their content is recognized."""

    page_ids: tuple[int, ...]
    generations: tuple[int, ...]


class PrefixPages(ABC):
    """The cache of an engine, of which other workers are given pages and to which they give some.

    Every method is a command.
    """

    @abstractmethod
    def find_prefix(self, token_ids: list[int], *, salt: bytes) -> KeptPages:
        """Returns the pages of the first of these tokens. They stay nobody's: other content may take their place."""

    @abstractmethod
    def reserve_prefix(self, key: Hashable, token_ids: list[int], *, salt: bytes) -> ReservedPages:
        """Sets pages aside for tokens, whole pages, that are to arrive. Raises NoFreePages, which the books exclude."""

    @abstractmethod
    def cache_prefix(self, key: Hashable) -> None:
        """Releases pages whose content has arrived, for sequences that begin with it."""

    @abstractmethod
    def close(self, key: Hashable) -> None:
        """Releases pages whose content has not arrived. Unknown keys are ignored."""


class Engine(ABC):
    """What both workers need of an engine."""

    prefixes: PrefixPages | None = None
    """Its cache; None: other workers have no part in it."""
    speedometer: Speedometer
    """Speed of steps; read from any thread. The worker adds transfers."""

    @abstractmethod
    def step(self) -> bool:
        """Computes and reports one step; returns whether more is to be computed."""

    @abstractmethod
    def check_books(self) -> None:
        """Compares the pages with what is known of them, for an engine that has had nothing to do for a while.

        Raises InvariantViolated for pages that nobody holds.
        """


# --- prompts ---


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first `num_tokens` tokens of a prompt, whole pages, whose KV is in `page_ids` and need not be computed."""

    num_tokens: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """What a step did to one prompt.

    `page_ids` are the pages that the step completed, from place `first_page` of the prompt's page table on. On the last
    chunk, `outcome` is the first token, the failure to choose one, or None where the caller has the token already;
    `finish_reason` is set when the first token is also the last. For a prompt that is embedded, it is what was pooled.
    """

    key: Hashable
    start: int
    num_tokens: int
    first_page: int
    page_ids: tuple[int, ...]
    is_last: bool
    outcome: SampledToken | PooledState | NonFiniteLogits | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class PrefillReport(StepReport):
    """A step of prompts; between steps `chunks` is empty."""

    chunks: tuple[ComputedChunk, ...]


class PrefillEngine(Engine):
    """Computes prompts, each under a key from `begin` to `release`."""

    @abstractmethod
    def begin(self, sequence: Sequence, *, salt: bytes, service_class: int = DEFAULT_CLASS) -> CachedPrefix:
        """Takes all pages of a prompt and puts it in line; returns what is computed already.

        Pages are shared with prompts of an equal `salt`. Raises NoFreePages, which the caller's books exclude.
        """

    @abstractmethod
    def release(self, key: Hashable, *, is_kept: bool = False) -> None:
        """Forgets a prompt and releases its pages, computed or not. Unknown keys are ignored.

        The pages of one that `is_kept` are all computed: their content stays until `take_kept` or `drop_kept`, or until
        another prompt needs the room.
        """

    @abstractmethod
    def take_kept(self, kept_key: Hashable, key: Hashable) -> tuple[int, ...] | None:
        """Gives the pages kept under `kept_key` to `key`, which must be released. None: some of them are gone."""

    @abstractmethod
    def drop_kept(self, key: Hashable) -> None:
        """Stops keeping pages. Unknown keys are ignored."""


# --- answers ---


class Guesses(NamedTuple):
    """How many tokens were proposed for a sequence in a step, by what, and how many of them were right."""

    source: str
    num_tokens: int
    num_accepted: int


class Advance(NamedTuple):
    """What a step did to one sequence.

    `num_tokens` were computed from `start` on. `token_index` is the place in the answer of `outcome`'s token, or of the
    first of several: all but the last of them were proposed. `outcome` is None where the step computed a part of the
    prompt or replayed a token; for a prompt that is embedded it is what was pooled so far. A sequence with a
    `finish_reason` or a failure has left the batch, its pages free.
    """

    key: Hashable
    start: int
    num_tokens: int
    token_index: int
    outcome: SampledToken | SampledTokens | PooledState | NonFiniteLogits | None
    finish_reason: FinishReason | None
    guesses: Guesses | None = None

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The new tokens of the answer, in order."""
        if isinstance(self.outcome, SampledTokens):
            return self.outcome.tokens
        return (self.outcome,) if isinstance(self.outcome, SampledToken) else ()

    @property
    def num_rows(self) -> int:
        """Tokens that went through the model, rejected ones included."""
        return self.num_tokens if self.guesses is None else 1 + self.guesses.num_tokens


class PausedSequence(NamedTuple):
    """A sequence that was taken out of the batch; nothing of it changes until `unpause`.

    `page_ids` hold the KV of its first `num_computed_tokens` tokens, which are all but the last, `next_token_id`.
    """

    key: Hashable
    num_generated_tokens: int
    num_computed_tokens: int
    next_token_id: int
    page_ids: tuple[int, ...]


class Preemption(NamedTuple):
    """A sequence lost its place or its pages to others.

    `place`: it left the batch for a better class and keeps its pages. `no_page`: it left the batch because no page was
    free for its next token, and keeps those that it has. `swapped`, `recomputed`: others got its pages; what was in
    them is in the host's memory, or will be computed again.
    """

    key: Hashable
    reason: Literal["place", "no_page", "swapped", "recomputed"]


@dataclass(frozen=True, slots=True)
class DecodeReport(StepReport):
    """A step of the batch; between steps `advances` is empty.

    What `paused` names was paused after the step, and what `preempted` names was preempted before it.
    """

    advances: tuple[Advance, ...]
    paused: tuple[PausedSequence, ...]
    num_running: int
    num_waiting: int
    waiting_tokens: int
    preempted: tuple[Preemption, ...] = ()


class DecodeEngine(Engine):
    """Sets pages aside and computes sequences. A key is known from `reserve` or `start` to its end or `free`."""

    @abstractmethod
    def reserve(
        self,
        key: Hashable,
        token_ids: list[int],
        *,
        num_prompt_tokens: int,
        salt: bytes,
        service_class: int = DEFAULT_CLASS,
        adapter: str = "",
    ) -> "Future[ReservedPages]":
        """Sets pages aside for tokens that are to arrive: at once, unless sequences of its class or a better one need
        the pages more.

        The first `num_prompt_tokens` of them are the prompt; `adapter` is what the model is changed by, or empty. Pages
        are shared with sequences of an equal `salt`. The
        future is set on the engine thread; it fails with RequestCancelled if `free` or `withdraw` comes first.
        """

    @abstractmethod
    def withdraw(self, key: Hashable) -> None:
        """Fails a reservation that still waits for its pages. One that has them is left alone."""

    @abstractmethod
    def start(
        self, sequence: Sequence, *, salt: bytes, is_paused: bool = False, service_class: int = DEFAULT_CLASS
    ) -> None:
        """Puts a sequence in line for the batch, or pauses it before its first step of decoding.

        Its leading tokens have arrived in the pages that were reserved under its id (`num_computed_tokens` says how
        many; it keeps the class of its reservation), or it has none and is computed here.
        """

    @abstractmethod
    def pause(self, key: Hashable) -> None:
        """Takes a sequence out of the batch as soon as it has a token and only the last one is not computed.

        It keeps its pages. It is reported, once, after everything that was computed for it. One that has ended, or is
        paused, is left alone.
        """

    @abstractmethod
    def unpause(self, key: Hashable) -> None:
        """Puts a paused sequence back in line, or lets one that was to be paused continue. Others are left alone."""

    @abstractmethod
    def free(self, key: Hashable) -> None:
        """Forgets a key in any phase and frees its pages. Unknown keys are ignored."""
