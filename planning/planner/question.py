"""What a plan is asked: a workload, targets, and the kinds of workers there are to choose from."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from planning.simulator.geography import Geography
from planning.simulator.jobs import FCFS, WorkerSpec
from planning.simulator.profiles import DEFAULT_LINK, Profile
from planning.simulator.traces import Trace, TraceRequest
from services.runtime.errors import ConfigError

MEMORY_SHARE = 0.9
"""The part of a GPU's memory that weights and pages may have."""
CHUNK_TOKENS, MAX_BATCH, PAGE_SIZE = 8192, 256, 16
DECODE_CHUNK_TOKENS = 2048
"""The most tokens of a step where prompts and sequences share it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: dollars an hour, watts under load, bytes of memory."""

    price_per_h: float
    watts: float
    memory_bytes: float


CATALOGUE = {
    "h100": Gpu(3.0, 700, 80e9),
    "a100": Gpu(1.8, 400, 80e9),
    "rtxpro6000": Gpu(1.8, 600, 96e9),
}
"""Watts and memory are the makers'; prices are round figures of rented GPUs, to be replaced by one's own."""
NUM_PARAMETERS = {"llama-3.1-8b": 8.0e9, "llama-3.1-70b": 70.6e9, "opt-13b": 12.9e9, "opt-66b": 65.7e9}
BYTES_PER_PARAMETER = {"fp8": 1, "bf16": 2}


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """What requests must keep, in seconds, at a percentile; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    percentile: float = 0.99


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests per second, and the lengths that are drawn from: (prompt tokens, answer tokens)."""

    rate_per_s: float
    lengths: Sequence[tuple[int, int]]

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @property
    def mean_answer(self) -> float:
        """Mean tokens of an answer."""
        return sum(answer for _, answer in self.lengths) / len(self.lengths)

    def trace(self, num_requests: int, *, rate_per_s: float, seed: int) -> Trace:
        """Returns requests in Poisson arrivals, with lengths drawn from the workload's."""
        source, now_s, requests = random.Random(seed), 0.0, []  # noqa: S311 - made-up load
        for _ in range(num_requests):
            now_s += source.expovariate(rate_per_s)
            requests.append(TraceRequest(now_s, *source.choice(self.lengths)))
        return Trace("workload", "csv", 0, tuple(requests))


@dataclass(frozen=True, slots=True)
class Kind:
    """A worker that could be had: its step times, GPUs, and tokens that its pages hold."""

    name: str
    profile: Profile
    num_gpus: int
    price_per_h: float
    watts: float
    kv_tokens: int
    max_batch: int = MAX_BATCH

    def spec(self, *, is_decode: bool = False, chunk_tokens: int = CHUNK_TOKENS) -> WorkerSpec:
        """Returns a prefill or a decode worker for a simulation."""
        profile = self.profile
        return WorkerSpec(
            num_pages=self.kv_tokens // PAGE_SIZE,
            page_size=PAGE_SIZE,
            law=(profile.decode_law if is_decode else None) or profile.law,
            link=profile.link or DEFAULT_LINK,
            kv_bytes_per_token=profile.kv_bytes_per_token,
            chunk_tokens=chunk_tokens,
            max_batch=self.max_batch,
            chunking=FCFS,
            outside_s=profile.outside_s[is_decode],
        )


@dataclass(frozen=True, slots=True)
class Question:
    """A workload, its targets, the kinds of workers, the most GPUs, how many workers of a role may be lost, and where
    workers are and requests come from. `tell` is called with what is simulated next.
    """

    workload: Workload
    targets: LatencyTargets
    kinds: Sequence[Kind]
    max_gpus: int = 100_000
    redundancy: int = 0
    geography: Geography = field(default_factory=Geography)
    seeds: tuple[int, ...] = field(default=(1, 2, 3))
    tell: Callable[[str], None] = field(default=lambda text: None, compare=False)


def kinds_for(
    model: str, profiles: Mapping[str, Profile], *, gpus: Sequence[str], catalogue: Mapping[str, Gpu] = CATALOGUE
) -> list[Kind]:
    """Returns the kinds of workers for a model, by the profiles that exist of it. Raises ConfigError if none does."""
    found = []
    for name, one in profiles.items():
        chip, _, rest = name.removeprefix("vllm-").partition("-")
        if chip not in gpus or chip not in catalogue or model not in NUM_PARAMETERS or not rest.startswith(f"{model}-"):
            continue
        precision, _, degree = rest.removeprefix(f"{model}-").rpartition("-tp")
        gpu, num_gpus = catalogue[chip], int(degree)
        weights = NUM_PARAMETERS[model] * BYTES_PER_PARAMETER.get(precision, 2)
        free = MEMORY_SHARE * gpu.memory_bytes * num_gpus - weights
        kv_tokens = int(free / one.kv_bytes_per_token)
        if kv_tokens > 0:
            found.append(Kind(name, one, num_gpus, gpu.price_per_h * num_gpus, gpu.watts * num_gpus, kv_tokens))
    if not found:
        known = sorted({name for name in NUM_PARAMETERS for full in profiles if f"-{name}-" in full})
        raise ConfigError(
            f"no step times of {model!r} on {', '.join(gpus)}; models with step times: {', '.join(known)}"
        )
    return found
