"""Simulated workers: what a prefill and a decode worker do with their time, their pages and their link.

A prefill worker computes prompts first come first served, in chunks, several in a step of at most `chunk_tokens`. A
prompt takes all its pages before its first chunk. Pages leave over the worker's link, one after the other, as soon as
their chunk is computed; the first token does not wait for them.

A decode worker gives every sequence of its batch a token in each step. Between two changes of the batch the length of
all steps is known, so that many steps are one event. A prompt that is computed here goes in chunks between the steps.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from planning.simulator.block_cache import LRU_LEAF_FIRST, Lease, PagePool
from planning.simulator.events import EventLoop
from planning.simulator.profiles import DecodeLaw
from planning.simulator.timeline import Timeline
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker: pages of `page_size` tokens, speeds, and the most that a step or a batch takes."""

    num_pages: int
    page_size: int
    prefill: PrefillSpeed
    decode: DecodeLaw
    link: LinkSpeed
    kv_bytes_per_token: int
    chunk_tokens: int
    max_batch: int
    eviction: str = LRU_LEAF_FIRST


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the workers. Times are None until they have come."""

    index: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the full pages of the prompt."""
    tenant: str = ""
    service_class: str = "normal"
    refusal: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    is_remote: bool = False
    dispatched_s: float | None = None
    prefill_began_s: float | None = None
    first_token_s: float | None = None
    joined_s: float | None = None
    end_s: float | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_sent_tokens: int = 0
    waiting_s: float = 0.0
    """Predicted seconds of what is not yet computed of the prompt, where it waits."""
    prefill_lease: Lease | None = field(default=None, repr=False)
    decode_lease: Lease | None = field(default=None, repr=False)
    finish_step: int = 0

    def num_pages(self, page_size: int) -> int:
        """Pages of the prompt."""
        return -(-self.num_prompt_tokens // page_size)

    def num_all_pages(self, page_size: int) -> int:
        """Pages of prompt and answer."""
        return -(-(self.num_prompt_tokens + self.num_output_tokens) // page_size)


class _PromptLine:
    """Prompts that wait for computation on one worker, and how much that is."""

    def __init__(self, speed: PrefillSpeed, page_size: int) -> None:
        self._speed = speed
        self._page_size = page_size
        self.jobs: deque[Job] = deque()
        self.num_tokens = 0
        self.time_s = 0.0

    def enter(self, job: Job, num_cached_blocks: int) -> None:
        """A prompt at the end; `num_cached_blocks` of it are here as far as one can tell now."""
        job.num_computed_tokens = self._cached_tokens(job, num_cached_blocks)
        self.jobs.append(job)
        self._price(job)

    def begin(self, job: Job, num_cached_blocks: int) -> None:
        """The prompt's turn: what is reused is certain now."""
        self._unprice(job)
        job.num_cached_tokens = job.num_computed_tokens = self._cached_tokens(job, num_cached_blocks)
        self._price(job)

    def compute(self, job: Job, num_tokens: int) -> bool:
        """`num_tokens` more of it are computed; whether that was the last."""
        self._unprice(job)
        job.num_computed_tokens += num_tokens
        if job.num_computed_tokens < job.num_prompt_tokens:
            self._price(job)
            return False
        self.jobs.remove(job)
        if not self.jobs:
            self.time_s = 0.0  # what rounding has left
        return True

    def _price(self, job: Job) -> None:
        num_left = job.num_prompt_tokens - job.num_computed_tokens
        job.waiting_s = self._speed.time_s(num_left, job.num_computed_tokens)
        self.num_tokens += num_left
        self.time_s += job.waiting_s

    def _unprice(self, job: Job) -> None:
        self.num_tokens -= job.num_prompt_tokens - job.num_computed_tokens
        self.time_s -= job.waiting_s

    def _cached_tokens(self, job: Job, num_blocks: int) -> int:
        # The last token of a prompt is always computed: the first one of the answer comes out of it.
        return min(num_blocks * self._page_size, job.num_prompt_tokens - 1)


class PrefillWorker:
    """Computes prompts.

    `on_first_token` and `on_sent` are told of each, the latter when all its pages have arrived; `on_step` of each step.
    """

    def __init__(
        self,
        worker_id: str,
        spec: WorkerSpec,
        loop: EventLoop,
        busy: Timeline,
        *,
        on_first_token: Callable[[Job], None],
        on_sent: Callable[[Job], None],
        on_step: Callable[[], None],
    ) -> None:
        self.worker_id = worker_id
        self.spec = spec
        self.pool = PagePool(spec.num_pages, spec.eviction)
        self.line = _PromptLine(spec.prefill, spec.page_size)
        self.busy = busy
        self._loop = loop
        self._on_first_token = on_first_token
        self._on_sent = on_sent
        self._on_step = on_step
        self._step_ends_s = 0.0
        self._step_began_s = 0.0
        self._is_stepping = False
        self._link_free_s = 0.0

    @property
    def num_requests(self) -> int:
        """Prompts that wait or are computed."""
        return len(self.line.jobs)

    @property
    def queue_s(self) -> float:
        """Predicted seconds until what waits here is computed."""
        done_s = self._loop.now_s - self._step_began_s if self._is_stepping else 0.0
        return max(0.0, self.line.time_s - done_s)

    def enter(self, job: Job) -> None:
        """A prompt that fits into the pool when it is alone."""
        self.line.enter(job, self.pool.num_cached(job.blocks))
        if not self._is_stepping:
            self._step()

    def _step(self) -> None:
        """Packs the next step's chunks, first come first served."""
        budget, time_s = self.spec.chunk_tokens, 0.0
        chunks: list[tuple[Job, int]] = []
        for job in self.line.jobs:
            if budget == 0 or (job.prefill_lease is None and not self._begin(job)):
                break
            num_tokens = min(budget, job.num_prompt_tokens - job.num_computed_tokens)
            chunks.append((job, num_tokens))
            budget -= num_tokens
            time_s += self.spec.prefill.time_s(num_tokens, job.num_computed_tokens) - self.spec.prefill.overhead_s
        self._is_stepping = bool(chunks)
        if chunks:
            self._step_began_s = self._loop.now_s
            self._step_ends_s = self._loop.now_s + self.spec.prefill.overhead_s + time_s
            self._loop.at(self._step_ends_s, partial(self._end_step, chunks))

    def _begin(self, job: Job) -> bool:
        job.prefill_lease = self.pool.reserve(job.blocks, job.num_pages(self.spec.page_size))
        if job.prefill_lease is None:
            return False
        self.line.begin(job, job.prefill_lease.num_cached)
        job.prefill_began_s = self._loop.now_s
        assert job.decode_lease is not None
        job.num_sent_tokens = min(job.decode_lease.num_cached * self.spec.page_size, job.num_prompt_tokens - 1)
        return True

    def _end_step(self, chunks: list[tuple[Job, int]]) -> None:
        self.busy.add(self._step_began_s, self._loop.now_s)
        for job, num_tokens in chunks:
            is_done = self.line.compute(job, num_tokens)
            self._send(job, is_done)
            if is_done:
                assert job.prefill_lease is not None
                self.pool.publish(job.prefill_lease)
                self._on_first_token(job)
        self._step()
        self._on_step()

    def _send(self, job: Job, is_done: bool) -> None:
        num_tokens = max(0, job.num_computed_tokens - job.num_sent_tokens)
        job.num_sent_tokens += num_tokens
        bytes_s = num_tokens * self.spec.kv_bytes_per_token / self.spec.link.bytes_per_s
        self._link_free_s = max(self._link_free_s, self._loop.now_s) + bytes_s
        if is_done:
            self._loop.at(self._link_free_s + self.spec.link.latency_s, partial(self._end_sending, job))

    def _end_sending(self, job: Job) -> None:
        assert job.prefill_lease is not None
        self.pool.release(job.prefill_lease)
        job.prefill_lease = None
        if not self._is_stepping and self.line.jobs:
            self._step()
        self._on_sent(job)


class DecodeWorker:
    """Generates answers; computes prompts too, where it is told to. `on_end` is told of each answer's end."""

    def __init__(
        self,
        worker_id: str,
        spec: WorkerSpec,
        loop: EventLoop,
        busy: Timeline,
        *,
        on_first_token: Callable[[Job], None],
        on_end: Callable[[Job], None],
    ) -> None:
        self.worker_id = worker_id
        self.spec = spec
        self.pool = PagePool(spec.num_pages, spec.eviction)
        self.line = _PromptLine(spec.prefill, spec.page_size)
        self.busy = busy
        self.num_requests = 0
        self.num_running = 0
        self.context_tokens = 0
        self._loop = loop
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._ready: deque[Job] = deque()
        self._by_finish: list[tuple[int, int, Job]] = []
        self._step_index = 0
        self._run_began_s: float | None = None
        self._run_steps = 0
        self._run_chunk: tuple[Job, int] | None = None
        self._run_number = 0

    @property
    def queue_s(self) -> float:
        """Predicted seconds of computing the prompts that wait here."""
        return self.line.time_s

    @property
    def num_places(self) -> int:
        """Places that are free in the batch."""
        return self.spec.max_batch - self.num_running

    def promise(self, job: Job) -> bool:
        """Sets the pages of prompt and answer aside; False if they are not there."""
        job.decode_lease = self.pool.reserve(job.blocks, job.num_all_pages(self.spec.page_size))
        if job.decode_lease is None:
            return False
        self.num_requests += 1
        return True

    def enter_prompt(self, job: Job) -> None:
        """A prompt to be computed here, for which pages are promised."""
        assert job.decode_lease is not None
        self.line.enter(job, job.decode_lease.num_cached)
        job.num_cached_tokens = job.num_computed_tokens
        self._go_on()

    def join(self, job: Job) -> None:
        """A sequence whose prompt is here and whose first token is out."""
        assert job.decode_lease is not None
        self.pool.publish(job.decode_lease)
        self._ready.append(job)
        self._go_on()

    def withdraw(self, job: Job) -> None:
        """The answer needs no step here."""
        self._leave(job)

    def _go_on(self) -> None:
        if self._run_began_s is None:
            self._begin_run()
        elif self._run_chunk is None and (self.line.jobs or self.num_places > 0):
            self._shorten_run()

    def _begin_run(self) -> None:
        while self._ready and self.num_places > 0:
            self._enter_batch(self._ready.popleft())
        speed = self.spec.decode.at(self.num_running)
        time_s = 0.0
        self._run_chunk, self._run_steps = None, 0
        if self.line.jobs:
            job = self.line.jobs[0]
            num_tokens = min(self.spec.chunk_tokens, job.num_prompt_tokens - job.num_computed_tokens)
            if job.prefill_began_s is None:
                job.prefill_began_s = self._loop.now_s
            self._run_chunk = job, num_tokens
            time_s = self.spec.prefill.time_s(num_tokens, job.num_computed_tokens)
            if self.num_running:
                self._run_steps = 1
                time_s += speed.step_s(self.num_running, self.context_tokens)
        elif self.num_running:
            self._run_steps = self._by_finish[0][0] - self._step_index
            time_s = self._steps_s(speed, self._run_steps)
        else:
            self._run_began_s = None
            return
        self._run_began_s = self._loop.now_s
        self._run_number += 1
        self._loop.at(self._loop.now_s + time_s, partial(self._end_run, self._run_number))

    def _steps_s(self, speed: DecodeSpeed, num_steps: int) -> float:
        """Seconds of the next steps of an unchanged batch: each has one token of each sequence more to look at."""
        first_s = speed.step_s(self.num_running, self.context_tokens)
        growth_s = speed.s_per_context_token * self.num_running
        return num_steps * first_s + growth_s * num_steps * (num_steps - 1) / 2

    def _shorten_run(self) -> None:
        """Something new waits: the run ends with the step that is being computed.

        What comes at the very moment when a run begins is still in its first step.
        """
        assert self._run_began_s is not None
        elapsed_s = self._loop.now_s - self._run_began_s
        speed = self.spec.decode.at(self.num_running)
        first_s = speed.step_s(self.num_running, self.context_tokens)
        half_growth_s = speed.s_per_context_token * self.num_running / 2
        # elapsed = first·k + half_growth·k·(k - 1), solved for k in the form that does not cancel
        linear = first_s - half_growth_s
        root = 2 * elapsed_s / (linear + math.sqrt(linear * linear + 4 * half_growth_s * elapsed_s))
        num_steps = math.ceil(root)
        while num_steps > 0 and self._steps_s(speed, num_steps - 1) >= elapsed_s:
            num_steps -= 1
        while self._steps_s(speed, num_steps) < elapsed_s:
            num_steps += 1
        if num_steps < self._run_steps:
            self._run_steps = num_steps
            self._run_number += 1
            end_s = max(self._loop.now_s, self._run_began_s + self._steps_s(speed, num_steps))
            self._loop.at(end_s, partial(self._end_run, self._run_number))

    def _end_run(self, run_number: int) -> None:
        if run_number != self._run_number:
            return  # it was shortened
        assert self._run_began_s is not None
        self.busy.add(self._run_began_s, self._loop.now_s)
        self._run_began_s = None
        self._step_index += self._run_steps
        self.context_tokens += self.num_running * self._run_steps
        ended = []
        while self._by_finish and self._by_finish[0][0] <= self._step_index:
            ended.append(heapq.heappop(self._by_finish)[2])
        for job in ended:
            self.num_running -= 1
            self.context_tokens -= job.num_prompt_tokens + job.num_output_tokens
        computed = self._end_chunk()
        self._begin_run()
        for job in ended:
            self._leave(job)
        if computed is not None:
            self._on_first_token(computed)

    def _end_chunk(self) -> Job | None:
        """A prompt that is now computed; its sequence joins the next step."""
        if self._run_chunk is None:
            return None
        job, num_tokens = self._run_chunk
        self._run_chunk = None
        if not self.line.compute(job, num_tokens):
            return None
        if job.num_output_tokens > 1:
            assert job.decode_lease is not None
            self.pool.publish(job.decode_lease)
            self._ready.append(job)
        return job

    def _enter_batch(self, job: Job) -> None:
        job.joined_s = self._loop.now_s
        # The first token has come; a step reads it and brings the second.
        job.finish_step = self._step_index + job.num_output_tokens - 1
        heapq.heappush(self._by_finish, (job.finish_step, job.index, job))
        self.num_running += 1
        self.context_tokens += job.num_prompt_tokens + 1

    def _leave(self, job: Job) -> None:
        assert job.decode_lease is not None
        self.pool.release(job.decode_lease)
        job.decode_lease = None
        self.num_requests -= 1
        self._on_end(job)
