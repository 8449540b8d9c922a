"""One tenant's dear requests beside another's plain ones: what they cost the other, over what ordinary load costs it.

The sides are taken in turn on one cluster, and answers are what is counted: times alone say more of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from protos import inference_pb2, inference_pb2_grpc
from tests.attack.base import ADMIN, ATTACKER, REPOSITORY, VICTIM, Row, Target, attack
from tests.attack.posting import NONCE, Posting

MOST_RATIO = 1.5
NUM_ROUNDS, SIDE_S = 5, 5.0
WARM_UP_S = 1.5
"""What begins this soon after the attacker's load has begun is not counted."""
NUM_VICTIMS = 3
PROMPT_TOKENS, ANSWER_TOKENS = 64, 32
QUIET_S = 20.0
"""Most time until nothing of the attacker's runs."""
MIB = 2**20

Load = Callable[[Target], Awaitable[None]]
"""What the attacker does until it is cancelled."""


@dataclass
class _Side:
    """What the victim saw: seconds to the first token, and seconds per token after it."""

    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    def add(self, other: _Side) -> None:
        self.ttfts_s += other.ttfts_s
        self.tpots_s += other.tpots_s
        self.num_failed += other.num_failed


@attack(9)
async def dear_masks(target: Target) -> Sequence[Row]:
    """Chats with 16 answers each that must be one long text, or keep to a pattern of which much has to be known.

    The pattern is one that is served for a while, and another one in each request: one that was found too complex is
    refused at once when it comes again.
    """
    pattern = {"type": "object", "properties": {NONCE: {"type": "string", "pattern": ".*e.{100}"}}, "required": [NONCE]}
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 16, "max_tokens": 200, "temperature": 1.0}
    return await _compared(
        target,
        "32 answers whose masks are dear",
        worst=_posting("/v1/chat/completions", chat | _form({"enum": ["x" * 60_000]}), chat | _form(pattern)),
        # As long as those in a form: the model would end most of them after a few tokens, and its batch be empty.
        ordinary=_posting("/v1/chat/completions", *[chat | {"ignore_eos": True}] * 2),
    )


@attack(9)
async def dear_first_masks(target: Target) -> Sequence[Row]:
    """Chats of one or two tokens with 16 answers each in a new pattern: each mask is a first or a second one."""
    pattern = {"type": "object", "properties": {NONCE: {"type": "string", "pattern": ".*e.{100}"}}, "required": [NONCE]}
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 16, "temperature": 1.0}
    return await _compared(
        target,
        "chats of 1 and 2 tokens with 16 answers whose masks are dear",
        worst=_posting("/v1/chat/completions", *[chat | {"max_tokens": num} | _form(pattern) for num in (1, 2)]),
        ordinary=_posting("/v1/chat/completions", *[chat | {"max_tokens": num} for num in (1, 2)]),
    )


@attack(10)
async def log_probabilities_of_long_prompts(target: Target) -> Sequence[Row]:
    """Prompts of 2,000 tokens, and 20 likeliest tokens at each place."""
    prompt = [10 + 7919 * place % 1900 for place in range(2000)]
    body = {"prompt": prompt, "max_tokens": 1}
    return await _compared(
        target,
        "prompts of 2,000 tokens with prompt_logprobs 20",
        worst=_posting("/v1/completions", body | {"prompt_logprobs": 20}, num_clients=4),
        ordinary=_posting("/v1/completions", body, num_clients=4, is_new=True),
    )


@attack(6)
async def texts_beside_answers(target: Target) -> Sequence[Row]:
    """Eight texts of 1 MiB that only become tokens, all the time."""
    return await _compared(
        target,
        "8 texts of 1 MiB at once, /tokenize",
        worst=_posting("/tokenize", {"prompt": ("x y" * MIB)[:MIB]}, num_clients=8),
        ordinary=_posting("/v1/completions", _plain()),
    )


