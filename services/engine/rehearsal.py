"""Times a few warm-up steps before the engine receives requests. The caller interprets the times."""

import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.engine.engine import Engine, EngineParts, load_engine, load_warm_engine
from services.engine.model import EngineWeights, TimedStep
from services.engine.steps.sequence import Sampling
from services.engine.steps.step import NonFiniteLogits

PROMPTS_TOKENS = (16, 64, 16, 64, 16, 64, 256, 256, 256)
"""Prompt lengths that separate the fixed cost of a step, the cost per token, and the extra cost of a longer context.

Each length is repeated, and the fastest run counts: a neighbor, such as another starting worker, only slows steps down.
"""
NUM_SEQUENCES = (1, 4)
NUM_DECODE_STEPS = 4
MAX_REHEARSAL_S = 1.0
"""Time limit of the warm-up, in seconds. A slower engine is measured by its first requests."""

logger = logging.getLogger(__name__)


def load_rehearsed_engine(model_dir: str | Path, *, kept: EngineWeights | None = None, **settings: Any) -> EngineParts:
    """Runs `load_warm_engine` and adds the times of the first steps.

    Set `kept` to the weights of a model that already ran in this process. Its earlier times are reused.

    Raises:
        ModelError: The directory cannot be served.
        ConfigError: A setting is invalid, or the pool does not fit into memory.
    """
    if kept is not None:
        parts = load_engine(kept.model, **settings)
        return dataclasses.replace(parts, first_steps=kept.first_steps)
    parts = load_warm_engine(model_dir, **settings)
    try:
        return dataclasses.replace(parts, first_steps=tuple(rehearse(parts)))
    except NonFiniteLogits:
        logger.warning("the engine could not be measured: the model's answer is not finite")
    except BaseException:
        parts.close()
        raise
    return parts


def rehearse(parts: EngineParts, *, max_s: float = MAX_REHEARSAL_S) -> Iterator[TimedStep]:
    """Yields timed steps, first of single prompts and then of decoding sequences, for up to `max_s` seconds.

    Each prompt step is reported with the fastest time of its length. Skips prompts that would probably exceed the
    remaining time. Leaves the engine's pages unchanged. Raises NonFiniteLogits.
    """
    end_s = time.monotonic() + max_s
    room = parts.limits.max_sequence_tokens
    prompts: list[tuple[int, TimedStep]] = []
    fastest_s: dict[int, float] = {}
    for num_tokens in PROMPTS_TOKENS:
        expected_s = max((num_tokens / num * time_s for num, time_s in fastest_s.items()), default=0.0)
        if num_tokens < room and time.monotonic() + expected_s < end_s:
            for step in _timed(parts, [num_tokens], num_new=1):
                prompts.append((num_tokens, step))
                fastest_s[num_tokens] = min(step[1], fastest_s.get(num_tokens, step[1]))
    for num_tokens, (work, _) in prompts:
        yield work, fastest_s[num_tokens]
    for num in NUM_SEQUENCES:
        if num * PROMPTS_TOKENS[0] * 2 < room and time.monotonic() < end_s:
            yield from _timed(parts, [PROMPTS_TOKENS[0]] * num, num_new=1 + NUM_DECODE_STEPS)


def _timed(parts: EngineParts, prompts_tokens: list[int], *, num_new: int) -> Iterator[TimedStep]:
    engine = Engine(parts, chunk_tokens=sum(prompts_tokens))
    try:
        sampling = Sampling(max_tokens=num_new)
        sequences = [engine.add([0] * num_tokens, sampling) for num_tokens in prompts_tokens]
        while engine.has_work:
            before = [(one.num_computed_tokens, one.num_prompt_tokens) for one in sequences]
            began_s = time.monotonic()
            outputs = engine.step()
            time_s = time.monotonic() - began_s
            for output in outputs:
                if isinstance(output.outcome, NonFiniteLogits):
                    raise output.outcome
            work = [
                (start, sequence.num_computed_tokens - start, start < num_prompt)
                for sequence, (start, num_prompt) in zip(sequences, before, strict=True)
                if sequence.num_computed_tokens > start
            ]
            yield work, time_s
    finally:
        engine.close()
