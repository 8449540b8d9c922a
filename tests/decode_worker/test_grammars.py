"""Sequences with a JSON schema: their grammars are made beside engine and event loop, and every end is answered."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.protocol.messages import TransferId
from protos import inference_pb2
from services.runtime.errors import InvalidRequest
from tests.fake_grammars import EOS, FakeGrammars

Make = Callable[..., Any]
SCHEMA = '{"type":"object"}'
WHOLE = {0: 103, 1: 102, 2: 101, 3: EOS}
ASKED: dict[str, Any] = {"json_schema": SCHEMA, "eos_token_ids": [EOS], "max_tokens": 9}


@pytest.fixture
def grammars() -> FakeGrammars:
    return FakeGrammars()


async def test_a_prompt_that_is_computed_here(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], local=True, **ASKED)
    gateway.admit("free", [1, 2, 3], local=True, max_tokens=2)
    finished = await gateway.event("r", "finished")
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert gateway.tokens("r") == WHOLE
    await gateway.event("free", "finished")
    assert gateway.tokens("free") == {0: 6, 1: 12}
    assert grammars.begun == [(SCHEMA, [EOS], [])]
    assert threading.get_ident() not in grammars.threads
    await bench.until_free()


async def test_a_prompt_that_comes_from_a_prefill_worker(make_bench: Make, grammars: FakeGrammars) -> None:
    """The grammar is made while the pages are on their way; the first token is not among those it was given then."""
    bench = make_bench(grammars=grammars)
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], **ASKED)
    await gateway.event("r", "admitted")
    await bench.until(lambda: bool(grammars.begun))
    await bench.hand_over("r", [1, 2, 3], first=103)
    await gateway.event("r", "finished")
    assert gateway.tokens("r") == {1: 102, 2: 101, 3: EOS}
    await bench.until_free()


async def test_pages_that_are_here_before_the_grammar(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    grammars.gate.clear()
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], **ASKED)
    gateway.admit("free", [4, 5, 6], max_tokens=2)
    await gateway.event("free", "admitted")
    await bench.hand_over("r", [1, 2, 3], first=103)
    await bench.hand_over("free", [4, 5, 6])
    await gateway.event("free", "finished")
    assert gateway.kinds("r") == ["admitted"], "the others continue meanwhile"
    grammars.gate.set()
    await gateway.event("r", "finished")
    assert gateway.tokens("r") == {1: 102, 2: 101, 3: EOS}
    await bench.until_free()


@pytest.mark.parametrize("num_emitted", [1, 2, 3])
async def test_a_resumed_answer_goes_on_where_it_was(
    num_emitted: int, make_bench: Make, grammars: FakeGrammars
) -> None:
    bench = make_bench(grammars=grammars)
    gateway = bench.gateway()
    emitted = [*WHOLE.values()][:num_emitted]
    gateway.admit("r", [1, 2, 3], attempt=2, local=True, emitted_token_ids=emitted, **ASKED)
    finished = await gateway.event("r", "finished", attempt=2)
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert gateway.tokens("r", attempt=2) == dict([*WHOLE.items()][num_emitted:])
    assert grammars.begun == [(SCHEMA, [EOS], emitted)], "replayed where it was made, not on the engine thread"
    await bench.until_free()


async def test_max_tokens_cuts_it_off(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], local=True, **{**ASKED, "max_tokens": 3})
    assert (await gateway.event("r", "finished")).reason == inference_pb2.FINISH_REASON_LENGTH
    assert gateway.tokens("r") == {0: 103, 1: 102, 2: 101}


async def test_a_preempted_answer_goes_on_where_it_was(make_bench: Make, grammars: FakeGrammars) -> None:
    """It is preempted by one of a better class, loses its pages, and is computed again."""
    bench = make_bench(grammars=grammars)
    gateway = bench.gateway()
    bench.runner.pause_at_step = 3
    gateway.admit("low", list(range(1, 41)), local=True, service_class=4, **{**ASKED, "max_tokens": 20})
    await bench.until(lambda: not bench.runner.gate.is_set())
    gateway.admit("high", list(range(1, 45)), local=True, service_class=0, max_tokens=12, cache_salt="other")
    await gateway.event("high", "admitted")
    bench.runner.gate.set()
    await gateway.event("low", "finished")
    await gateway.event("high", "finished")
    assert gateway.tokens("low") == WHOLE
    await bench.until_free()


async def test_paused_before_the_grammar_is_there(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    grammars.gate.clear()
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], local=True, **ASKED)
    await gateway.event("r", "admitted")
    gateway.pause("r")
    gateway.admit("last", [1], max_tokens=1)
    await gateway.event("last", "admitted")  # so the pause has arrived
    grammars.gate.set()
    assert (await gateway.event("r", "paused")).num_tokens == 1
    gateway.unpause("r")
    await gateway.event("r", "finished")
    assert gateway.tokens("r") == WHOLE
    gateway.cancel("last")
    await bench.until_free()


@pytest.mark.parametrize(("is_local", "has_pages"), [(True, False), (False, False), (False, True)])
async def test_cancelled_while_the_grammar_is_made(
    is_local: bool, has_pages: bool, make_bench: Make, grammars: FakeGrammars
) -> None:
    bench = make_bench(grammars=grammars)
    grammars.gate.clear()
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], local=is_local, **ASKED)
    await gateway.event("r", "admitted")
    if has_pages:
        await bench.hand_over("r", [1, 2, 3], first=103)
    gateway.cancel("r")
    await bench.until_free()
    grammars.gate.set()
    gateway.admit("next", [1, 2, 3], local=True, **ASKED)
    await gateway.event("next", "finished")
    assert gateway.kinds("r") == ["admitted"]
    await bench.until_free()


@pytest.mark.parametrize(
    "error", [InvalidRequest("it is wrong"), RuntimeError("some internals")], ids=["told", "unknown"]
)
@pytest.mark.parametrize("when", ["admitted", "receiving", "committed", "local"])
async def test_a_grammar_that_cannot_be_made(
    when: str, error: Exception, make_bench: Make, grammars: FakeGrammars
) -> None:
    bench = make_bench(grammars=grammars)
    grammars.gate.clear()
    grammars.error = error
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], local=when == "local", **ASKED)
    await gateway.event("r", "admitted")
    if when == "receiving":
        await bench.worker.arrivals.reserve(TransferId("r", 1), 3)
    if when == "committed":
        await bench.hand_over("r", [1, 2, 3], first=103)
    grammars.gate.set()
    failed = await gateway.event("r", "failed")
    assert "internals" not in failed.message
    assert ("it is wrong" in failed.message) == isinstance(error, InvalidRequest)
    await bench.until_free()


@pytest.mark.parametrize(
    ("fields", "named"), [({"eos_token_ids": []}, "a token that ends it"), ({"has_none": True}, "no grammars")]
)
async def test_refused_at_once(fields: dict[str, Any], named: str, make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=None if fields.pop("has_none", False) else grammars)
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], local=True, **{**ASKED, **fields})
    assert named in (await gateway.event("r", "refused")).message
    await bench.until_free()


async def test_tokens_that_the_grammar_did_not_allow(make_bench: Make, grammars: FakeGrammars) -> None:
    bench = make_bench(grammars=grammars)
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], attempt=2, local=True, emitted_token_ids=[99], **ASKED)
    await gateway.event("r", "failed", attempt=2)
    await bench.until_free()