@attack(7)
async def named_requests_beside_answers(target: Target) -> Sequence[Row]:
    """Named requests of 128 answers in a large schema."""
    members = {f"m{number:03}": {"type": "string", "description": "d" * 30} for number in range(880)}
    form = _form({"type": "object", "properties": members})
    body = {"prompt": [f"number {number}" for number in range(8)], "n": 16, "max_tokens": 1, "temperature": 0.9}
    return await _compared(
        target,
        "named requests of 128 answers in a schema of 64 KB",
        worst=_posting("/v1/completions", body | form, is_named=True),
        ordinary=_posting("/v1/completions", body),
    )


@attack(8)
async def bodies_beside_answers(target: Target) -> Sequence[Row]:
    """Bodies of 8 MiB without their ends."""
    return await _compared(
        target,
        "40 bodies of 8 MiB that never end",
        worst=_holding_bodies,
        ordinary=_posting("/v1/completions", _plain()),
    )


@attack(32)
async def background_responses_without_end(target: Target) -> Sequence[Row]:
    """As many responses in the background as the tenant may have, each with a long prompt, made anew all the time."""
    text = "a b " * 300
    asked = {"input": text, "background": True, "max_output_tokens": 200, "ignore_eos": True}
    return await _compared(
        target,
        "responses in the background, as many as there may be",
        worst=_posting("/v1/responses", asked, num_clients=8),
        ordinary=_posting("/v1/completions", {"prompt": text, "max_tokens": 200, "ignore_eos": True}, num_clients=8),
    )


WRONG_SCHEMAS: dict[str, Any] = {
    "multipleOf: -1": {"type": "integer", "multipleOf": -1},
    "$defs: 5": {"$defs": 5, "type": "integer"},
    "minItems > maxItems": {"type": "array", "minItems": 3, "maxItems": 2},
    "a mistake in a mistake's place": {"properties": {"a": {"items": {"required": "b"}}}},
}


@attack(25)
async def mistakes_in_schemas(target: Target) -> Sequence[Row]:
    """Schemas with a keyword that is wrong, over HTTP and gRPC."""
    rows = []
    metadata = [("authorization", f"Bearer {target.keys[VICTIM]}")] if target.keys else []
    async with target.client(VICTIM) as http, grpc.aio.insecure_channel(target.grpc) as channel:
        for what, schema in WRONG_SCHEMAS.items():
            answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2} | _form(schema))
            error = answer.json().get("error", {})
            request = inference_pb2.GenerateRequest(text="a")
            request.sampling.max_tokens = 2
            request.response_format.json_schema = json.dumps(schema)
            call = inference_pb2_grpc.InferenceStub(channel).GenerateUnary(request, metadata=metadata, timeout=20)
            code = await call.code()
            happened = f"{answer.status_code} {error.get('code')}: {error.get('message')}; {code.name}"
            is_said = any(word in str(error.get("message")) for word in (" must be ", " is greater than "))
            held = answer.status_code == 400 and is_said and code is grpc.StatusCode.INVALID_ARGUMENT
            rows.append(Row(what, "400 with place and rule, INVALID_ARGUMENT", happened, held))
    return rows


def _plain() -> dict[str, Any]:
    return {"prompt": "def f(", "n": 16, "max_tokens": 200, "temperature": 1.0, "ignore_eos": True}


def _form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def _posting(
    path: str, *bodies: dict[str, Any], num_clients: int = 1, is_named: bool = False, is_new: bool = False
) -> Load:
    posting = Posting(path, bodies, num_clients, is_named, is_new)
    return lambda target: _program("tests.attack.posting", given=posting.document(target))


def _holding_bodies(target: Target) -> Awaitable[None]:
    host, port = target.address
    given = f"{target.keys.get(ATTACKER, '')}\n".encode()
    return _program("tests.attack.bodies", host, str(port), "40", "8", given=given)


