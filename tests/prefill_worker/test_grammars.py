"""Prompts of requests with a JSON schema: the first token is sampled here, so it keeps to the grammar here."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from services.runtime.errors import InvalidRequest
from tests.fake_grammars import EOS, FakeGrammars

Make = Callable[..., Any]
SCHEMA = '{"type":"object"}'
ASKED: dict[str, Any] = {"json_schema": SCHEMA, "eos_token_ids": [EOS]}


@pytest.fixture
def grammars() -> FakeGrammars:
    return FakeGrammars()


async def test_the_first_token_keeps_to_the_grammar(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3], **ASKED)
    gateway.prefill("free", [1, 2, 3], cache_salt="other")
    assert list((await gateway.event("r", "tokens")).token_ids) == [103]
    assert list((await gateway.event("free", "tokens")).token_ids) == [6]
    await gateway.event("r", "handed_off")
    await gateway.event("free", "handed_off")
    assert grammars.begun == [(SCHEMA, [EOS], [])]
    assert threading.get_ident() not in grammars.threads
    await bench.until_free()


async def test_an_attempt_that_has_emitted_tokens_needs_none(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3], attempt=2, emitted_token_ids=[103, 102], **ASKED)
    await gateway.event("r", "handed_off", attempt=2)
    assert grammars.begun == []


async def test_what_is_kept_is_not_for_another_schema(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    gateway = bench.gateway()
    for attempt, schema, num_begun in ((1, SCHEMA, 1), (2, SCHEMA, 1), (3, '{"type":"null"}', 2)):
        gateway.prefill("r", list(range(1, 9)), attempt=attempt, json_schema=schema, eos_token_ids=[EOS])
        await gateway.event("r", "handed_off", attempt=attempt)
        assert list((await gateway.event("r", "tokens", attempt=attempt)).token_ids) == [103]
        assert len(grammars.begun) == num_begun


async def test_nobody_waits_for_anothers_grammar(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    grammars.gate.clear()
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2] * 20, **ASKED)
    await bench.until(lambda: bool(grammars.begun))
    assert bench.worker.load().waiting == 1
    gateway.prefill("free", [1] * 41, cache_salt="other")
    await gateway.event("free", "handed_off")
    grammars.gate.set()
    await gateway.event("r", "handed_off")
    await bench.until_free()


async def test_cancelled_while_the_grammar_is_made(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    grammars.gate.clear()
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3], **ASKED)
    await bench.until(lambda: bool(grammars.begun))
    gateway.prefill("free", [1, 2, 3])
    await gateway.event("free", "handed_off")
    gateway.cancel("r")
    await bench.until_free()
    grammars.gate.set()
    assert gateway.kinds("r") == []


@pytest.mark.parametrize(
    "error", [InvalidRequest("it is wrong"), RuntimeError("some internals")], ids=["told", "unknown"]
)
async def test_a_grammar_that_cannot_be_made(error: Exception, make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    grammars.error = error
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3], **ASKED)
    failed = await gateway.event("r", "failed")
    assert "internals" not in failed.message
    await bench.until_free()


@pytest.mark.parametrize(
    ("fields", "named"), [({"eos_token_ids": []}, "a token that ends it"), ({"has_none": True}, "no grammars")]
)
async def test_refused_at_once(fields: dict[str, Any], named: str, make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=None if fields.pop("has_none", False) else grammars)
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3], **{**ASKED, **fields})
    assert named in (await gateway.event("r", "refused")).message
    await bench.until_free()
