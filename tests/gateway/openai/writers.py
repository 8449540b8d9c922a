"""What tests of writers share: a tokenizer whose tokens are characters, and one call's facts."""

import json

from gateway.openai.requests import parse
from gateway.openai.writer import Head, Whole
from gateway.types import Usage

HEAD = Head(request_id="r", created_unix_s=7, model='m"choices":[]', system_fingerprint="fp")
USAGE = Usage(2, 1, 3, 0.0, 0.0, 0.0, 0.0)
PROMPT = [65, 66]


class Characters:
    """Each token is the character of its number."""

    has_reasoning = False
    has_call_token = False
    tool_format = None

    def token_text(self, token_id):
        return chr(token_id)

    def token_bytes(self, token_id):
        return chr(token_id).encode()

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(map(chr, token_ids))

    def opens_reasoning(self, prompt_token_ids):
        return False


def writer_of(writer_type, request_type, body, *, tool_format=None, num_answers=1):
    """A writer for this body's answers."""
    tokenizer = Characters()
    tokenizer.tool_format = tool_format
    request, _ = parse(json.dumps(body).encode(), request_type)
    return writer_type(tokenizer, request, head=HEAD, prompts=[PROMPT] * num_answers)


def whole_of(text, *, index=0, logprobs=None, finish_reason="stop"):
    """A complete answer."""
    return Whole(index, [*map(ord, text)], text, logprobs, finish_reason, USAGE, PROMPT)


def events_of(stream):
    """The data of a stream's events, as they are written."""
    blocks = stream.split(b"\n\n")
    assert blocks.pop() == b""
    assert all(block.startswith(b"data: ") for block in blocks)
    return [block.removeprefix(b"data: ") for block in blocks]