async def _program(module: str, *arguments: str, given: bytes) -> None:
    """Runs a program of the attacker's until it is cancelled."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdin=asyncio.subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        await process.communicate(given)
    finally:
        process.kill()
        await process.wait()


async def _compared(target: Target, what: str, *, worst: Load, ordinary: Load) -> list[Row]:
    """The victim's p99 beside the attacker's worst over those beside its ordinary load; once more if that is much."""
    sides: tuple[list[_Side], list[_Side]] = ([], [])
    for _ in range(2):
        for _ in range(NUM_ROUNDS):
            for load, rounds in zip((ordinary, worst), sides, strict=True):
                rounds.append(await _beside(target, load))
        rows = [
            _row(what, "time to first token", sides, lambda side: side.ttfts_s),
            _row(what, "time per token", sides, lambda side: side.tpots_s),
        ]
        if all(row.held for row in rows):
            break
    num_failed = sum(side.num_failed for side in sides[1])
    return [*rows, Row(f"{what}: requests of the other tenant", "0 failed", f"{num_failed} failed", not num_failed)]


def _row(what: str, name: str, sides: tuple[list[_Side], list[_Side]], of: Callable[[_Side], list[float]]) -> Row:
    ordinary, worst = (_p99([taken_s for side in rounds for taken_s in of(side)]) for rounds in sides)
    noise = _p99([t for side in sides[0][::2] for t in of(side)]) / _p99([t for s in sides[0][1::2] for t in of(s)])
    medians = [statistics.median([t for side in rounds for t in of(side)]) for rounds in sides]
    num_answers = [sum(len(of(side)) for side in rounds) for rounds in sides]
    happened = (
        f"{worst / ordinary:.2f} ({ordinary * 1e3:.1f} -> {worst * 1e3:.1f} ms; medians {medians[0] * 1e3:.1f} -> "
        f"{medians[1] * 1e3:.1f}; {num_answers[0]} and {num_answers[1]} answers; ordinary over itself {noise:.2f})"
    )
    held = worst <= MOST_RATIO * ordinary
    return Row(f"{what}: another's p99 {name}", f"at most {MOST_RATIO:g} of that beside ordinary load", happened, held)


def _p99(taken_s: list[float]) -> float:
    return sorted(taken_s)[int(0.99 * (len(taken_s) - 1))] if taken_s else float("inf")


async def _beside(target: Target, load: Load) -> _Side:
    """The victim's answers while the attacker does this."""
    side = _Side()
    async with _loaded(target, load):
        await asyncio.sleep(WARM_UP_S)
        end_s = time.monotonic() + SIDE_S
        async with target.client(VICTIM) as http:
            await asyncio.gather(*(_ask(http, end_s, side) for _ in range(NUM_VICTIMS)))
    return side


@contextlib.asynccontextmanager
async def _loaded(target: Target, load: Load) -> AsyncIterator[None]:
    task = asyncio.ensure_future(load(target))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
    async with asyncio.timeout(QUIET_S), target.client(ADMIN) as http:
        num_quiet = 0  # looks in a row; between two responses in the background nothing may run for a moment
        while num_quiet < 3:
            workers = (await http.get("/cluster")).json()["workers"]
            num_quiet = 0 if any(worker["running"] + worker["waiting"] for worker in workers) else num_quiet + 1
            await asyncio.sleep(0.1)


async def _ask(http: httpx.AsyncClient, end_s: float, side: _Side) -> None:
    while (started_s := time.monotonic()) < end_s:
        prompt = [random.randrange(10, 1900) for _ in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        first_s = last_s = 0.0
        try:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    last_s = time.monotonic()
                    first_s = first_s or last_s
            answer.raise_for_status()
        except httpx.HTTPError:
            side.num_failed += 1
            continue
        side.ttfts_s.append(first_s - started_s)
        side.tpots_s.append((last_s - first_s) / (ANSWER_TOKENS - 1))
