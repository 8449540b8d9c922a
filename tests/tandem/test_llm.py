"""The engine in a program of one's own: answers, streams, cancelling, mistakes, and the end."""

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefill_worker.embeddings import EmbeddingWish
from prefill_worker.engine_loop import prefill_loop
from services.engine.engine import load_engine
from services.engine.steps import sequence as sequences
from services.engine.steps.step import PooledState
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import ConfigError, InvalidRequest, WorkerUnavailable
from tandem import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from tandem.llm import DEMO_MODEL
from tests.waiting import HANG_LIMIT_S
from worker.engine import PrefillReport

SETTINGS = {"kv_pages": 64, "threads": 1, "max_batch": 4, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["def length(", "import os\n", "class Node:\n    def __init__(self, ", "for line in "]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO_MODEL, embeddings="matryoshka", **SETTINGS) as running:
        yield running


def free_pages(running: LLM) -> int:
    """The pages that nothing holds, as the engine thread counts them."""
    engine = running._inside._engine
    counts = engine._thread.submit(engine._parts.allocator.counts).result(HANG_LIMIT_S)
    return counts.free + counts.cached


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_many_prompts_have_the_answers_that_each_has_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS * 5, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert texts(together) == texts(alone) * 5
    assert len(set(texts(alone))) == len(PROMPTS)
    for output in together:
        assert output.finished
        (answer,) = output.outputs
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 12)
        assert llm.tokenizer.decode(answer.token_ids) == answer.text
    assert free_pages(llm) == 64


def test_token_ids_may_be_given_in_place_of_text(llm: LLM) -> None:
    by_text = llm.generate(PROMPTS[0], GREEDY)[0]
    by_ids = llm.generate([by_text.prompt_token_ids], GREEDY)[0]
    assert llm.generate(list(by_text.prompt_token_ids), GREEDY)[0].outputs == by_ids.outputs == by_text.outputs
    assert (by_ids.prompt, by_text.prompt) == (None, PROMPTS[0])


def test_a_seed_decides_every_one_of_several_answers(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=10)
    first, second = (llm.generate(PROMPTS[0], params)[0] for _ in range(2))
    assert first.outputs == second.outputs
    assert len({answer.text for answer in first.outputs}) == 3
    assert [answer.index for answer in first.outputs] == [0, 1, 2]


def test_a_stop_text_ends_an_answer_before_it_and_frees_its_pages(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    stop = whole[len(whole) // 2 :][:3]
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=1000, stop=stop))
    assert output.outputs[0].text == whole[: whole.index(stop)]
    assert output.outputs[0].finish_reason == "stop"
    assert free_pages(llm) == 64


def test_log_probabilities_are_of_the_chosen_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    (answer,) = llm.generate(PROMPTS[0], params)[0].outputs
    assert answer.logprobs is not None
    assert [each.token_id for each in answer.logprobs] == list(answer.token_ids)
    assert all(max(each.top.values()) == each.logprob < 0 for each in answer.logprobs)
    assert answer.cumulative_logprob == sum(each.logprob for each in answer.logprobs)


def test_a_conversation_is_written_by_the_models_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Write a function."}], GREEDY)
    assert "Write a function." in llm.tokenizer.decode(output.prompt_token_ids)
    two = llm.chat([[{"role": "user", "content": "Write a function."}]] * 2, GREEDY)
    assert texts(two) == texts([output]) * 2


