"""A model with vLLM on several ranks, as a program: what it answers, what it hands over, and when it misses a rank.

Reads `{"model": folder, "prompts": [[token id]], "num_tokens": n, "ranks": n, "end": signal}` on standard input, and
`dtype` and `device` if they are not float32 and cpu, `has_amx` if the CPU is to be taken for one without; writes what
it saw.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from kv_transfer.page_bytes import Destination, PageReader, PageWriter, wire_layout
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import SampledToken
from services.runtime.errors import WorkerLost
from worker.vllm.loading import VllmModel, VllmSettings, load_vllm

SALT, OTHER_SALT, ALONE_SALT = b"a" * 32, b"b" * 32, b"c" * 32
NUMBERS = itertools.count()
MISSED_WITHIN_S = 30.0
FRAME_PAGES = 3


def answer_alone(model: VllmModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Returns what the engine answers to a prompt that nobody hands over."""
    sequence = Sequence("a", prompt, sampling=Sampling(max_tokens=num_tokens, temperature=0.0), emitted_token_ids=())
    model._running.add(f"a{next(NUMBERS)}", sequence, salt=ALONE_SALT, service_class=2)
    run(model, sequence)
    return sequence.token_ids[len(prompt) :]


def answer(model: VllmModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Hands the prompt over from one request to another, page by page, and returns the answer."""
    core, number = model._running, next(NUMBERS)
    first = Sequence("p", prompt, sampling=Sampling(max_tokens=num_tokens, temperature=0.0), emitted_token_ids=())
    core.add_held(f"p{number}", first, salt=SALT, service_class=2)
    last = run(model)[-1]
    assert isinstance(last.outcome, SampledToken)
    given: list[tuple[int, ...]] = []
    core.add_awaited(
        f"d{number}", prompt, lambda blocks, cached: given.append(blocks), salt=OTHER_SALT, service_class=2
    )
    core.step()
    reader = PageReader(model.pool)
    writer = PageWriter(model.pool, wire_layout(model.pool.layout, fingerprint="f", exact=False))
    num_pages = len(last.block_ids)
    destination = Destination(given[0][:num_pages], 0, len(prompt))
    for page in range(0, num_pages, FRAME_PAGES):
        writer.write(np.concatenate(reader.pieces(last.block_ids[page : page + FRAME_PAGES])), page, destination)
    core.let_go(f"p{number}")
    emitted = (last.outcome.token_id,)
    then = Sequence("d", prompt, sampling=Sampling(max_tokens=num_tokens, temperature=0.0), emitted_token_ids=emitted)
    core.arrived(f"d{number}", then)
    run(model, then)
    core.check_books()
    return then.token_ids[len(prompt) :]


def run(model: VllmModel, *sequences: Sequence) -> list:  # type: ignore[type-arg]
    """Steps until nothing is left to do; returns what was computed."""
    computed = []
    while True:
        done = model._running.step()
        computed += done.computed
        for one in done.computed:
            for sequence in sequences:
                if isinstance(one.outcome, SampledToken):
                    sequence.append_token(one.outcome.token_id)
        if not done.has_more:
            return computed


def lose_a_rank(model: VllmModel, how: signal.Signals) -> dict[str, object]:
    """Ends a rank while steps run; returns when that was noticed. A step that waits for the rank may never return."""

    def answer_for_ever() -> None:
        with contextlib.suppress(WorkerLost):
            while True:
                answer(model, [1, 2, 3] * 50, 30)

    threading.Thread(target=answer_for_ever, daemon=True).start()
    time.sleep(0.5)
    began_s = time.monotonic()
    os.kill(model._core.model_executor.pids[0], how)  # type: ignore[attr-defined]
    while model.loss is None and time.monotonic() < began_s + MISSED_WITHIN_S:
        time.sleep(0.01)
    return {"missed_s": time.monotonic() - began_s, "loss": str(model.loss)}


def main() -> None:
    asked = json.load(sys.stdin)
    if not asked.get("has_amx", True):
        torch.cpu._is_amx_tile_supported = lambda: False
    settings = VllmSettings(
        model_dir=Path(asked["model"]),
        dtype=asked.get("dtype", "float32"),
        device=asked.get("device", "cpu"),
        num_blocks=200,
        threads=asked["ranks"],
        tensor_parallel=asked["ranks"],
    )
    began_s = time.monotonic()
    model = load_vllm(settings)
    seen = {
        "load_s": time.monotonic() - began_s,
        "fingerprint": model.fingerprint,
        "layout": str(model.pool.layout),
        "parts": [list(part.shape) for part in model.pool.parts],
        "copies": model.pool.copies,
        "alone": [answer_alone(model, prompt, asked["num_tokens"]) for prompt in asked["prompts"]],
        "answers": [answer(model, prompt, asked["num_tokens"]) for prompt in asked["prompts"]],
        "is_written": [bool(part.any()) for part in model.pool.parts],
    }
    if asked["ranks"] > 1:
        seen["lost"] = lose_a_rank(model, signal.Signals[asked["end"]])
    json.dump(seen, sys.stdout)
    model.close()
    sys.stdout.flush()
    os._exit(0)  # with a step that waits for what has ended


if __name__ == "__main__":
    main()
