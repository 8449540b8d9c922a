"""A simulated prefill worker: what it does with its time and its pages.

It computes prompts in chunks, several in a step of at most `chunk_tokens` tokens. A prompt takes all its pages before
its first chunk and holds them until the last has arrived elsewhere. Pages leave as soon as their chunk is computed; the
first token does not wait for them.
"""

from functools import partial
from typing import Protocol

from planning.simulator.block_cache import Lease, PagePool
from planning.simulator.events import EventLoop
from planning.simulator.jobs import Job, PromptLine, WorkerSpec
from planning.simulator.timeline import Timeline
from services.scheduling.routing.views import WorkerView


class PrefillOwner(Protocol):
    """What a prefill worker tells of its work."""

    def send_pages(self, worker: "PrefillWorker", job: Job, *, is_last: bool) -> None:
        """Takes a chunk that is computed; `PrefillWorker.end_sending` answers when the last one's pages arrived."""
        ...

    def note_first_token(self, job: Job) -> None:
        """Takes the first token of an attempt."""
        ...

    def note_step(self) -> None:
        """Hears of the end of a step."""
        ...


class PrefillWorker:
    """Computes prompts."""

    def __init__(
        self, worker_id: str, spec: WorkerSpec, *, loop: EventLoop, busy: Timeline, owner: PrefillOwner
    ) -> None:
        self.worker_id = worker_id
        self.spec = spec
        self.pool = PagePool(spec.num_pages, spec.eviction)
        self.line = PromptLine(spec)
        self.busy = busy
        self.pace = 1.0
        """How many times as long as its law says its steps take."""
        self.is_lost = False
        self.view: WorkerView | None = None
        """What a gateway sees of it; None: it has changed since somebody looked."""
        self._loop = loop
        self._owner = owner
        self._step_began_s = 0.0
        self.is_stepping = False
        """Whether it computes, so that what waits here becomes less all the time."""
        self._sending: dict[tuple[int, int], Lease] = {}
        self.num_fetching = 0
        """Prompts whose beginning is on its way from another worker."""

    @property
    def num_requests(self) -> int:
        """Prompts that wait or are computed."""
        return len(self.line) + self.num_fetching

    @property
    def is_idle(self) -> bool:
        """Whether no prompt is here or on its way, and none is being sent."""
        return not (self.line or self._sending or self.num_fetching)

    @property
    def queue_s(self) -> float:
        """Predicted seconds until what waits here is computed."""
        done_s = self._loop.now_s - self._step_began_s if self.is_stepping else 0.0
        return max(0.0, self.line.time_s - done_s)

    def expect(self, more: int) -> None:
        """Notes that `more` prompts' beginnings are on their way from other workers."""
        self.num_fetching += more
        self.view = None

    def enter(self, job: Job) -> None:
        """Takes a prompt that fits into the pool when it is alone."""
        self.view = None
        self.line.enter(job, self.pool.num_cached(job.blocks))
        self._step_if_idle()

    def end_sending(self, job: Job, attempt: int) -> None:
        """Gives the pages of a prompt back: they have arrived, or nobody wants them any longer."""
        if not self.is_lost:
            self.pool.release(self._sending.pop((job.index, attempt)))
            self.view = None
            self._step_if_idle()

    def drop(self, job: Job) -> None:
        """Forgets a prompt whose attempt has failed; its pages are free unless they are being sent."""
        self.view = None
        if self.line.drop(job) and job.prefill_lease is not None:
            self.pool.release(job.prefill_lease)
            job.prefill_lease = None
            self._step_if_idle()

    def change_pace(self, factor: float) -> None:
        """Takes `factor` times as long from the next step on."""
        self.pace = factor

    def lose(self) -> None:
        """Ends at once; nothing more comes from here."""
        self.is_lost = True

    def _step_if_idle(self) -> None:
        if not self.is_stepping and self.line and not self.is_lost:
            self._step()

    def _step(self) -> None:
        now_s = self._loop.now_s
        self.view = None
        self.line.begin_waiting(self._begin, now_s)
        chunks = self.line.next_chunks(0, busy_s=None, now_s=now_s)
        self.is_stepping = bool(chunks)
        if chunks:
            work = [(num_tokens, job.num_computed_tokens) for job, num_tokens in chunks]
            self._step_began_s = now_s
            self._loop.at(now_s + self.pace * self.spec.law.step_s(work), partial(self._end_step, chunks))

    def _begin(self, job: Job) -> int | None:
        job.prefill_lease = self.pool.reserve(job.blocks, job.num_pages(self.spec.page_size))
        return None if job.prefill_lease is None else job.prefill_lease.num_cached

    def _end_step(self, chunks: list[tuple[Job, int]]) -> None:
        if self.is_lost:
            return
        self.busy.add(self._step_began_s, self._loop.now_s)
        for job, num_tokens in chunks:
            if job.index not in self.line.begun:
                continue  # it was dropped while it was computed
            is_last = self.line.compute(job, num_tokens)
            if is_last:
                assert job.prefill_lease is not None, "a prompt that is computed has its pages"
                self.pool.publish(job.prefill_lease)
                self._sending[job.index, job.attempt] = job.prefill_lease
                job.prefill_lease = None
                job.is_first_out = True
            self._owner.send_pages(self, job, is_last=is_last)
            if is_last:
                self._owner.note_first_token(job)
        self._step()
        self._owner.note_step()
