"""What benchmarks send over HTTP and when, and what they make of the times at which tokens came back.

A stream is read by a protocol that does nothing but parse and count: it shares the machine with what it measures.
Any server that answers with server-sent events whose JSON has `"token_ids": [...]` or `"tokens": [...]` can be asked.
"""

import asyncio
import itertools
import json
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

_TOKENS = re.compile(rb'"(?:token_ids|tokens)": ?\[([\d, ]+)\]')


@dataclass(frozen=True)
class Endpoint:
    """Where to send prompts. `body` makes the JSON of a request from token ids and the number of tokens wanted."""

    url: str
    body: Callable[[Sequence[int], int], Mapping[str, Any]]

    async def ask(
        self, prompt: Sequence[int], num_tokens: int, *, timeout_s: float = 120.0, into: "Timing | None" = None
    ) -> "Timing":
        """Streams one answer to its end, or to its failure; `into` can be looked at meanwhile."""
        address = urlsplit(self.url)
        payload = json.dumps(self.body(prompt, num_tokens)).encode()
        head = (f"POST {address.path} HTTP/1.1", f"Host: {address.netloc}", "Content-Type: application/json")
        lines = "\r\n".join((*head, f"Content-Length: {len(payload)}", "", ""))
        timing = Timing(0.0) if into is None else into
        timing.sent_s = time.monotonic()
        reader = _Reader(lines.encode() + payload, timing)
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(timeout_s):
                loop = asyncio.get_running_loop()
                transport, _ = await loop.create_connection(lambda: reader, address.hostname or "", address.port or 80)
                await reader.ended
        except OSError as error:  # ConnectionError and TimeoutError are such
            timing.failure = str(error) or f"no end after {timeout_s:g} s"
        finally:
            if transport is not None:
                transport.close()
        return timing


@dataclass
class Timing:
    """When the parts of one answer came, by `time.monotonic()`."""

    sent_s: float
    arrivals_s: list[tuple[float, int]] = field(default_factory=list)
    """Time of each message with tokens, and how many."""
    failure: str = ""
    """Why the answer is missing or not whole."""

    @property
    def num_tokens(self) -> int:
        """How many came in all."""
        return sum(count for _, count in self.arrivals_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0][0] - self.sent_s

    @property
    def itls_s(self) -> list[float]:
        """Gaps between messages with tokens."""
        return [later - earlier for (earlier, _), (later, _) in itertools.pairwise(self.arrivals_s)]

    @property
    def tpot_s(self) -> float:
        """Mean time of the tokens after the first; 0 where the answer has one token."""
        (first_s, first_count), (last_s, _) = self.arrivals_s[0], self.arrivals_s[-1]
        return (last_s - first_s) / max(1, self.num_tokens - first_count)


class _Reader(asyncio.Protocol):
    """One request and its answer on a connection of their own. Calls of httptools come by their names."""

    def __init__(self, request: bytes, timing: Timing) -> None:
        self._request = request
        self._timing = timing
        self._unread = b""
        self._parser = httptools.HttpResponseParser(self)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's does not derive from asyncio's classes

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is no HTTP: {error}")

    def on_body(self, data: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._fail(f"{self._parser.get_status_code()}: {data[:500].decode(errors='replace')}")
            return
        lines = (self._unread + data).split(b"\n")
        self._unread = lines.pop()
        for line in lines:
            if found := _TOKENS.search(line):
                self._timing.arrivals_s.append((time.monotonic(), found.group(1).count(b",") + 1))

    def on_message_complete(self) -> None:
        if not self._timing.arrivals_s:
            self._fail("an answer without tokens")
        elif not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("the stream broke off before its end")

    def _fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(reason))


def ours(http: str) -> Endpoint:
    """A gateway of this project."""

    def body(prompt: Sequence[int], num_tokens: int) -> Mapping[str, Any]:
        wanted = {"prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        return wanted | {"stream": True, "return_token_ids": True}

    return Endpoint(f"{http}/v1/completions", body)


async def ask_in_turn(
    ask: Callable[[], Awaitable[Timing]], *, num_requests: int, num_at_once: int
) -> tuple[list[Timing], float]:
    """So many clients that each send the next request when their last one is answered; answers, and seconds in all."""
    left = iter(range(num_requests))
    answers: list[Timing] = []

    async def client() -> None:
        for _ in left:
            answers.append(await ask())

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as clients:
        for _ in range(num_at_once):
            clients.create_task(client())
    return answers, time.monotonic() - began_s


async def ask_at(times_s: Iterable[float], ask: Callable[[], Awaitable[Timing]]) -> list[Timing]:
    """Sends a request at each of these times after now, whatever became of the others; all answers."""
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as requests:
        tasks = []
        for time_s in times_s:
            await asyncio.sleep(began_s + time_s - time.monotonic())
            tasks.append(requests.create_task(_awaited(ask)))
    return [task.result() for task in tasks]


async def _awaited(ask: Callable[[], Awaitable[Timing]]) -> Timing:
    return await ask()


def poisson(rate: float, duration_s: float, rng: random.Random) -> list[float]:
    """Times at which independent users come, `rate` a second on average, until `duration_s`."""
    times_s = []
    time_s = rng.expovariate(rate)
    while time_s < duration_s:
        times_s.append(time_s)
        time_s += rng.expovariate(rate)
    return times_s


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest rank: the least value that at least `percent` percent are not above. NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@dataclass(frozen=True)
class Targets:
    """What a user expects. A request meets them if its first token does and `itl_percent` of its gaps do."""

    ttft_s: float
    itl_s: float
    itl_percent: float = 95.0

    def are_met_by(self, answer: Timing) -> bool:
        """Whether this user is content. An answer of one message has no gap; a failed one contents nobody."""
        if answer.failure:
            return False
        itls_s = answer.itls_s or [0.0]
        return answer.ttft_s <= self.ttft_s and percentile(itls_s, self.itl_percent) <= self.itl_s

    def goodput(self, answers: Iterable[Timing], duration_s: float) -> float:
        """Returns the requests a second that met the targets, of those that were sent within `duration_s`."""
        return sum(map(self.are_met_by, answers)) / duration_s
