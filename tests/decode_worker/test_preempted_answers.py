"""A model in a pool far too small: a preempted sequence answers as if it had been alone, sampled in every way."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker import pages
from decode_worker.engine_loop import DecodeLoop
from decode_worker.pages import DecodePages
from decode_worker.scheduler import BatchScheduler
from services.engine.cache.swap import SwapSpace
from services.engine.engine import Engine, EngineParts, load_engine
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import SampledToken
from services.runtime.clock import SYSTEM_CLOCK
from worker.engine import DecodeReport

PAGE_SIZE = 4
NUM_PAGES = 24
VOCAB_SIZE = 331
SALT = b"one"

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.1, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 3, "min_tokens": 5},
    {"temperature": 0.0, "logprobs": 1, "frequency_penalty": 1.0, "logit_bias": {7: 3.0}},
]


def requests(seed: int) -> list[tuple[list[int], Sampling, int]]:
    """Prompts, ways of sampling and classes. None stops early, so that they press upon each other."""
    source = random.Random(seed)
    made = []
    for number in range(10):
        prompt = [source.randrange(2, VOCAB_SIZE) for _ in range(source.randrange(1, 30))]
        how = SAMPLINGS[number % len(SAMPLINGS)]
        sampling = Sampling(max_tokens=source.randrange(20, 60), seed=seed + number, **how)
        made.append((prompt, sampling, source.randrange(5)))
    return made


@pytest.fixture(scope="module")
def parts(checkpoint: Callable[..., Path]) -> EngineParts:
    torch.set_num_threads(1)
    return load_engine(checkpoint("llama3-gqa-tied"), page_size=PAGE_SIZE, num_pages=400)


def alone(parts: EngineParts, prompt: list[int], sampling: Sampling) -> list[SampledToken]:
    engine = Engine(parts)
    engine.add(prompt, sampling)
    tokens = []
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output.outcome, SampledToken)
            tokens.append(output.outcome)
    return tokens


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("way", ["swap", "recompute", "both"])
@pytest.mark.parametrize("seed", [1, 2])
def test_answers_of_those_that_gave_way_are_the_same(
    parts: EngineParts,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    is_exact: bool,
    way: str,
    seed: int,
) -> None:
    turns = itertools.cycle([True, False]) if way == "both" else itertools.repeat(way == "swap")
    monkeypatch.setattr(pages, "is_swap_cheaper", lambda **_: next(turns))
    assert parts.model.exact, "otherwise chunks and steps differ in the last bits"
    small = load_engine(checkpoint("llama3-gqa-tied"), page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    swap = SwapSpace(small.pool, 1 << 24)
    reports: list[DecodeReport] = []
    loop = DecodeLoop(
        runner=small.runner,
        pages=DecodePages(small.allocator, page_size=PAGE_SIZE, clock=SYSTEM_CLOCK, is_exact=is_exact, swap=swap),
        scheduler=BatchScheduler(
            max_batch=6, step_tokens=16, num_pages=NUM_PAGES, page_size=PAGE_SIZE, replays_in_chunks=is_exact
        ),
        clock=SYSTEM_CLOCK,
        on_report=reports.append,
    )
    made = requests(seed)
    for number, (prompt, sampling, service_class) in enumerate(made):
        loop.start(Sequence(number, prompt, sampling=sampling), salt=SALT, service_class=service_class)
        for _ in range(number):
            loop.step()
    while loop.step():
        pass
    loop.step()
    for number, (prompt, sampling, _) in enumerate(made):
        got = [
            (advance.token_index, advance.outcome)
            for report in reports
            for advance in report.advances
            if advance.key == number and advance.outcome is not None
        ]
        assert got == list(enumerate(alone(parts, prompt, sampling)))
    how_often = Counter(preemption.reason for report in reports for preemption in report.preempted)
    assert how_often["swapped"] >= 3 * (way != "recompute")
    assert how_often["recomputed"] >= 3 * (way != "swap")
    assert small.allocator.num_used_pages == small.allocator.num_reserved_pages == 0
    assert swap.num_free_slots == swap.num_slots
    small.allocator.check_integrity()
