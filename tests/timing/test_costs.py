"""Hostile input must not cost more than other input. Limits are far above the usual CPU time."""

import asyncio
import json
import statistics
import time
import timeit
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from tokenizers import Tokenizer

from gateway.models.marks import TemplateMarks
from gateway.models.model_files import read_model_files
from gateway.topology.prefix_view import PrefixView
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.metrics import Counts, Distributions, FastRegistry
from services.structured.form import AnswerForm
from services.structured.grammar import TooComplex, check_form
from tests.gateway.models.test_detokenizers import from_json, specials_tokenizer
from tests.gateway.models.test_marks import LLAMA3_SPECIALS
from tests.gateway.models.test_tool_calls import BEFORE_SPACES, HERMES, HOSTILE, content_of, parser_of, whole
from tests.gateway.topology.test_prefix_view import page_keys, refreshed, scripted
from tests.services.structured.test_cost import COSTLY
from tests.services.structured.test_grammar import DEAR_TO_FORCE, Begin, token_set
from tests.timing.limits import within_cpu


@pytest.mark.parametrize("token_id", [-1, -4], ids=["unknown", "special"])
def test_tokens_without_text(token_id: int) -> None:
    tokenizer_json, num_tokens = specials_tokenizer()
    detokenizer = from_json(tokenizer_json).detokenizer()
    with within_cpu(5):
        for token in [258, *[num_tokens + token_id] * 40_000, 258]:
            detokenizer.push([token])


@pytest.mark.parametrize("part", ["<|", "<|r", "<|reserved_special_token_1", "<|eo", "< ", "<\n"])
def test_beginnings_of_special_tokens(model_folder: Path, part: str) -> None:
    tokenizer = Tokenizer.from_str(read_model_files(model_folder).tokenizer_json)
    tokenizer.add_special_tokens(LLAMA3_SPECIALS)
    marks = TemplateMarks(tokenizer)
    text = part * (8 * 1024 * 1024 // len(part)) + "."
    with within_cpu(1):
        assert not marks.are_in(text)


@pytest.mark.parametrize("row", HOSTILE, ids=HOSTILE)
def test_hostile_text(row: str) -> None:
    tool_format, text = HOSTILE[row]
    parser, pieces = parser_of(tool_format), []
    with within_cpu(5):
        for start in range(0, len(text), 4):
            pieces += parser.push(text[start : start + 4])
        pieces += parser.finish()


@pytest.mark.parametrize("row", BEFORE_SPACES, ids=BEFORE_SPACES)
def test_white_space(row: str) -> None:
    tool_format, settings, before = BEFORE_SPACES[row]
    parser = parser_of(tool_format, **settings)
    with within_cpu(5):
        for part in [before, *[" " * 64] * 12_000, "x"]:
            parser.push(part)
        parser.finish()


def test_marks() -> None:
    text = "<tool_call>" * 60_000
    with within_cpu(5):
        assert content_of(whole(HERMES, text)) == text


@pytest.mark.parametrize("case", COSTLY)
def test_schemas(case: str) -> None:
    schema: dict[str, Any] = COSTLY[case]
    with within_cpu(10), pytest.raises(TooComplex):
        check_form(AnswerForm(json.dumps(schema)))


def test_a_prefix_lookup() -> None:
    """Looks up 200 pages that 64 workers have."""

    async def check() -> float:
        keys = page_keys(200)
        view = PrefixView(scripted(64, keys), clock=SYSTEM_CLOCK)
        await refreshed(view)
        assert view.longest(keys) == {f"w{number}": 200 for number in range(64)}
        times = []
        for _ in range(300):
            began_s = time.thread_time()
            view.longest(keys)
            times.append(time.thread_time() - began_s)
        return min(times)

    assert asyncio.run(check()) < 0.0001


@pytest.mark.parametrize("kind", ["prompt", "chat", "chat-with-special-text"])
async def test_a_long_prompt_leaves_the_event_loop_free(model, kind):
    text = "The quick brown fox jumps over the lazy dog. " * 40_000
    longest_gap_s, running = 0.0, True

    async def tick():
        nonlocal longest_gap_s
        loop = asyncio.get_running_loop()
        while running:
            before_s = loop.time()
            await asyncio.sleep(0.001)
            longest_gap_s = max(longest_gap_s, loop.time() - before_s)

    ticker = asyncio.create_task(tick())
    started_s, own_started_s = asyncio.get_running_loop().time(), time.thread_time()
    if kind == "prompt":
        await model.encode(text)
    else:
        await model.encode_chat([{"role": "user", "content": text + "<|end|>" * (kind != "chat")}])
    whole_s, own_s = asyncio.get_running_loop().time() - started_s, time.thread_time() - own_started_s
    running = False
    await ticker
    assert longest_gap_s < max(0.1, whole_s / 2)
    # CPU time of the loop's own thread, which includes the ticks.
    assert own_s < whole_s / 5


@pytest.mark.parametrize("case", DEAR_TO_FORCE)
def test_masks_of_a_long_forced_string(case: str, begin: Begin) -> None:
    """A mask that is forced token by token takes 2 to 20 ms."""
    state, spent = begin(DEAR_TO_FORCE[case]), []
    for _ in range(40):
        begun_s = time.thread_time()
        allowed = token_set(state.allowed())
        spent.append(time.thread_time() - begun_s)
        state.advance([max(allowed)])
    assert statistics.median(spent) < 0.0005


def test_metrics_cost_less_than_those_of_prometheus_client():
    registry, fast_registry = CollectorRegistry(), FastRegistry()
    count = Counts("a", "Words.", (), fast_registry).labels()
    gaps = Distributions("b", "Words.", (), fast_registry, bounds=[n / 100 for n in range(20)]).labels()
    their_count = Counter("c", "Words.", registry=registry)
    their_gaps = Histogram("d", "Words.", buckets=[n / 100 for n in range(20)], registry=registry)

    def ours():
        count.value += 1
        gaps.observe_often(0.1, 1)

    def theirs():
        their_count.inc(1)
        their_gaps.observe(0.1)

    fast, slow = (min(timeit.repeat(work, number=2000, repeat=20)) for work in (ours, theirs))
    assert fast < slow
