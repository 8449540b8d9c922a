"""`python -m tests.fuzz.run [--requests 100000]`: sends nonsense to a whole cluster, over HTTP and gRPC.

Nothing may fail for a reason of ours: no process dies, no answer is an internal error or has no error object, nobody
waits longer than --hang seconds for an answer, memory does not grow, no process logs an error, and at the end a sound
request is served as at the beginning. 503 is sound only if the cluster is full. Exit code 1 otherwise. `--seed` repeats
a run's inputs; the first inputs of each kind of trouble are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.cluster import Cluster, running_cluster
from protos import inference_pb2, inference_pb2_grpc
from tests.fuzz.inputs import GrpcInput, HttpInput, Inputs
from tests.fuzz.words import ANTHROPIC_PATHS, API_PATHS

CONCURRENCY = 8
LOOKS = (0.25, 0.3, 0.35, 0.4)
LAST_LOOKS = (0.9, 0.95, 1.0)
"""Shares of the requests after which memory is looked at, the first time when caches are full. Allocators give back and
take again more than what is looked for, so the least of the last looks is compared with the most of the first.
"""
MAX_GROWTH_MIB = 5
MANY_REQUESTS = 50_000
MAX_GROWTH_OF_FEW_MIB = 32
"""In a run of fewer than `MANY_REQUESTS` caches and pools still fill while memory is looked at."""
CUT_OFF_BYTES = 16_384
"""A client that sends more may be answered, and cut off, before all was read: the answer can get lost on the way."""
_OF_API = tuple(f"POST {path} ".encode() for path in API_PATHS)
_OF_ANTHROPIC = tuple(f"POST {path} ".encode() for path in ANTHROPIC_PATHS)
SOUND_STATUSES = frozenset({200, 204, 400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 422, 429, 431, 503, 505})
SOUND_CODES = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
_OWN_CLIENTS_WORDS = "Internal error from Core"
"""What the client's own library says where the server has ended a call to which it is still writing."""
FULL = b'"type":"overloaded_error"'
"""In the body of a 503 for which the load is the reason, and not the request."""
INTERNAL_WORDS = ("Traceback", 'File "', "Exception", "0x7f", ".py")


@dataclass
class Outcome:
    """What came of one protocol's requests."""

    num_sent: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    troubles: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, answer: str, seconds: float) -> None:
        """An answer came."""
        self.answers[answer] += 1
        self.slowest_s = max(self.slowest_s, seconds)

    def trouble(self, kind: str, example: str) -> None:
        """Something that must not be."""
        self.troubles[kind] += 1
        self.examples.setdefault(kind, example)


class Fuzzer:
    """Sends inputs, HTTP to an address and gRPC over a channel."""

    def __init__(
        self, address: tuple[str, int], *, hang_s: float, grpc_address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        self._address = address
        self._grpc_address = grpc_address
        self._hang_s = hang_s
        self.learn: Callable[[bytes], None] = lambda body: None
        """Is called with the body of each 200."""

    async def http(self, given: HttpInput, outcome: Outcome) -> None:
        """One connection, one input."""
        started_s = time.monotonic()
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(given.data)
            await writer.drain()
            if given.leaves is not None:
                if given.leaves:
                    await asyncio.wait_for(reader.read(given.leaves), self._hang_s)
                outcome.note("left", 0.0)
                return
            status, body = await asyncio.wait_for(
                _read_answer(reader, is_head=given.data.startswith(b"HEAD ")), self._hang_s
            )
        except TimeoutError:
            if given.may_be_short:
                outcome.note("waits", 0.0)
            else:
                outcome.trouble("hangs", f"{given.what}: {_shown(given.data)}")
            return
        except (ConnectionError, asyncio.IncompleteReadError):
            if given.may_be_short or len(given.data) > CUT_OFF_BYTES:
                outcome.note("cut off", 0.0)
            else:
                outcome.trouble("no answer", f"{given.what}: {_shown(given.data)}")
            return
        finally:
            writer.transport.abort()
        outcome.note(str(status), time.monotonic() - started_s)
        if status == 200:
            self.learn(body)
        self._judge(given, status, body, outcome)

    def _judge(self, given: HttpInput, status: int, body: bytes, outcome: Outcome) -> None:
        example = f"{given.what}: {_shown(given.data)} -> {status} {body[:300]!r}"
        if status not in SOUND_STATUSES or (status == 503 and FULL not in body.replace(b" ", b"")):
            outcome.trouble(f"status {status}", example)
        is_of_api = given.data.startswith(_OF_API)
        members = {"message", "type"} | ({"code"} if not given.data.startswith(_OF_ANTHROPIC) else set())
        if status >= 400 and is_of_api and body and not _is_error_object(body, members):
            outcome.trouble("no error object", example)
        if any(word.encode() in body for word in INTERNAL_WORDS) and status >= 400:
            outcome.trouble("internals shown", example)
        if b'"error"' in body and b"internal" in body:
            outcome.trouble("internal error", example)

    async def grpc(self, given: GrpcInput, outcome: Outcome, channel: grpc.aio.Channel) -> None:
        """One call."""
        if given.frames:
            await self._send_frames(given, outcome)
            return
        path, sent = f"/tandem.v1.{given.method}", {"metadata": given.metadata, "timeout": given.timeout_s}
        if given.num_messages == 1:
            call = channel.unary_stream(path)(given.message, **sent)
        else:
            call = channel.stream_stream(path)(iter([given.message] * given.num_messages), **sent)
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._hang_s):
                async for _ in call:
                    if given.leaves:
                        call.cancel()
        except TimeoutError:
            call.cancel()
            outcome.trouble("hangs", f"{given.what}: {given.message!r} {given.metadata}")
            return
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            code, details = grpc.StatusCode.CANCELLED, ""
        else:
            code, details = grpc.StatusCode.OK, ""
        if given.num_messages != 1 and details == _OWN_CLIENTS_WORDS:
            outcome.note("ended while it sent", time.monotonic() - started_s)
            return
        outcome.note(code.name, time.monotonic() - started_s)
        example = f"{given.what}: {given.message!r} {given.metadata} -> {code.name} {details[:300]!r}"
        if code is grpc.StatusCode.UNAVAILABLE:
            outcome.examples.setdefault(code.name, example)
        if code not in SOUND_CODES:
            outcome.trouble(f"code {code.name}", example)
        if code is grpc.StatusCode.OK and given.num_messages != 1:
            outcome.trouble("not one message and yet answered", example)
        if any(word in details for word in INTERNAL_WORDS):
            outcome.trouble("internals shown", example)

    async def _send_frames(self, given: GrpcInput, outcome: Outcome) -> None:
        """Frames on a connection of their own, which the client leaves after the first answer."""
        reader, writer = await asyncio.open_connection(*self._grpc_address)
        try:
            writer.write(given.frames)
            await writer.drain()
            await asyncio.wait_for(reader.read(1), self._hang_s)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            writer.transport.abort()
        outcome.note("frames", 0.0)


