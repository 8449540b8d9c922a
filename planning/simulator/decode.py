"""A simulated decode worker: what it does with its time, its places and its pages.

It gives every sequence of its batch a token in each step. Between two changes of the batch the length of all steps is
known, so that many steps are one event. Prompts that are computed here go in chunks in the same steps; each takes a
place in the batch from its first chunk on.
"""

import heapq
import math
from collections import deque
from functools import partial
from typing import Protocol

from planning.simulator.block_cache import PagePool
from planning.simulator.events import EventLoop
from planning.simulator.jobs import WHOLE, Job, PromptLine, WorkerSpec
from planning.simulator.timeline import Timeline
from services.scheduling.prediction import DecodeSpeed
from services.scheduling.routing.views import WorkerView


class DecodeOwner(Protocol):
    """What a decode worker tells of its work."""

    def note_first_token(self, job: Job) -> None:
        """Takes the first token of an attempt whose prompt was computed here."""
        ...

    def note_end(self, job: Job) -> None:
        """Hears that an answer is complete."""
        ...


class DecodeWorker:
    """Generates answers; computes prompts too, where it is told to."""

    def __init__(
        self, worker_id: str, spec: WorkerSpec, *, loop: EventLoop, busy: Timeline, owner: DecodeOwner
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
        self.num_running = 0
        self.context_tokens = 0
        self._jobs: dict[int, Job] = {}
        self._loop = loop
        self._owner = owner
        self._ready: deque[Job] = deque()
        self._by_finish: list[tuple[int, int, Job]] = []
        self._step_index = 0
        self._run_began_s: float | None = None
        self._run_steps = 0
        self._run_speed = DecodeSpeed(0.0, 0.0)
        self._run_chunks: list[tuple[Job, int]] = []
        self._run_number = 0

    @property
    def num_requests(self) -> int:
        """Requests for which pages are promised."""
        return len(self._jobs)

    @property
    def is_idle(self) -> bool:
        """Whether no request is here."""
        return not self._jobs

    @property
    def queue_s(self) -> float:
        """Predicted seconds of computing the prompts that wait here."""
        return max(0.0, self.line.time_s)

    @property
    def num_places(self) -> int:
        """Places that are free in the batch."""
        return self.spec.max_batch - self.num_running - len(self.line.begun)

    def promise(self, job: Job) -> bool:
        """Sets the pages of prompt and answer aside; False if they are not there."""
        job.decode_lease = self.pool.reserve(job.blocks, job.num_all_pages(self.spec.page_size))
        if job.decode_lease is None:
            return False
        self._jobs[job.index] = job
        self.view = None
        return True

    def enter_prompt(self, job: Job) -> None:
        """Takes a prompt to be computed here, for which pages are promised."""
        assert job.decode_lease is not None, "its pages are promised"
        self.line.enter(job, job.decode_lease.num_cached)
        job.num_cached_tokens = job.num_computed_tokens
        self._continue()

    def join(self, job: Job) -> None:
        """Takes a sequence whose prompt is here and whose first token is out."""
        assert job.decode_lease is not None, "its pages are promised"
        self.pool.publish(job.decode_lease)
        self._ready.append(job)
        self._continue()

    def withdraw(self, job: Job) -> None:
        """Ends an answer that needs no step here."""
        self._leave(job)

    def drop(self, job: Job) -> None:
        """Forgets a request whose pages have not come, because its attempt has failed."""
        del self._jobs[job.index]
        assert job.decode_lease is not None, "its pages are promised"
        self.pool.release(job.decode_lease)
        job.decode_lease = None
        self.view = None

    def change_pace(self, factor: float) -> None:
        """Takes `factor` times as long from the next step on."""
        self.pace = factor
        if self._run_began_s is not None and not self._run_chunks and not self.is_lost:
            self._shorten_run()

    def lose(self) -> None:
        """Ends at once; each request of the batch knows then what was given of its answer."""
        self.is_lost = True
        num_steps = 0
        if self._run_began_s is not None and not self._run_chunks:
            num_steps = max(0, self._steps_until(self._loop.now_s) - 1)
        for finish_step, _, job in self._by_finish:
            job.num_emitted = job.num_output_tokens - (finish_step - self._step_index - num_steps)

    def _continue(self) -> None:
        if self.is_lost:
            return
        if self._run_began_s is None:
            self._begin_run()
        elif not self._run_chunks and self.num_places > 0:
            self._shorten_run()

    def _begin_run(self) -> None:
        self.view = None
        while self._ready and self.num_places > 0:
            self._enter_batch(self._ready.popleft())
        now_s, speed = self._loop.now_s, self.spec.law.decode_at(self.num_running)
        if self.pace != 1.0:
            speed = speed.times(self.pace)
        self._run_speed, self._run_steps, self._run_chunks = speed, 0, []
        if self.line:
            self.line.begin_waiting(self._begin, now_s)
            busy_s = speed.step_s(self.num_running, self.context_tokens) if self.num_running else None
            self._run_chunks = self.line.next_chunks(self.num_running, busy_s=busy_s, now_s=now_s)
        if self._run_chunks:
            work = [(num_tokens, job.num_computed_tokens) for job, num_tokens in self._run_chunks]
            if self.spec.chunking == WHOLE and sum(n for n, _ in work) + self.num_running > self.spec.chunk_tokens:
                time_s = self.pace * self.spec.law.step_s(work)
            else:
                time_s = self.pace * self.spec.law.step_s(
                    work, num_sequences=self.num_running, context_tokens=self.context_tokens
                )
                self._run_steps = 1 if self.num_running else 0
        elif self.num_running:
            self._run_steps = self._by_finish[0][0] - self._step_index
            time_s = self._steps_s(self._run_steps)
        else:
            self._run_began_s = None
            return
        self._run_began_s = now_s
        self._run_number += 1
        self._loop.at(now_s + time_s, partial(self._end_run, self._run_number))

    def _begin(self, job: Job) -> int | None:
        assert job.decode_lease is not None, "its pages are promised"
        return job.decode_lease.num_cached if self.num_places > 0 else None

    def _steps_s(self, num_steps: int) -> float:
        """Returns the seconds of the run's next steps: each has one token of each sequence more to look at."""
        first_s = self._run_speed.step_s(self.num_running, self.context_tokens)
        growth_s = self._run_speed.s_per_context_token * self.num_running
        return num_steps * first_s + growth_s * num_steps * (num_steps - 1) / 2

    def _steps_until(self, time_s: float) -> int:
        """Returns the steps of the run that have begun before `time_s`; what comes as it begins is in the first."""
        assert self._run_began_s is not None, "a run is under way"
        elapsed_s = time_s - self._run_began_s
        first_s = self._run_speed.step_s(self.num_running, self.context_tokens)
        half_growth_s = self._run_speed.s_per_context_token * self.num_running / 2
        # elapsed = first·k + half_growth·k·(k - 1), solved for k in the form that does not cancel
        linear = first_s - half_growth_s
        num_steps = math.ceil(2 * elapsed_s / (linear + math.sqrt(linear * linear + 4 * half_growth_s * elapsed_s)))
        while num_steps > 0 and self._steps_s(num_steps - 1) >= elapsed_s:
            num_steps -= 1
        while self._steps_s(num_steps) < elapsed_s:
            num_steps += 1
        return num_steps

    def _shorten_run(self) -> None:
        """Something new waits: ends the run with the step that is being computed."""
        assert self._run_began_s is not None, "a run is under way"
        num_steps = self._steps_until(self._loop.now_s)
        if num_steps < self._run_steps:
            self._run_steps = num_steps
            self._run_number += 1
            end_s = max(self._loop.now_s, self._run_began_s + self._steps_s(num_steps))
            self._loop.at(end_s, partial(self._end_run, self._run_number))

    def _end_run(self, run_number: int) -> None:
        if run_number != self._run_number or self.is_lost:
            return  # it was shortened
        assert self._run_began_s is not None, "a run is under way"
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
        computed = self._end_chunks()
        self._begin_run()
        for job in ended:
            self._leave(job)
        for job in computed:
            self._owner.note_first_token(job)

    def _end_chunks(self) -> list[Job]:
        """Returns the prompts that are now computed; their sequences join the next step."""
        computed = [job for job, num_tokens in self._run_chunks if self.line.compute(job, num_tokens)]
        self._run_chunks = []
        for job in computed:
            job.is_first_out = True
            if job.num_left > 1:
                assert job.decode_lease is not None, "its pages are promised"
                self.pool.publish(job.decode_lease)
        # They have their places; others wait for one.
        self._ready.extendleft(job for job in reversed(computed) if job.num_left > 1)
        return computed

    def _enter_batch(self, job: Job) -> None:
        job.joined_s = self._loop.now_s
        job.is_first_out = False
        # The first token has come; a step reads it and brings the second.
        job.finish_step = self._step_index + job.num_left - 1
        heapq.heappush(self._by_finish, (job.finish_step, job.index, job))
        self.num_running += 1
        self.context_tokens += job.num_replayed_tokens + 1

    def _leave(self, job: Job) -> None:
        self.drop(job)
        self._owner.note_end(job)
