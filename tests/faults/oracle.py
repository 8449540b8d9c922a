"""`python -m tests.faults.oracle`: mixed requests, many at once, then beside random deaths; each against a run alone.

Two phases on one cluster: all at one gateway while nothing happens, then at two gateways while workers are killed. The
requests mix penalties, biases, schemas, stop texts, several answers, log-probabilities, chats, streams and clients that
leave. Afterwards each distinct request runs alone, with pages of nobody else, and every answer must have been the same.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio

from services.cluster.keys import Keys
from tests.faults.client import Broken, Refused, connected, http_json, http_request, read_head, read_pieces
from tests.faults.harness import CLUSTER, REPOSITORY, FaultCluster

ANSWER_TIMEOUT_S = 600.0
SHOWN_PROBLEMS = 5
GATEWAY_FLAGS = ["--max-queue-wait-s=3600", "--max-queued-requests=100000", "--max-request-s=3600"]
"""Nothing is refused because the machine is slow."""
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
)


@dataclass(frozen=True)
class Request:
    """What is asked: `path` of the API, and a body without what has no part in the answer."""

    path: str
    body: Mapping[str, Any]
    kind: str


@dataclass
class Choice:
    """One answer of a request, or what had come of it when its client left."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)

    def begins(self, whole: Choice) -> bool:
        """Whether the other one continues this one."""
        is_prefix = self.token_ids == whole.token_ids[: len(self.token_ids)] and whole.text.startswith(self.text)
        return is_prefix and self.logprobs == whole.logprobs[: len(self.logprobs)]


Answers = dict[int, Choice]


@dataclass
class Tally:
    """One line of the table."""

    phase: str
    requests: int = 0
    answers: int = 0
    left: int = 0
    """Requests whose clients left; what came until then is compared too."""
    different: int = 0
    unexpected_5xx: int = 0
    other_errors: int = 0
    quarantined: int = 0
    """Requests in quarantine: there is no guilty one."""
    kills: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.different or self.unexpected_5xx or self.other_errors or self.quarantined)


@dataclass
class Sent:
    """A request that was sent, and what came of it."""

    request: Request
    tally: Tally
    has_left: bool
    answers: Answers = field(default_factory=dict)
    error: str = ""


def make_requests(chance: random.Random, count: int) -> list[Request]:
    """Distinct requests of all kinds, in turn."""
    text = "".join((REPOSITORY / "benchmarks" / name).read_text() for name in ("cluster.py", "system.py", "gateway.py"))
    return [_make_request(chance, number, text) for number in range(count)]