def _shown(data: bytes) -> str:
    """An input without its long repetitions."""
    return repr(re.sub(rb"(.)\1{40,}", rb"\1...", data, flags=re.DOTALL)[:800])


async def _read_answer(reader: asyncio.StreamReader, *, is_head: bool) -> tuple[int, bytes]:
    """The status and the body. Raises IncompleteReadError where the server ends before the head has."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        status = int(lines[0].split(b" ")[1])
        if status != 100:
            break
    headers = dict(line.lower().split(b": ", 1) for line in lines[1:] if b": " in line)
    if is_head or status in (204, 304):
        return status, b""
    if b"content-length" in headers:
        return status, await reader.readexactly(int(headers[b"content-length"]))
    if headers.get(b"transfer-encoding") != b"chunked":
        return status, await reader.read()
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return status, body


def _is_error_object(body: bytes, members: set[str]) -> bool:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error, dict) and members <= error.keys() and bool(error["message"])


def processes(cluster: Cluster) -> dict[str, int]:
    """The process of each program of the cluster; one that died and was started again has another number."""
    return {worker["id"]: worker["pid"] for worker in cluster.get("/cluster")["workers"]} | {
        "gateway": _gateway_pid(cluster)
    }


def memory_mib(pids: dict[str, int]) -> dict[str, int]:
    """Resident memory of each that still runs."""
    return {name: _resident_mib(pid) for name, pid in pids.items() if Path(f"/proc/{pid}").exists()}


def _gateway_pid(cluster: Cluster) -> int:
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("PPid:"))
            command = (status.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == cluster.process.pid and b"gateway" in command.split(b"\0"):
            return int(status.parent.name)
    raise RuntimeError("the gateway has no process")


def _resident_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS:"))


async def _send(
    num: int, one: Callable[[], Coroutine[Any, Any, None]], outcome: Outcome, *, progress: Callable[[], None]
) -> None:
    """`num` inputs, `CONCURRENCY` at a time."""
    left = iter(range(outcome.num_sent, outcome.num_sent + num))

    async def client() -> None:
        for number in left:
            outcome.num_sent += 1
            await one()
            if number % 5000 == 4999:
                progress()

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))


async def fuzz(cluster: Cluster, settings: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Outcome]:
    """All inputs; then a sound request again."""
    host, _, port = cluster.http.removeprefix("http://").partition(":")
    grpc_host, _, grpc_port = cluster.grpc.rpartition(":")
    fuzzer = Fuzzer((host, int(port)), hang_s=settings.hang, grpc_address=(grpc_host, int(grpc_port)))
    inputs = Inputs(settings.seed)
    fuzzer.learn = inputs.learn
    outcomes = {}
    sound, pids = await _sound_answer(cluster), processes(cluster)
    for protocol in settings.protocols:
        outcome = outcomes[protocol] = Outcome()
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:

            async def one(protocol: str = protocol, outcome: Outcome = outcome, channel: Any = channel) -> None:
                if protocol == "http":
                    await fuzzer.http(inputs.http(), outcome)
                else:
                    await fuzzer.grpc(inputs.grpc(), outcome, channel)

            def shown(outcome: Outcome = outcome) -> None:
                so_far = f"slowest {outcome.slowest_s:.2f} s, troubles {dict(outcome.troubles)}, MiB {memory_mib(pids)}"
                progress(f"{outcome.num_sent} sent, {so_far}")

            looks = {}
            for share in (*LOOKS, *LAST_LOOKS):
                await _send(round(settings.requests * share) - outcome.num_sent, one, outcome, progress=shown)
                looks[share] = memory_mib(pids)
        before = {name: max(looks[share].get(name, 0) for share in LOOKS) for name in pids}
        after = {name: min(looks[share].get(name, 0) for share in LAST_LOOKS) for name in pids}
        progress(f"{protocol}: memory in MiB {before} -> {after}")
        if (now := processes(cluster)) != pids:
            outcome.trouble("a process died", f"{pids} -> {now}")
        max_growth_mib = MAX_GROWTH_MIB if settings.requests >= MANY_REQUESTS else MAX_GROWTH_OF_FEW_MIB
        for name in pids:
            if after[name] - before[name] > max_growth_mib:
                outcome.trouble("memory grows", f"{name}: {before[name]} -> {after[name]} MiB")
        try:
            is_sound = await _sound_answer(cluster) == sound
        except grpc.aio.AioRpcError as error:
            outcome.trouble("serves no more", str(error.details()))
            break
        if not is_sound:
            outcome.trouble("another answer", "the sound request is answered in other words than at the beginning")
    return outcomes


async def _sound_answer(cluster: Cluster) -> list[str]:
    """Answers with and without a form, whose first tokens come from a prefill worker, which loads what a form needs."""
    texts = []
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        for schema in ("", '{"enum": ["yes", "no"]}'):
            request = inference_pb2.GenerateRequest(text="def add(a, b):")
            request.sampling.max_tokens, request.sampling.temperature = 16, 0.0
            if schema:
                request.response_format.json_schema = schema
            generate = inference_pb2_grpc.InferenceStub(channel).GenerateUnary
            answer = await generate(request, timeout=30, metadata=[("x-tandem-prefill", "remote")])
            texts.append(str(answer.text))
    return texts


def errors_in(folder: Path) -> Counter[str]:
    """Returns the messages that processes logged as errors, with how often each came."""
    found: Counter[str] = Counter()
    for path in folder.glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and entry.get("level") in ("error", "critical"):
                found[f"{path.stem}: {entry.get('message')} {entry.get('exception', '')[-300:]}"] += 1
    return found


def report(outcomes: dict[str, Outcome]) -> str:
    """What a reader wants to know."""
    lines = []
    for protocol, outcome in outcomes.items():
        counts = ", ".join(f"{count} {answer}" for answer, count in outcome.answers.most_common())
        lines.append(f"{protocol}: {outcome.num_sent} sent, slowest answer {outcome.slowest_s:.2f} s; {counts}")
        lines += [
            f"  {kind}, such as {text}" for kind, text in outcome.examples.items() if kind not in outcome.troubles
        ]
        lines += [f"  TROUBLE {kind}: {count}; {outcome.examples[kind]}" for kind, count in outcome.troubles.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000, help="of each protocol")
    parser.add_argument("--protocols", nargs="+", choices=["http", "grpc"], default=["http", "grpc"])
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--hang", type=float, default=5.0, help="longest wait for an answer, in seconds")
    parser.add_argument("--log-dir", type=Path, help="folder that keeps the cluster's logs")
    settings = parser.parse_args(argv)
    print(f"seed {settings.seed}", file=sys.stderr)
    # The pool has 8 MB: what is touched late in it is no growth that counts.
    flags = ["--threads", "1", "--kv-pages", "192", "--embeddings", "matryoshka"]
    with tempfile.TemporaryDirectory() as folder:
        logs = settings.log_dir or Path(folder) / "logs"
        with running_cluster(*flags, "--log-dir", str(logs)) as cluster:
            outcomes = asyncio.run(fuzz(cluster, settings, lambda words: print(words, file=sys.stderr, flush=True)))
            is_alive = cluster.process.poll() is None
        errors = errors_in(logs)
    print(report(outcomes))
    for message, count in errors.items():
        print(f"TROUBLE {count} times in the log: {message}")
    if not is_alive:
        print("TROUBLE the cluster has ended")
    return 0 if is_alive and not errors and not any(outcome.troubles for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