def transformers_states(running: LLM, text: str) -> np.ndarray:
    """Hidden states of a text after the last norm, [tokens, hidden]."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    token_ids = asyncio.run(running.tokenizer.encode(text))
    with torch.no_grad():
        states: np.ndarray = model.model(torch.tensor([token_ids])).last_hidden_state[0].numpy()
    return states


def test_texts_are_embedded_beside_answers_as_transformers_would(llm: LLM) -> None:
    long = "for line in " * 60  # several chunks, and a beginning that the others leave in the pages
    with ThreadPoolExecutor(1) as beside:
        answers = beside.submit(llm.generate, PROMPTS, GREEDY)
        outputs = llm.embed([*PROMPTS, long])
        assert texts(answers.result(HANG_LIMIT_S)) == texts(llm.generate(PROMPTS, GREEDY))
    assert [output.prompt for output in outputs] == [*PROMPTS, long]
    for output, text in [(outputs[0], PROMPTS[0]), (outputs[-1], long)]:
        state = transformers_states(llm, text)[-1]
        assert output.outputs.embedding == pytest.approx(state / np.linalg.norm(state), abs=1e-4)
    again = llm.embed(outputs[-1].prompt_token_ids)[0]
    assert (again.prompt, again.outputs) == (None, outputs[-1].outputs)
    (short,) = llm.embed(long, dimensions=8)
    cut = np.array(outputs[-1].outputs.embedding[:8])
    assert short.outputs.embedding == pytest.approx(cut / np.linalg.norm(cut), abs=1e-6)
    assert free_pages(llm) == 64


def test_a_texts_vector_has_the_bits_that_a_prefill_worker_gives(llm: LLM) -> None:
    (output,) = llm.embed("import os\n" * 40)
    parts = load_engine(DEMO_MODEL, dtype="float32", device="cpu", page_size=16, num_pages=64)
    reports: list[PrefillReport] = []
    try:
        loop = prefill_loop(parts, reports.append, chunk_tokens=48, clock=SYSTEM_CLOCK)
        sequence = sequences.Sequence(0, output.prompt_token_ids, sampling=sequences.Sampling(max_tokens=1))
        sequence.pooling = "last"
        loop.begin(sequence, salt=b"")
        while loop.step():
            pass
    finally:
        parts.close()
    state = reports[-1].chunks[-1].outcome
    assert isinstance(state, PooledState)
    vector = EmbeddingWish("last", 0, True).vector(state.state, num_tokens=len(output.prompt_token_ids))
    assert np.array(output.outputs.embedding, "<f4").tobytes() == vector


def test_a_mean_is_taken_where_the_checkpoint_says_so(tmp_path: Path, llm: LLM) -> None:
    for file in DEMO_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with LLM(tmp_path, **SETTINGS) as averaging:
        averaging.generate(PROMPTS[2], GREEDY)  # the text's beginning is cached
        (output,) = averaging.embed(PROMPTS[2] + "x")
        mean = transformers_states(llm, PROMPTS[2] + "x").mean(axis=0)
        assert output.outputs.embedding == pytest.approx(mean, abs=1e-3)
        with pytest.raises(InvalidRequest, match="dimensions must be one of"):
            averaging.embed("x", dimensions=8)


@pytest.mark.parametrize(
    ("texts_of", "more", "said"),
    [
        (["x", []], {}, "prompt is empty"),
        ([[5] * 4097], {}, "there is room for"),
        ("x", {"dimensions": 0}, "dimensions must be at most"),
        ([[-1]], {}, "token ids must be from 0"),
    ],
)
def test_a_text_that_cannot_be_embedded_is_refused(llm: LLM, texts_of: Any, more: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        llm.embed(texts_of, **more)
    assert free_pages(llm) == 64


def test_a_model_that_embeds_nothing_says_why() -> None:
    with LLM(DEMO_MODEL, **SETTINGS) as generating, pytest.raises(InvalidRequest, match="not trained to embed"):
        generating.embed("x")
    with pytest.raises(ConfigError, match="embeddings must be one of auto, on"):
        LLM(DEMO_MODEL, embeddings="yes", **SETTINGS)


async def test_a_text_that_is_cancelled_frees_its_pages() -> None:
    running = AsyncLLM(DEMO_MODEL, embeddings="on", **SETTINGS, chunk_tokens=16)
    try:
        calls = [asyncio.create_task(running.embed([5 + n] * 400)) for n in range(6)]
        await asyncio.sleep(0)
        assert await asyncio.wrap_future(running._engine._thread.submit(lambda: len(running._engine._listeners))) == 6
        for call in calls[1:]:
            call.cancel()
        await asyncio.wait(calls)
        assert len(calls[0].result().outputs.embedding) == 256
        assert all(call.cancelled() for call in calls[1:])
        counts = running._engine._thread.submit(running._engine._parts.allocator.counts).result(HANG_LIMIT_S)
        assert counts.free + counts.cached == 64
    finally:
        await asyncio.to_thread(running.close)
    with pytest.raises(WorkerUnavailable):
        await running.embed("x")


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("x", SamplingParams(temperature=9), "temperature"),
        ("x", SamplingParams(n=0), "n is 0"),
        ("x", SamplingParams(stop=""), "stop must"),
        ([], SamplingParams(), "prompt is empty"),
        ([[-1]], SamplingParams(), "token ids must be from 0"),
        ([[5] * 3000], SamplingParams(), "there is room for"),
        (["x", "y"], [SamplingParams()], "1 params are given for 2 prompts"),
    ],
)
def test_a_mistake_is_named_and_leaves_nothing(llm: LLM, prompt, params, said: str) -> None:
    prompts = prompt if prompt else [[]]
    with pytest.raises(InvalidRequest, match=said):
        llm.generate(prompts, params)
    assert free_pages(llm) == 64


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "holds"),
    [
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda text: re.fullmatch("[0-9]{3}-[a-f]{2}", text)),
        ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "size"}),
        ({"json": json.dumps(SCHEMA)}, lambda text: json.loads(text)["size"] in (1, 2)),
        ({"grammar": 'start: "a" "b"+ "c"'}, lambda text: re.fullmatch("ab+c", text)),
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(llm: LLM, form, holds) -> None:
    params = SamplingParams(max_tokens=60, n=2, seed=3, structured_outputs=StructuredOutputsParams(**form))
    (output,) = llm.generate("x = ", params)
    for answer in output.outputs:
        assert answer.finish_reason == "stop", answer
        assert holds(answer.text), answer.text
    assert free_pages(llm) == 64


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "structured_outputs must be an object with one of json, "),
        ({"json": SCHEMA, "regex": "a"}, "with one of"),
        ({"json": "{"}, "not valid JSON"),
        ({"regex": "("}, "regex"),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_name(llm: LLM, form, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        llm.generate("x = ", SamplingParams(structured_outputs=StructuredOutputsParams(**form)))
    assert free_pages(llm) == 64


def test_a_setting_that_does_not_exist_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean kv_memory"):
        LLM(kv_memry="1GiB")
    with pytest.raises(ConfigError, match="--kv-pages is '0'"):
        LLM(kv_pages=0)


async def test_a_stream_grows_to_the_whole_and_ends_where_its_reader_leaves() -> None:
    async with AsyncLLM(**SETTINGS) as llm:
        seen = [output async for output in llm.generate(PROMPTS[0], GREEDY, request_id="mine")]
        assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, 13))
        assert {output.request_id for output in seen} == {"mine"}
        assert all(
            later.outputs[0].text.startswith(earlier.outputs[0].text) for earlier, later in itertools.pairwise(seen)
        )
        assert [output.finished for output in seen] == [False] * 11 + [True]
        endless = llm.generate(PROMPTS[0], SamplingParams(ignore_eos=True, max_tokens=None))
        async for _ in endless:
            break
        await endless.aclose()
        both = await asyncio.gather(llm.last(PROMPTS[0], GREEDY), llm.last(PROMPTS[1], GREEDY))
        assert both[0].outputs == seen[-1].outputs
        counts = llm._engine._thread.submit(llm._engine._parts.allocator.counts).result(HANG_LIMIT_S)
        assert counts.free + counts.cached == 64
        running = asyncio.create_task(llm.last(PROMPTS[0], SamplingParams(ignore_eos=True, max_tokens=None)))
        await asyncio.sleep(0.05)
    with pytest.raises(WorkerUnavailable):
        await running
    with pytest.raises(WorkerUnavailable):
        await llm.last(PROMPTS[0], GREEDY)
