"""Streams in which nothing happens for a while: their head leaves, signs of life follow, errors have their place."""

import asyncio
import json

import pytest

from protos import worker_pb2
from services.runtime.errors import InternalError

HEAD_S, COMMENT_S = 0.1, 0.1
SILENCE_S = 0.5
ASKED = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 9},
}
COMMENTS = (": keep-alive", 'event: ping\ndata: {"type":"ping"}')


class Silence:
    """A worker's script that says nothing until it may, and then answers or fails."""

    def __init__(self, token_ids):
        self.token_ids = token_ids
        self.may_end = asyncio.Event()
        self.fails = False

    async def decode(self, attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        await self.may_end.wait()
        if self.fails:
            attempt.fail(InternalError("as the test wants it"))
            return
        attempt.tokens(0, self.token_ids)
        attempt.finish()


@pytest.fixture
async def silence(tokenizer):
    return Silence(tokenizer.encode("ok", add_special_tokens=False).ids)


@pytest.fixture
async def system(make_system, worker_type, silence):
    system = await make_system(stream_head_s=HEAD_S, stream_comment_s=COMMENT_S, max_attempts=1)
    await system.add(worker_type("decode", "decode-0", silence.decode))
    return system


async def blocks_of(system, path, silence, *, headers=None, **more):
    """The blocks of a stream before the worker says a word, and those after."""
    before, after = [], []
    body = {**BODIES[path], "stream": True, **more}
    async with system.http.stream("POST", path, json=body, headers=headers or {}) as response:
        assert response.status_code == 200
        assert not silence.may_end.is_set(), "the head came before any token"
        asyncio.get_running_loop().call_later(SILENCE_S, silence.may_end.set)
        text, seen = "", before
        async for part in response.aiter_text():
            if silence.may_end.is_set():
                seen = after
            text += part
            *blocks, text = text.split("\n\n")
            seen += blocks
    assert text == ""
    return before, after


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_stream_has_a_head_and_signs_of_life(system, silence, path):
    before, after = await blocks_of(system, path, silence)
    signs = [block for block in before if block in COMMENTS]
    others = [block for block in before if block not in COMMENTS]
    assert len(signs) >= 2
    opening = {
        "/v1/chat/completions": ['"role":"assistant"'],
        "/v1/completions": [],
        "/v1/responses": ["response.created", "response.in_progress"],
        "/v1/messages": ["message_start"],
    }[path]
    assert len(others) == len(opening)
    assert all(what in block for what, block in zip(opening, others, strict=True))
    rest = "\n\n".join(after)
    assert "ok" in rest
    assert all(what not in rest for what in opening), "what was sent early does not come again"


async def test_a_named_stream_gets_signs_of_life_and_then_all_its_events(system, silence):
    before, after = await blocks_of(system, "/v1/chat/completions", silence, headers={"x-request-id": "mine"})
    assert {*before} == {COMMENTS[0]}
    events = [block for block in after if block not in COMMENTS]
    assert '"role":"assistant"' in events[0]
    assert all("\nid: " in block for block in events[:-1])


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_the_head_is_an_event(system, silence, path):
    silence.fails = True
    _, after = await blocks_of(system, path, silence)
    data = [line.removeprefix("data: ") for block in after for line in block.split("\n") if line.startswith("data: ")]
    errors = [json.loads(each) for each in data if "error" in each]
    assert errors


async def test_an_error_before_the_head_has_its_status(make_system):
    system = await make_system(stream_head_s=HEAD_S, stream_comment_s=COMMENT_S)
    for path, body in BODIES.items():
        answer = await system.http.post(path, json={**body, "stream": True})
        assert answer.status_code == 503, path


async def test_an_answer_that_comes_soon_has_no_sign_of_life(system, silence):
    silence.may_end.set()
    answer = await system.http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert ":" not in {block[0] for block in answer.text.split("\n\n") if block}
