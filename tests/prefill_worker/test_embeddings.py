"""Embeddings as a prefill worker gives them: those of `transformers`, whatever the chunks, neighbours and cache.

The model's are computed by hand from its hidden states; a worker with a scripted engine shows what it tells a gateway.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefill_worker.embeddings import EmbeddingWish
from prefill_worker.engine_loop import prefill_loop
from protos import worker_pb2
from services.engine.engine import EngineParts, load_engine
from services.engine.steps import sequence as sequences
from services.engine.steps.step import NonFiniteLogits, PooledState, SampledToken
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import InvalidRequest
from tests.kept_spans import KeptSpans
from worker.engine import PrefillReport

VARIANT = "qwen3-tied-bias"
LENGTHS = (1, 15, 16, 17, 40, 130)
_SALTS = itertools.count()


@pytest.fixture(scope="module", params=["kernels", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def parts(request: Any, checkpoint: Callable[..., Path]) -> Iterator[EngineParts]:
    folder = checkpoint(VARIANT)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("services.engine.model._find_kernels", lambda: (None, "no compiler"))
        device = "cuda" if request.param == "cuda" else "cpu"
        loaded = load_engine(folder, dtype="float32", device=device, page_size=16, num_pages=256)
    yield loaded
    loaded.close()


class Loop:
    """A prefill worker's engine, driven by hand. Pages are shared with loops of the same `salt`."""

    def __init__(self, parts: EngineParts, *, chunk_tokens: int = 512, salt: bytes | None = None) -> None:
        self.salt = b"%d" % next(_SALTS) if salt is None else salt
        self.reports: list[PrefillReport] = []
        self._loop = prefill_loop(parts, self.reports.append, chunk_tokens=chunk_tokens, clock=SYSTEM_CLOCK)
        self.cached: dict[Any, int] = {}

    def begin(self, key: Any, prompt: list[int], pooling: sequences.Pooling | None) -> None:
        sequence = sequences.Sequence(key, prompt, sampling=sequences.Sampling(max_tokens=1, temperature=0))
        sequence.pooling = pooling
        self.cached[key] = self._loop.begin(sequence, salt=self.salt).num_tokens

    def outcomes(self) -> dict[Any, Any]:
        """Computes all; what the last chunk of each prompt gave."""
        while self._loop.step():
            pass
        found = {chunk.key: chunk.outcome for report in self.reports for chunk in report.chunks if chunk.is_last}
        for key in found:
            self._loop.release(key)
        return found


