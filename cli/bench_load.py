"""Load on an OpenAI-compatible endpoint over HTTP, and when each part of each answer came. Prints nothing.

Requests are sent at their times whether earlier ones have ended or not (an open loop), or by a number of clients that
each wait for their answer (a closed loop). Text is made of short words; how many tokens of the endpoint's model a word
is, it is asked once.
"""

import asyncio
import itertools
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from services.runtime.errors import TandemError

WORDS = ("red", "tea", "map", "sun", "ink", "oak", "fox", "jar", "wet", "bus", "sky", "pen", "cup", "ice", "hat", "log")
PROBE_WORDS = 200
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to send: `at_s` after the start, and the parts of its prompt, each a seed and a number of tokens."""

    at_s: float
    parts: tuple[tuple[int, int], ...]
    num_new_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens that the prompt should have."""
        return sum(number for _, number in self.parts)


@dataclass(slots=True)
class Reply:
    """What became of a request; times in seconds after the start of the load."""

    ask: Ask
    sent_at_s: float
    at_s: list[float] = field(default_factory=list)
    """When each event with text came."""
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending the request to the first text."""
        return self.at_s[0] - self.sent_at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first event; None where one event held all."""
        return (self.at_s[-1] - self.at_s[0]) / (self.num_tokens - 1) if len(self.at_s) > 1 < self.num_tokens else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between events."""
        return [later - earlier for earlier, later in itertools.pairwise(self.at_s)]


class Unusable(TandemError):
    """The endpoint is not one that can be measured: it does not answer, refuses, or does not speak OpenAI's API."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go and how they are written. `fields` are added to each body, `headers` to each request."""

    url: str
    model: str
    is_chat: bool
    api_key: str | None
    fields: Mapping[str, Any]
    timeout_s: float
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The route that requests go to."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def client(self, tls: ssl.SSLContext) -> httpx2.AsyncClient:
        """A client that opens as many connections as are needed."""
        return httpx2.AsyncClient(
            base_url=self.url.rstrip("/").removesuffix("/v1"),
            headers={} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"},
            timeout=httpx2.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            verify=tls,
            trust_env=False,
        )

    def body(self, text: str, num_new_tokens: int) -> dict[str, Any]:
        """The body of a streaming request."""
        asked = {"messages": [{"role": "user", "content": text}]} if self.is_chat else {"prompt": text}
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": num_new_tokens}
        return {"model": self.model, **asked, **options, **self.fields}


class Load:
    """Sends requests to an endpoint. `tokens_per_word` as `measured_words` says."""

    def __init__(self, endpoint: Endpoint, client: httpx2.AsyncClient, *, tokens_per_word: float) -> None:
        self._endpoint = endpoint
        self._client = client
        self._tokens_per_word = tokens_per_word
        self._started_at_s = time.perf_counter()

    async def open_loop(self, asks: Sequence[Ask], on_end: Callable[[Reply], None]) -> None:
        """Sends each request at its time, however many are open."""
        self._started_at_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for ask in asks:
                await asyncio.sleep(max(0.0, ask.at_s - self._now_s()))
                group.create_task(self._one(ask, on_end))

    async def closed_loop(self, asks: Sequence[Ask], on_end: Callable[[Reply], None], *, clients: int) -> None:
        """Has this many clients send requests, each one after the answer to its last."""
        self._started_at_s = time.perf_counter()
        left = iter(asks)

        async def client() -> None:
            for ask in left:
                await self._one(ask, on_end)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_at_s

    async def _one(self, ask: Ask, on_end: Callable[[Reply], None]) -> None:
        words = (text_of(seed, round(number / self._tokens_per_word)) for seed, number in ask.parts)
        body = self._endpoint.body(" ".join(words), ask.num_new_tokens)
        reply = Reply(ask, self._now_s())
        try:
            async for event in events(self._client, self._endpoint.path, body=body, headers=self._endpoint.headers):
                if _has_text(event):
                    reply.at_s.append(self._now_s())
                if usage := event.get("usage"):
                    reply.num_prompt_tokens, reply.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            reply.error = "" if reply.at_s else "no text"
        except Unusable as error:
            reply.error = error.message
        reply.end_s = self._now_s()
        reply.num_tokens = reply.num_tokens or len(reply.at_s)
        on_end(reply)


async def events(
    client: httpx2.AsyncClient, path: str, *, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer. Raises Unusable, whose first words are the same for the same kind of error."""
    try:
        async with client.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                raise Unusable(f"{response.status_code} {_message(said)}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise Unusable(f"in the stream: {_message(data)}")
                    yield event
    except httpx2.HTTPError as error:
        raise Unusable(f"{type(error).__name__} {error}".strip()) from error
    except (ValueError, TypeError) as error:
        raise Unusable("the answer is not one of OpenAI's API") from error


async def measured_words(endpoint: Endpoint, client: httpx2.AsyncClient) -> float:
    """Returns the tokens of a word, as the endpoint counts them. Raises Unusable."""
    counts = []
    for num_words in (1, 1 + PROBE_WORDS):
        asked = [event async for event in events(client, endpoint.path, body=endpoint.body(text_of(0, num_words), 1))]
        usage = next((event["usage"] for event in asked if event.get("usage")), None)
        if usage is None:
            raise Unusable("the endpoint does not count tokens in its streams (stream_options.include_usage)")
        counts.append(usage["prompt_tokens"])
    return max(0.1, float(counts[1] - counts[0]) / PROBE_WORDS)


def text_of(seed: int, num_words: int) -> str:
    """Returns words that are the same for the same seed."""
    draw = random.Random(seed)  # noqa: S311 - made-up load
    return " ".join(draw.choices(WORDS, k=max(1, num_words)))


def poisson(lengths: Sequence[tuple[int, int]], *, rate_per_s: float | None, seed: int) -> Iterator[Ask]:
    """Requests of these lengths of prompt and answer, each prompt another, at this rate; None: all at once."""
    draw, now_s = random.Random(seed), 0.0  # noqa: S311 - made-up load
    for number, (num_prompt_tokens, num_new_tokens) in enumerate(lengths):
        yield Ask(now_s, ((seed * 1_000_003 + number, num_prompt_tokens),), num_new_tokens)
        now_s += 0.0 if rate_per_s is None else draw.expovariate(rate_per_s)


def _has_text(event: Mapping[str, Any]) -> bool:
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            return True
    return False


def _message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error.get("code") or error.get("type") or error["message"])[:80]
    except (ValueError, KeyError, TypeError, AttributeError):
        return text.strip()[:80]
