"""The interface between a worker and its engine.

A worker depends on its engine only through this module. An engine does not depend on workers, messages, tasks, or
deadlines. `PrefillEngine` and `DecodeEngine` are the two interfaces. The native engine implements them in
`prefill_worker.engine_loop` and `decode_worker.engine_loop`. Every engine must follow these rules:

- **Thread.** The worker calls everything here on one thread (`services.engine.thread`), which owns the engine's state.
  An engine reads no data of other threads and takes no lock.
- **Commands.** Each method except `step` is a command. It runs between two steps, in the order of submission, and
  returns at once. If it must wait for pages, it returns a future that the engine sets later, on its thread.
- **Steps.** `step` is called as long as it returns true, and again after each command.
- **Reports.** Each step, and each change of the pages between steps, produces one report. The engine passes it to the
  function given at construction, which runs on the engine thread and does not block. Reports are in the order of the
  events that they describe, and are sent before `step` returns false.
- **Pages.** Page numbers are indices into the pool that `kv_transfer` reads and writes. The engine does not touch
  reserved pages until `start`. It reports a page as complete, or names it in a pause, only after the last write to it
  by every rank and device: `kv_transfer` reads the page at once, and its checksum covers the content. The page does
  not change until the key is released. Attention reads only pages that were computed here or committed by a transfer.
- **Abort.** `free` or `release` ends a key in any phase and ignores unknown keys. A later report may still mention the
  key. The worker drops it, because it no longer tracks the key.
- **Failure.** A sequence that fails alone is an outcome in a report (`NonFiniteLogits`), and the others continue. Any
  exception of `step`, and InvariantViolated from a command, ends the worker.
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
    """Properties of an engine that are known before it runs."""

    limits: SequenceLimits
    fingerprint: str
    """Workers exchange pages only if their fingerprints are equal. Part of the names of pages."""
    loss: Callable[[], TandemError | None] = lambda: None
    """Returns the error that broke the engine while it was idle, or None. Callable from any thread."""
    check: Callable[[Sampling], None] = lambda sampling: None
    """Raises NotOffered for options that the engine does not support."""
    adapters: frozenset[str] = frozenset()
    """Names of the available adapters."""
    embeds: bool = False
    """Whether the engine returns the hidden states of prompts (`Sequence.pooling`)."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step, or a change of the pages between steps. Times are Unix nanoseconds.

    `changes` lists the pages that entered or left the prefix cache since the previous report.
    """

    start_unix_ns: int
    end_unix_ns: int
    pages: PageCounts
    changes: PageChanges

    @property
    def seconds(self) -> float:
        """Returns the duration of the step."""
        return (self.end_unix_ns - self.start_unix_ns) / 1e9


@dataclass(frozen=True, slots=True)
class ReservedPages:
    """Pages in token order. The first `num_cached_tokens` tokens, in whole pages, are already cached."""

    page_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class KeptPages:
    """Unreferenced pages, and the generations that identify their content."""

    page_ids: tuple[int, ...]
    generations: tuple[int, ...]


class PrefixPages(ABC):
    """The prefix cache of an engine, as the source and the target of prefix fetches.

    Every method is a command.
    """

    @abstractmethod
    def find_prefix(self, token_ids: list[int], *, salt: bytes) -> KeptPages:
        """Returns the cached pages of the beginning of `token_ids`. They stay unreferenced, so they may be evicted."""

    @abstractmethod
    def reserve_prefix(self, key: Hashable, token_ids: list[int], *, salt: bytes) -> ReservedPages:
        """Reserves whole pages for incoming tokens. Raises NoFreePages, which the caller's reservations prevent."""

    @abstractmethod
    def cache_prefix(self, key: Hashable) -> None:
        """Releases received pages into the prefix cache."""

    @abstractmethod
    def close(self, key: Hashable) -> None:
        """Releases pages whose content has not arrived. Ignores unknown keys."""


class Engine(ABC):
    """The interface that both workers require of an engine."""

    prefixes: PrefixPages | None = None
    """Prefix cache for exchange with other workers. None if the engine does not support it."""
    speedometer: Speedometer
    """Estimates the time of steps. Readable from any thread. The worker adds transfer measurements."""

    @abstractmethod
    def step(self) -> bool:
        """Computes and reports one step. Returns whether work remains."""

    @abstractmethod
    def check_books(self) -> None:
        """Checks the page accounting. Called after the engine has been idle for a while.

        Raises InvariantViolated if pages have leaked.
        """


# --- prefill ---


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first `num_tokens` tokens of a prompt, in whole pages, whose KV is already in `page_ids`."""

    num_tokens: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """The effect of a step on one prompt.

    `page_ids` are the pages that the step completed, from index `first_page` of the prompt's page table. On the last
    chunk, `outcome` is the first token, a sampling failure, the pooled state of an embedding request, or None if the
    caller has the token. `finish_reason` is set if the first token is also the last.
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
    """A prefill step. `chunks` is empty for reports between steps."""

    chunks: tuple[ComputedChunk, ...]


