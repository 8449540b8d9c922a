"""What simulated workers are made of and work on: their sizes and speeds, a request on its way, prompts that wait."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from planning.simulator.block_cache import LRU_LEAF_FIRST, Lease
from planning.simulator.laws import StepLaw
from planning.simulator.traces import TraceRequest
from services.scheduling.chunks import ChunkScheduler, more_steps_s
from services.scheduling.entry import ServiceClass
from services.scheduling.prediction import LinkSpeed
from services.scheduling.regions import Residency
from services.scheduling.routing.views import Pull

TANDEM, FCFS, WHOLE = "tandem", "fcfs", "whole"
CHUNKINGS = (TANDEM, FCFS, WHOLE)
"""Which tokens of prompts a step has: by the workers' own `ChunkScheduler`; as many as fit, first come first served, as
vLLM does; whole prompts that fit together, first come first served, at least one, while sequences pause that no longer
fit, as in splitwise-sim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker: pages of `page_size` tokens, speeds, and the most that a step or a batch takes.

    Sequences of a step count as its tokens too, so that prompts get what they leave of `chunk_tokens`.
    """

    num_pages: int
    page_size: int
    law: StepLaw
    link: LinkSpeed
    kv_bytes_per_token: int
    chunk_tokens: int
    max_batch: int
    chunking: str = FCFS
    eviction: str = LRU_LEAF_FIRST
    outside_s: float = 0.0
    """What a request whose prompt is computed here spends outside workers before its first token, in seconds."""


class Phase(Enum):
    """Where a request's attempt stands; those that wait have none."""

    WAITING = auto()
    PREFILL = auto()
    TRANSFER = auto()
    DECODE = auto()


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
    region: str = ""
    residency: Residency = ()
    refusal: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    is_remote: bool = False
    outside_s: float = 0.0
    """Seconds that its messages take besides those between regions."""
    pull: Pull | None = None
    """What its prefill worker is to fetch first."""
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
    attempt: int = 1
    phase: Phase = Phase.WAITING
    num_emitted: int = 0
    """Tokens of the answer that earlier attempts have given; a further attempt computes them with the prompt."""
    is_first_out: bool = False
    """Whether the attempt's first token is out, and no step has brought another."""

    @property
    def num_replayed_tokens(self) -> int:
        """Tokens to compute before the next one of the answer: the prompt, and what was given of the answer."""
        return self.num_prompt_tokens + self.num_emitted

    @property
    def num_left(self) -> int:
        """Tokens of the answer that are not given yet."""
        return self.num_output_tokens - self.num_emitted

    def num_pages(self, page_size: int) -> int:
        """Returns the pages of what is computed before the next token."""
        return -(-self.num_replayed_tokens // page_size)

    def num_all_pages(self, page_size: int) -> int:
        """Returns the pages of prompt and answer."""
        return -(-(self.num_prompt_tokens + self.num_output_tokens) // page_size)


def job_of(index: int, request: TraceRequest, *, page_size: int) -> Job:
    """Returns a request as it begins. Only full pages of its prompt are reused: a partial one is computed into."""
    return Job(
        index=index,
        arrival_s=request.arrival_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        blocks=request.block_ids[: request.num_prompt_tokens // page_size],
        tenant=request.tenant,
        service_class=request.service_class,
        region=request.region,
        residency=request.residency,
    )


def prompt_s(spec: WorkerSpec, num_tokens: int, *, before: int = 0) -> float:
    """Returns how long a worker is predicted to take for a prompt alone, with the steps it is cut into."""
    speed = spec.law.prefill
    time_s = speed.time_s(num_tokens, before)
    if spec.chunking != TANDEM:
        return time_s
    empty_s = speed.overhead_s
    return time_s + more_steps_s(empty_s, time_s - empty_s, num_tokens, chunk_tokens=spec.chunk_tokens)


class PromptLine:
    """Prompts that wait for computation on one worker, in the order of their arrival, and how much that is.

    A prompt begins when it is certain what of it is reused and it holds what it needs; only then a step has its tokens.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._speed = spec.law.prefill
        self.waiting: deque[Job] = deque()
        self.begun: dict[int, Job] = {}
        self.num_tokens = 0
        self.time_s = 0.0
        self._scheduler = ChunkScheduler(chunk_tokens=spec.chunk_tokens) if spec.chunking == TANDEM else None

    def __len__(self) -> int:
        return len(self.waiting) + len(self.begun)

    def enter(self, job: Job, num_cached_blocks: int) -> None:
        """Adds a prompt at the end; `num_cached_blocks` of it are here as far as one can tell now."""
        job.num_computed_tokens = self._cached_tokens(job, num_cached_blocks)
        self.waiting.append(job)
        self._price(job)

    def begin_waiting(self, can_begin: Callable[[Job], int | None], now_s: float) -> None:
        """Begins prompts in their order until one cannot: `can_begin` gives its cached blocks, or None."""
        while self.waiting:
            num_cached_blocks = can_begin(self.waiting[0])
            if num_cached_blocks is None:
                return
            job = self.waiting.popleft()
            self._unprice(job)
            job.num_cached_tokens = job.num_computed_tokens = self._cached_tokens(job, num_cached_blocks)
            self._price(job)
            self.begun[job.index] = job
            if job.prefill_began_s is None:
                job.prefill_began_s = now_s
            if self._scheduler is not None:
                self._scheduler.add(
                    job.index,
                    num_tokens=job.num_replayed_tokens,
                    start=job.num_computed_tokens,
                    service_class=ServiceClass.from_name(job.service_class),
                    now_s=now_s,
                )

    def next_chunks(self, num_sequences: int, *, busy_s: float | None, now_s: float) -> list[tuple[Job, int]]:
        """Returns the chunks of the next step, of prompts that have begun."""
        if not self.begun:
            return []
        is_whole = self._spec.chunking == WHOLE
        budget = self._spec.chunk_tokens if is_whole else max(1, self._spec.chunk_tokens - num_sequences)
        if self._scheduler is not None:
            chunks = self._scheduler.next_step(speed=self._speed, now_s=now_s, max_tokens=budget, busy_s=busy_s)
            return [(self.begun[int(str(chunk.key))], chunk.num_tokens) for chunk in chunks]
        found: list[tuple[Job, int]] = []
        for job in self.begun.values():
            num_left = job.num_replayed_tokens - job.num_computed_tokens
            if not is_whole:
                num_left = min(num_left, budget)
            if budget <= 0 or (found and num_left > budget):
                break
            found.append((job, num_left))
            budget -= num_left
        return found

    def compute(self, job: Job, num_tokens: int) -> bool:
        """Notes `num_tokens` more of it as computed; returns whether that was the last."""
        self._unprice(job)
        job.num_computed_tokens += num_tokens
        if job.num_computed_tokens < job.num_replayed_tokens:
            self._price(job)
            return False
        self._forget(job)
        return True

    def drop(self, job: Job) -> bool:
        """Takes a prompt out that nobody wants any longer; returns whether it was here."""
        if job.index in self.begun:
            self._unprice(job)
            if self._scheduler is not None:
                self._scheduler.remove(job.index)
            self._forget(job)
            return True
        if job in self.waiting:
            self._unprice(job)
            self.waiting.remove(job)
            return True
        return False

    def _forget(self, job: Job) -> None:
        del self.begun[job.index]
        if not self.begun and not self.waiting:
            self.time_s = 0.0  # what rounding has left

    def _price(self, job: Job) -> None:
        num_left = job.num_replayed_tokens - job.num_computed_tokens
        job.waiting_s = prompt_s(self._spec, num_left, before=job.num_computed_tokens)
        self.num_tokens += num_left
        self.time_s += job.waiting_s

    def _unprice(self, job: Job) -> None:
        self.num_tokens -= job.num_replayed_tokens - job.num_computed_tokens
        self.time_s -= job.waiting_s

    def _cached_tokens(self, job: Job, num_blocks: int) -> int:
        # The last token of a prompt is always computed: the first one of the answer comes out of it.
        return min(num_blocks * self._spec.page_size, job.num_replayed_tokens - 1)
