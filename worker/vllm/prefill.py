"""vLLM as the engine of a prefill worker. Each prompt samples one token, and its blocks are sent to a decode worker."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from services.engine.cache.pages import PageCounts
from services.engine.cache.pool import num_pages_for
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import SampledToken
from services.runtime.clock import Clock
from services.scheduling.chunks import DEFAULT_CLASS
from services.scheduling.speedometer import Speedometer
from worker.engine import CachedPrefix, ComputedChunk, PrefillEngine, PrefillReport
from worker.vllm.core import Computed, Core, request_ids


@dataclass(slots=True)
class _Prompt:
    """A prompt from `begin` to `release`, and how much of it has been reported."""

    key: Hashable
    sequence: Sequence
    num_tokens: int = 0
    num_pages: int = 0


class VllmPrefill(PrefillEngine):
    """Prompts by their keys and vLLM's IDs.

    Pages of prompts released with `is_kept` are retained only by vLLM's prefix cache. The next attempt starts after the
    pages that are still cached.
    """

    def __init__(self, core: Core, *, clock: Clock, on_report: Callable[[PrefillReport], None]) -> None:
        self._core = core
        self._clock = clock
        self._on_report = on_report
        self.speedometer = Speedometer()
        self._ids = request_ids("p")
        self._id_of: dict[Hashable, str] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._reported: PageCounts | None = None

    def begin(self, sequence: Sequence, *, salt: bytes, service_class: int = DEFAULT_CLASS) -> CachedPrefix:
        """Implements PrefillEngine."""
        request_id = self._id_of[sequence.sequence_id] = next(self._ids)
        page_ids = self._core.add_held(request_id, sequence, salt=salt, service_class=service_class)
        num_tokens = len(page_ids) * self._core.block_size
        self._prompts[request_id] = _Prompt(sequence.sequence_id, sequence, num_tokens, len(page_ids))
        return CachedPrefix(num_tokens, page_ids)

    def release(self, key: Hashable, *, is_kept: bool = False) -> None:
        """Implements PrefillEngine."""
        request_id = self._id_of.pop(key, None)
        if request_id is not None:
            del self._prompts[request_id]
            self._core.let_go(request_id)

    def take_kept(self, kept_key: Hashable, key: Hashable) -> tuple[int, ...] | None:
        """Implements PrefillEngine. Returns None, because only vLLM's prefix cache retains pages."""
        return None

    def drop_kept(self, key: Hashable) -> None:
        """Implements PrefillEngine."""

    def step(self) -> bool:
        """Implements Engine."""
        start_unix_ns, start_s = self._clock.unix_ns(), self._clock.monotonic()
        done = self._core.step()
        chunks = tuple(chunk for one in done.computed if (chunk := self._chunk(one)) is not None)
        counts = self._core.counts()
        if chunks or any(done.changes) or counts != self._reported:
            self._reported = counts
            end_unix_ns = self._clock.unix_ns()
            self._on_report(PrefillReport(start_unix_ns, end_unix_ns, counts, done.changes, chunks))
        if done.computed:
            end_s = self._clock.monotonic()
            work = [(one.start, one.num_tokens, True) for one in done.computed]
            self.speedometer.observe_step(work, end_s - start_s, end_s)
        return done.has_more

    def check_books(self) -> None:
        """Implements Engine."""
        if not self._prompts:
            self._core.check_books()

    def _chunk(self, computed: Computed) -> ComputedChunk | None:
        """Returns the new part of a prompt to report, or None if it was reported before a preemption."""
        prompt = self._prompts.get(computed.request_id)
        end = computed.start + computed.num_tokens
        if prompt is None or end <= prompt.num_tokens:
            return None
        sequence, block_size = prompt.sequence, self._core.block_size
        is_last = end == sequence.num_prompt_tokens
        start, first_page = prompt.num_tokens, prompt.num_pages
        end_page = num_pages_for(end, block_size) if is_last else end // block_size
        prompt.num_tokens, prompt.num_pages = end, end_page
        outcome = None if sequence.num_emitted_tokens else computed.outcome
        finish_reason = None
        if isinstance(outcome, SampledToken):
            sequence.append_token(outcome.token_id)
            finish_reason = sequence.finish_reason()
        page_ids = computed.block_ids[first_page:end_page]
        return ComputedChunk(prompt.key, start, end - start, first_page, page_ids, is_last, outcome, finish_reason)