class PrefillEngine(Engine):
    """Computes prompts. Each prompt has a key, valid from `begin` to `release`."""

    @abstractmethod
    def begin(self, sequence: Sequence, *, salt: bytes, service_class: int = DEFAULT_CLASS) -> CachedPrefix:
        """Allocates all pages of a prompt and queues it. Returns its cached prefix.

        Pages are shared between prompts with the same `salt`. Raises NoFreePages, which reservations prevent.
        """

    @abstractmethod
    def release(self, key: Hashable, *, is_kept: bool = False) -> None:
        """Removes a prompt and releases its pages, computed or not. Ignores unknown keys.

        If `is_kept`, all its pages are computed, and are retained until `take_kept`, `drop_kept`, or eviction.
        """

    @abstractmethod
    def take_kept(self, kept_key: Hashable, key: Hashable) -> tuple[int, ...] | None:
        """Transfers the pages retained under `kept_key` to `key`. Returns None if a page was evicted."""

    @abstractmethod
    def drop_kept(self, key: Hashable) -> None:
        """Discards retained pages. Ignores unknown keys."""


# --- decode ---


class Guesses(NamedTuple):
    """Number of draft tokens verified for a sequence in a step, their source, and how many were accepted."""

    source: str
    num_tokens: int
    num_accepted: int


class Advance(NamedTuple):
    """The effect of a step on one sequence.

    `num_tokens` were computed from position `start`. `token_index` is the position in the response of the token in
    `outcome`, or of the first token if there are several. All but the last of them were draft tokens. `outcome` is None
    if the step computed part of a prompt or replayed a token. For an embedding request it is the state pooled so far. A
    sequence with a `finish_reason` or a failure has left the batch, and its pages are free.
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
        """Returns the new tokens of the response, in order."""
        if isinstance(self.outcome, SampledTokens):
            return self.outcome.tokens
        return (self.outcome,) if isinstance(self.outcome, SampledToken) else ()

    @property
    def num_rows(self) -> int:
        """Returns the number of tokens that the model processed, including rejected ones."""
        return self.num_tokens if self.guesses is None else 1 + self.guesses.num_tokens


class PausedSequence(NamedTuple):
    """A sequence that was removed from the batch. It does not change until `unpause`.

    `page_ids` hold the KV of its first `num_computed_tokens` tokens: all tokens except the last, `next_token_id`.
    """

    key: Hashable
    num_generated_tokens: int
    num_computed_tokens: int
    next_token_id: int
    page_ids: tuple[int, ...]


class Preemption(NamedTuple):
    """A sequence that lost its batch slot or its pages to other sequences.

    `place`: it left the batch for a better class and retains its pages. `no_page`: it left the batch because no page
    was free for its next token, and retains its pages. `swapped`, `recomputed`: its pages were evicted, and their
    content is in host memory or must be recomputed.
    """

    key: Hashable
    reason: Literal["place", "no_page", "swapped", "recomputed"]


@dataclass(frozen=True, slots=True)
class DecodeReport(StepReport):
    """A decode step. `advances` is empty for reports between steps.

    Sequences in `paused` were paused after the step. Sequences in `preempted` were preempted before it.
    """

    advances: tuple[Advance, ...]
    paused: tuple[PausedSequence, ...]
    num_running: int
    num_waiting: int
    waiting_tokens: int
    preempted: tuple[Preemption, ...] = ()


class DecodeEngine(Engine):
    """Reserves pages and computes sequences. A key is valid from `reserve` or `start` until its end or `free`."""

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
        """Reserves pages for incoming tokens, at once unless sequences of the same or a better class wait for pages.

        The first `num_prompt_tokens` tokens are the prompt. `adapter` is empty for the base model. Pages are shared
        between sequences with the same `salt`. The future is set on the engine thread. It fails with RequestCancelled
        if `free` or `withdraw` is called first.
        """

    @abstractmethod
    def withdraw(self, key: Hashable) -> None:
        """Fails a reservation that still waits for pages. Does nothing if it has been granted."""

    @abstractmethod
    def start(
        self, sequence: Sequence, *, salt: bytes, is_paused: bool = False, service_class: int = DEFAULT_CLASS
    ) -> None:
        """Queues a sequence for the batch, or pauses it before its first decode step.

        Either its first `num_computed_tokens` tokens have arrived in the pages reserved under its ID, or it has no
        pages and is computed here. A sequence with a reservation keeps the class of the reservation.
        """

    @abstractmethod
    def pause(self, key: Hashable) -> None:
        """Removes a sequence from the batch once it has a token and only its last token is uncomputed.

        It retains its pages. The pause is reported once, after all results computed for the sequence. Does nothing if
        the sequence has ended or is paused.
        """

    @abstractmethod
    def unpause(self, key: Hashable) -> None:
        """Queues a paused sequence again, or cancels a pending pause. Ignores other sequences."""

    @abstractmethod
    def free(self, key: Hashable) -> None:
        """Removes a key in any phase and frees its pages. Ignores unknown keys."""