def _make_request(chance: random.Random, number: int, text: str) -> Request:
    # Some prompts begin alike, so that requests find each other's pages.
    start = chance.choice((0, 4000, chance.randrange(len(text) - 5000)))
    prompt = text[start : start + chance.choice((20, 200, 800, chance.randrange(20, 3000)))]
    body: dict[str, Any] = {
        "max_tokens": chance.randrange(1, 64),
        "temperature": chance.choice((0.0, 0.8, 1.0)),
        "seed": number,
        "return_token_ids": True,
    }
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"ignore_eos": True},
        "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        "bias": {"logit_bias": {str(chance.randrange(3, 2000)): chance.choice((-100, -2.0, 3.0)) for _ in range(4)}},
        "schema": {
            "max_tokens": 48,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": chance.choice(SCHEMAS), "strict": True},
            },
        },
        "stop": {"stop": chance.sample(["\n\n", "return", "self.", "def ", "="], 2), "min_tokens": 1},
        "several": {"n": chance.randrange(2, 5), "temperature": 1.0},
        "logprobs": {"logprobs": 2},
        "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 1.0},
    }
    kind = list(kinds)[number % len(kinds)]
    body |= kinds[kind]
    if number // len(kinds) % 2:
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": 2}
        return Request("/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt[:800]}]}, kind)
    return Request("/v1/completions", body | {"prompt": prompt}, kind)


async def ask(address: str, sent: Sent, *, tenant: str, is_stream: bool, leave_after: int | None = None) -> None:
    """Sends a request once and takes its answers; a client that leaves does so after `leave_after` tokens."""
    body: dict[str, Any] = dict(sent.request.body) | {"tenant": tenant, "stream": is_stream}
    data = msgspec.json.encode(body)
    async with asyncio.timeout(ANSWER_TIMEOUT_S), connected(address) as (reader, writer):
        writer.write(http_request("POST", sent.request.path, data))
        try:
            status, headers = await read_head(reader)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Broken(f"no answer: {error!r}") from error
        if status != 200 or not is_stream:
            whole = b"".join([piece async for piece in read_pieces(reader, headers)])
            if status != 200:
                raise Refused(status, whole.decode(errors="replace"))
            _take(sent.answers, msgspec.json.decode(whole))
            return
        async for document in _events(read_pieces(reader, headers)):
            if "error" in document:
                raise Refused(500, json.dumps(document))
            _take(sent.answers, document)
            if leave_after is not None and sum(len(one.token_ids) for one in sent.answers.values()) >= leave_after:
                return


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    buffer = b""
    async for piece in pieces:
        *events, buffer = (buffer + piece).split(b"\n\n")
        for event in events:
            data = b"".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
            if data == b"[DONE]":
                return
            if data:
                yield msgspec.json.decode(data)
    raise Broken("the stream ended without [DONE]")


def _take(answers: Answers, document: Any) -> None:
    """Adds a whole answer or a piece of a stream."""
    for part in document["choices"]:
        choice = answers.setdefault(part["index"], Choice())
        said = part.get("delta") or part.get("message") or {}
        choice.text += part.get("text") or said.get("content") or ""
        choice.token_ids += part.get("token_ids") or []
        choice.finish_reason = part.get("finish_reason") or choice.finish_reason
        logprobs = part.get("logprobs") or {}
        choice.logprobs += logprobs.get("content") or logprobs.get("token_logprobs") or []


class Oracle:
    """Sends all requests of a run, and compares."""

    def __init__(self, cluster: FaultCluster, requests: Sequence[Request], *, chance: random.Random) -> None:
        self._cluster = cluster
        self._requests = requests
        self._chance = chance
        self._numbers = itertools.count()
        self.sent: list[Sent] = []

    async def send_all(self, tally: Tally, gateways: Sequence[str], *, num_answers: int, at_once: int) -> None:
        """Sends requests, some at a time, until enough answers were asked for."""
        started_s = time.monotonic()

        async def client() -> None:
            while tally.answers < num_answers:
                request = self._chance.choice(self._requests)
                tally.requests += 1
                tally.answers += request.body.get("n", 1)
                await self._send(request, tally, self._chance.choice(gateways))

        await asyncio.gather(*(client() for _ in range(at_once)))
        tally.seconds = round(time.monotonic() - started_s, 1)

    async def kill_workers(self, tally: Tally, *, pause_s: float) -> None:
        """Kills workers at random, each at most `pause_s` after all are ready again, until it is cancelled."""
        while True:
            await asyncio.sleep(self._chance.uniform(pause_s / 4, pause_s))
            await self._cluster.replace(self._chance.choice(self._cluster.workers))
            tally.kills += 1
            await self._cluster.ready()

    async def compare(self) -> None:
        """Runs each request that was sent alone, and books what differs."""
        address = self._cluster[self._cluster.names("gateway")[0]].http
        for request in {id(sent.request): sent.request for sent in self.sent}.values():
            alone = Sent(request, Tally("alone"), has_left=False)
            await ask(address, alone, tenant=f"alone-{next(self._numbers)}", is_stream=False)
            for sent in self.sent:
                if sent.request is request and not sent.error and not _is_same(sent, alone.answers):
                    sent.tally.different += 1
                    sent.tally.problems.append(f"{request.kind} {request.path}: {sent.answers} is not {alone.answers}")

    async def num_in_quarantine(self) -> int:
        """Entries that gateways share."""
        async with redis.asyncio.Redis.from_url(self._cluster.redis.url) as client:
            return int(await client.zcard(Keys(CLUSTER).quarantine))

    async def _send(self, request: Request, tally: Tally, gateway: str) -> None:
        number, chance = next(self._numbers), self._chance
        leaves = chance.random() < 0.1
        sent = Sent(request, tally, has_left=leaves)
        self.sent.append(sent)
        tenant = "shared" if number % 2 else f"own-{number}"
        is_stream = leaves or chance.random() < 0.5
        leave_after = chance.randrange(1, 20) if leaves else None
        tally.left += leaves
        try:
            address = self._cluster[gateway].http
            await ask(address, sent, tenant=tenant, is_stream=is_stream, leave_after=leave_after)
        except Refused as error:
            sent.error = str(error)
            is_server_error = isinstance(error.status, int) and error.status >= 500
            tally.unexpected_5xx += is_server_error
            tally.other_errors += not is_server_error
        except (Broken, TimeoutError) as error:
            sent.error = repr(error)
            tally.other_errors += 1
        if sent.error:
            tally.problems.append(f"{request.kind} {request.path}: {sent.error}")


def _is_same(sent: Sent, alone: Answers) -> bool:
    if sent.has_left:
        return all(index in alone and choice.begins(alone[index]) for index, choice in sent.answers.items())
    return sent.answers == alone


async def run(*, num_answers: int, at_once: int, num_distinct: int, seed: int, pause_s: float) -> list[Tally]:
    """Both phases, three fifths of the answers in the first one."""
    chance = random.Random(seed)
    tallies = [Tally("at once"), Tally("random deaths")]
    shares = (num_answers * 3 // 5, num_answers - num_answers * 3 // 5)
    with FaultCluster(gateways=2, kv_pages=4096, flags={"gateway": GATEWAY_FLAGS}) as cluster:
        await cluster.ready()
        oracle = Oracle(cluster, make_requests(chance, num_distinct), chance=chance)
        gateways = cluster.names("gateway")
        await oracle.send_all(tallies[0], gateways[:1], num_answers=shares[0], at_once=at_once)
        tallies[0].quarantined = await oracle.num_in_quarantine()
        killing = asyncio.create_task(oracle.kill_workers(tallies[1], pause_s=pause_s))
        try:
            await oracle.send_all(tallies[1], gateways, num_answers=shares[1], at_once=min(at_once, 100))
        finally:
            killing.cancel()
            await asyncio.wait([killing])
        for name in cluster.workers:
            if not cluster[name].is_alive:
                cluster.start(name)
        await cluster.ready()
        tallies[1].quarantined = await oracle.num_in_quarantine() - tallies[0].quarantined
        await oracle.compare()
        tallies[1].problems += [f"not free: {leak}" for leak in await cluster.leaks()]
        cluster.keep_logs = not all(tally.is_good for tally in tallies)
        await http_json(cluster[gateways[0]].http, "/ready")
    return tallies


def table(tallies: Sequence[Tally]) -> str:
    """Markdown, and the first problems of each phase."""
    names = [name for name in asdict(tallies[0]) if name != "problems"]
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(getattr(tally, name)) for name in names) + " |" for tally in tallies]
    for tally in tallies:
        said = Counter(problem[:300] for problem in tally.problems).most_common(SHOWN_PROBLEMS)
        lines += [f"{tally.phase}: {count} x {problem}" for problem, count in said]
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.oracle", description=__doc__)
    parser.add_argument("--answers", type=int, default=5000)
    parser.add_argument(
        "--at-once", type=int, default=500, help="requests, in the first phase; at most 100 in the second"
    )
    parser.add_argument("--distinct", type=int, default=400, help="different requests, each of which also runs alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--pause", type=float, default=6.0, help="seconds between deaths at most, all workers being ready"
    )
    parser.add_argument("--json", type=Path, help="write the table's figures to this file too")
    settings = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes are ended after it too
    tallies = asyncio.run(
        run(
            num_answers=settings.answers,
            at_once=settings.at_once,
            num_distinct=settings.distinct,
            seed=settings.seed,
            pause_s=settings.pause,
        )
    )
    if settings.json:
        settings.json.write_text(json.dumps([asdict(tally) for tally in tallies], indent=1) + "\n")
    sys.stdout.write(table(tallies) + "\n")
    return 0 if all(tally.is_good for tally in tallies) else 1


if __name__ == "__main__":
    sys.exit(main())
