"""Chunks by measured speed, where the measurements are noisy: no prompt takes much longer than with the best chunk."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.chunks import ChunkScheduler, StepTargets
from services.scheduling.prediction import DEFAULT_PREFILL, PrefillSpeed
from services.scheduling.speedometer import Speedometer
from tests.examples import examples

CHUNK_TOKENS = 512
UNMEASURED_TOKENS = 128
PROMPT_TOKENS = 2500
MAX_RATIO = 1.5
TARGETS = StepTargets(alone_s=0.050)
CPU = PrefillSpeed(0.006, 0.0013)


class Worker:
    """An engine of a known speed, whose measured step times are now and then up to `slowness` times the true ones."""

    def __init__(self, engine: PrefillSpeed, *, slowness: float, share: float, seed: int) -> None:
        self.engine, self.slowness, self.share = engine, slowness, share
        self.random = random.Random(seed)
        self.scheduler = ChunkScheduler(chunk_tokens=CHUNK_TOKENS, targets=TARGETS)
        self.speedometer = Speedometer()
        self.now_s = 0.0

    def compute(self, key: int, num_tokens: int) -> float:
        """Seconds that a prompt's steps take where nothing disturbs them."""
        self.scheduler.add(key, num_tokens=num_tokens, now_s=self.now_s)
        computed_s = 0.0
        while len(self.scheduler):
            computed_s += self.step()
        return computed_s

    def step(self) -> float:
        speed = self.speedometer.prefill
        max_tokens = UNMEASURED_TOKENS if speed is None else None
        chunks = self.scheduler.next_step(speed=speed or DEFAULT_PREFILL, now_s=self.now_s, max_tokens=max_tokens)
        empty_s = self.engine.time_s(0)
        time_s = empty_s + sum(self.engine.time_s(one.num_tokens, one.start) - empty_s for one in chunks)
        is_slow = self.random.random() < self.share
        seen_s = time_s * (self.random.uniform(1, self.slowness) if is_slow else self.random.uniform(0.95, 1.05))
        self.now_s += seen_s
        self.speedometer.observe_step([(one.start, one.num_tokens, True) for one in chunks], seen_s, self.now_s)
        return time_s


def best_fixed_s(engine: PrefillSpeed) -> float:
    """Seconds of a prompt in equal chunks of the best size."""

    def in_chunks_s(size: int) -> float:
        starts = range(0, PROMPT_TOKENS, size)
        return sum(engine.time_s(min(size, PROMPT_TOKENS - start), start) for start in starts)

    return min(in_chunks_s(size) for size in (16, 32, 64, 128, 256, CHUNK_TOKENS))


@pytest.mark.parametrize("slowness", [1.0, 2.0, 4.0, 7.0])
def test_no_prompt_of_many_takes_much_longer_than_in_the_best_chunks(slowness: float) -> None:
    best_s = best_fixed_s(CPU)
    for seed in range(10):
        worker = Worker(CPU, slowness=slowness, share=0.3, seed=seed)
        ratios = []
        for key in range(60):
            ratios.append(worker.compute(key, PROMPT_TOKENS) / best_s)
            worker.now_s += worker.random.expovariate(3.0)
        assert max(ratios) < MAX_RATIO, f"seed {seed}"


@given(
    overhead_s=st.floats(0.0005, 0.5),
    overhead_tokens=st.floats(1, 256),
    attention=st.floats(0, 1e-3),
    slowness=st.floats(1, 7),
    share=st.floats(0, 0.3),
    gap_s=st.floats(0, 5),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=examples(60), deadline=None)
def test_nor_does_it_on_any_other_engine(
    overhead_s: float,
    overhead_tokens: float,
    attention: float,
    slowness: float,
    share: float,
    gap_s: float,
    seed: int,
) -> None:
    s_per_token = overhead_s / overhead_tokens
    engine = PrefillSpeed(overhead_s, s_per_token, attention * s_per_token)
    worker = Worker(engine, slowness=slowness, share=share, seed=seed)
    best_s = best_fixed_s(engine)
    for key in range(12):
        assert worker.compute(key, PROMPT_TOKENS) < MAX_RATIO * best_s
        worker.now_s += gap_s


def test_a_worker_in_steps_of_one_token_comes_out_of_them() -> None:
    """It has learned that empty steps are free: as wrong as a speed can be."""
    worker = Worker(CPU, slowness=1.0, share=0.0, seed=0)
    for number in range(40):
        worker.speedometer.observe_step([(0, 50 + number, True)], 0.0015 * (50 + number), number * 0.1)
    worker.now_s = 4.0
    for key in range(300):  # many have come: steps are as short as they may be
        worker.scheduler.add(("gone", key), num_tokens=1, now_s=4.0)
        worker.scheduler.remove(("gone", key))
    assert worker.compute(0, PROMPT_TOKENS) < 2 * best_fixed_s(CPU)
    assert worker.compute(1, PROMPT_TOKENS) < MAX_RATIO * best_fixed_s(CPU)


@pytest.mark.parametrize("slowness", [1.0, 2.0])
def test_nor_does_it_where_others_come_all_the_time(slowness: float) -> None:
    """Then steps are as short as they may be, and their floor alone keeps most of the time for tokens."""
    best_s = best_fixed_s(CPU)
    worker = Worker(CPU, slowness=slowness, share=0.1, seed=0)
    for key in range(3):
        worker.compute(key, PROMPT_TOKENS)
    worker.scheduler.add("long", num_tokens=PROMPT_TOKENS, now_s=worker.now_s)
    computed_s = 0.0
    while len(worker.scheduler):
        for number in range(20):
            worker.scheduler.add(("gone", number), num_tokens=1, now_s=worker.now_s)
            worker.scheduler.remove(("gone", number))
        computed_s += worker.step()
    assert computed_s < MAX_RATIO * best_s