def embedded(
    parts: EngineParts,
    prompts: Sequence[list[int]],
    pooling: sequences.Pooling,
    *,
    chunk_tokens: int = 512,
    salt: bytes | None = None,
) -> list[np.ndarray]:
    """What becomes of each prompt in a step with the others; without a `salt` nothing of them is cached."""
    loop = Loop(parts, chunk_tokens=chunk_tokens, salt=salt)
    for place, prompt in enumerate(prompts):
        loop.begin(place, prompt, pooling)
    outcomes = loop.outcomes()
    assert all(isinstance(outcome, PooledState) for outcome in outcomes.values())
    return [outcomes[place].state for place in range(len(prompts))]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_they_are_those_of_transformers(
    parts: EngineParts,
    reference: Callable[[str], Any],
    random_ids: Callable[..., list[int]],
    pooling: sequences.Pooling,
    chunk_tokens: int,
) -> None:
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    wish = EmbeddingWish(pooling, 0, is_normalized=True)
    for prompt, pooled in zip(prompts, embedded(parts, prompts, pooling, chunk_tokens=chunk_tokens), strict=True):
        with torch.no_grad():
            states = reference(VARIANT).model(torch.tensor([prompt])).last_hidden_state[0].double()
        expected = states[-1] if pooling == "last" else states.mean(0)
        given = np.frombuffer(wish.vector(pooled, num_tokens=len(prompt)), "<f4")
        assert given == pytest.approx((expected / expected.norm()).numpy(), abs=1e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_chunks_and_neighbours_change_no_bit(
    parts: EngineParts, random_ids: Callable[..., list[int]], pooling: sequences.Pooling
) -> None:
    if not parts.is_exact:
        pytest.skip("this engine does not claim that rows are independent")
    prompt, others = random_ids(130, seed=1), [random_ids(length, seed=length) for length in (3, 50)]
    (alone,) = embedded(parts, [prompt], pooling)
    for chunk_tokens in (7, 16, 100):
        together, *_ = embedded(parts, [prompt, *others], pooling, chunk_tokens=chunk_tokens)
        assert together.tobytes() == alone.tobytes()


def test_answers_beside_them_are_what_they_are_alone(parts: EngineParts, random_ids: Callable[..., list[int]]) -> None:
    prompt = random_ids(33, seed=5)
    alone, beside = Loop(parts), Loop(parts, chunk_tokens=20)
    alone.begin("a", prompt, None)
    expected = alone.outcomes()["a"]
    beside.begin("mean", random_ids(60, seed=6), "mean")
    beside.begin("a", prompt, None)
    beside.begin("last", random_ids(25, seed=7), "last")
    outcomes = beside.outcomes()
    assert isinstance(expected, SampledToken)
    assert outcomes["a"].token_id == expected.token_id
    assert {type(outcomes[key]) for key in ("mean", "last")} == {PooledState}


def test_the_cache_is_used_for_the_last_token_and_never_for_a_mean(
    parts: EngineParts, random_ids: Callable[..., list[int]]
) -> None:
    prompt = random_ids(70, seed=8)
    salt = b"shared by both"
    (last,) = embedded(parts, [prompt], "last", salt=salt)
    (mean,) = embedded(parts, [prompt], "mean")
    again = Loop(parts, salt=salt)
    again.begin("last", prompt, "last")
    again.begin("mean", prompt, "mean")
    outcomes = again.outcomes()
    assert again.cached == {"last": 64, "mean": 0}
    tolerance = 0.0 if parts.is_exact else 1e-5
    assert outcomes["last"].state == pytest.approx(last, abs=tolerance)
    assert outcomes["mean"].state == pytest.approx(mean, abs=tolerance * len(prompt))


def test_states_that_are_not_finite_are_a_failure(
    parts: EngineParts, random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = parts.model.decoder
    forward = decoder.forward_with_states

    def broken(step: Any) -> Any:
        logits, states = forward(step)
        states[0, 0] = float("nan")
        return logits, states

    monkeypatch.setattr(decoder, "forward_with_states", broken)
    loop = Loop(parts)
    loop.begin("bad", random_ids(20, seed=1), "mean")
    loop.begin("good", random_ids(20, seed=2), "last")
    outcomes = loop.outcomes()
    assert isinstance(outcomes["bad"], NonFiniteLogits)
    assert isinstance(outcomes["good"], PooledState)


def test_vectors_are_cut_and_then_normalized() -> None:
    pooled = np.array([3, 4, 12], np.float32)
    assert np.frombuffer(EmbeddingWish("last", 2, is_normalized=True).vector(pooled, num_tokens=9), "<f4").tolist() == (
        pytest.approx([0.6, 0.8])
    )
    assert np.frombuffer(
        EmbeddingWish("mean", 0, is_normalized=False).vector(pooled, num_tokens=2), "<f4"
    ).tolist() == [
        1.5,
        2.0,
        6.0,
    ]
    nothing = EmbeddingWish("last", 0, is_normalized=True).vector(np.zeros(3, np.float32), num_tokens=1)
    assert np.frombuffer(nothing, "<f4").tolist() == [0, 0, 0]
    with pytest.raises(InvalidRequest, match="at most 3"):
        EmbeddingWish("last", 4, is_normalized=True).vector(pooled, num_tokens=1)


# --- what a worker tells a gateway


async def test_a_prompt_becomes_a_vector_and_nothing_is_handed_over(make_bench: Any) -> None:
    bench = make_bench(chunk_tokens=4)
    gateway = bench.gateway()
    gateway.embed("r", [1, 2, 3, 4, 5, 6, 7])
    answer = await gateway.event("r", "embedded")
    # The scripted engine's state is the sum of all tokens, and their number.
    assert np.frombuffer(answer.vector, "<f4").tolist() == pytest.approx([28 / np.hypot(28, 7), 7 / np.hypot(28, 7)])
    assert gateway.kinds("r") == ["prefill_started", "embedded"]
    await bench.until_free()
    assert bench.links.transfers == {}


async def test_its_steps_are_spans_of_the_call(make_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = KeptSpans.install(monkeypatch)
    bench = make_bench(chunk_tokens=4)
    gateway = bench.gateway()
    for name, traceparent in (("untraced", ""), ("r", f"00-{'ab' * 16}-{'cd' * 8}-01")):
        gateway.embed(name, [len(name), 2, 3, 4, 5, 6, 7], traceparent=traceparent)
        await gateway.event(name, "embedded")
    await bench.until_free()
    assert [span.name for span in spans.spans] == ["prefill.chunk"] * 2
    assert {span.context.trace_id for span in spans.spans} == {int("ab" * 16, 16)}
    assert {span.parent_id for span in spans.spans} == {int("cd" * 8, 16)}, "the gateway's span of this call"
    assert [span.attributes["tandem.start"] for span in spans.spans] == [0, 4]


async def test_a_cancelled_one_gives_everything_back(make_bench: Any) -> None:
    bench = make_bench(chunk_tokens=4)
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.embed("r", list(range(1, 12)))
    await gateway.event("r", "prefill_started")
    gateway.cancel("r", wants_word=True)
    await gateway.event("r", "cancelled")
    bench.runner.gate.set()
    await bench.until_free()
    assert "embedded" not in gateway.kinds("r")


async def test_a_session_that_ends_ends_them(make_bench: Any) -> None:
    bench = make_bench(chunk_tokens=4)
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.embed("r", [1, 2, 3])
    await gateway.event("r", "prefill_started")
    await gateway.leave()
    bench.runner.gate.set()
    await bench.until_free()


async def test_what_is_wrong_is_refused(make_bench: Any) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.embed("pooling", [1, 2], pooling=worker_pb2.POOLING_UNSPECIFIED)
    gateway.embed("vocabulary", [1, 10**6])
    assert (await gateway.event("pooling", "refused")).code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    assert (await gateway.event("vocabulary", "refused")).code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    gateway.embed("dimensions", [1, 2], dimensions=3)
    assert (await gateway.event("dimensions", "failed")).code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    await bench.until_free()


async def test_an_engine_without_states_refuses_by_name(make_bench: Any) -> None:
    bench = make_bench(embeds=False)
    gateway = bench.gateway()
    gateway.embed("r", [1, 2])
    assert (await gateway.event("r", "refused")).code == worker_pb2.ERROR_CODE_NOT_OFFERED
    await bench.until_free()


async def test_a_worker_that_leaves_takes_none(make_bench: Any) -> None:
    bench = make_bench()
    bench.worker.begin_drain()
    gateway = bench.gateway()
    gateway.embed("r", [1, 2])
    assert (await gateway.event("r", "refused")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
