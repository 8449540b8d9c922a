"""A whole cluster as a context: `tandem up` in a process of its own on free ports, ended on leaving.

Used by the benchmarks and by the system tests; knows only the command line and the public API.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import grpc
import msgspec

from protos import inference_pb2, inference_pb2_grpc

STOP_TIMEOUT_S = 300.0
HTTP_TIMEOUT_S = 300.0
LOG_CHARACTERS = 10_000
"""Length of the end of each log in the error that ends a cluster."""
NO_TARGETS = {"TANDEM_TTFT_TARGET_S": "0", "TANDEM_ITL_TARGET_S": "0"}
"""Settings of a cluster that lets all requests in, however long they take."""


running: list["Cluster"] = []
"""The clusters that this process runs now."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster: where its APIs are, and the process that owns it."""

    http: str
    grpc: str
    process: subprocess.Popen[str]
    log: Path

    def get(self, path: str) -> Any:
        """GET a JSON document from the HTTP API."""
        return msgspec.json.decode(self.get_text(path))

    def get_text(self, path: str) -> str:
        """GET any text from the HTTP API."""
        with urllib.request.urlopen(self.http + path, timeout=HTTP_TIMEOUT_S) as response:
            text: bytes = response.read()
        return text.decode()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST a JSON document to the HTTP API and return the answer's."""
        request = urllib.request.Request(
            self.http + path, data=msgspec.json.encode(body), headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
            return msgspec.json.decode(response.read())

    def decode_pid(self, request_id: str) -> int:
        """Returns the process of the worker that generates a request's answer, or did within the last minute."""
        worker_id = self.get(f"/cluster/requests/{request_id}")["decode_worker"]
        return next(int(worker["pid"]) for worker in self.get("/cluster")["workers"] if worker["id"] == worker_id)

    def gateway_pid(self) -> int:
        """Returns the process of the gateway that runs now. Raises LookupError where none does."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just ended
            if parent == self.process.pid and b"gateway" in command:
                return int(folder.name)
        raise LookupError("the cluster has no gateway now")

    @contextlib.asynccontextmanager
    async def inference(self) -> AsyncIterator["inference_pb2_grpc.InferenceAsyncStub"]:
        """A stub of the Inference service on a channel of its own."""
        async with grpc.aio.insecure_channel(self.grpc) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)


@contextlib.contextmanager
def running_cluster(
    *arguments: str,
    model: Path | None = None,
    prefill: int = 1,
    decode: int = 1,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Cluster]:
    """Start a cluster, wait until it is ready, and end it. Raises RuntimeError with its log when it does not start.

    `settings` are environment variables for its processes, which have more of them than `tandem up` has flags.
    A program that is told to end (SIGTERM) while it has a cluster ends it first, unless it has a handler of its own.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = [sys.executable, "-m", "cli.main", "up"]
    command += ["--prefill", str(prefill), "--decode", str(decode), "--http-port", "0", "--grpc-port", "0"]
    command += ["--model", str(model)] if model is not None else []
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        log = Path(folder) / "stderr.log"
        if not any(argument.startswith("--log-dir") for argument in arguments):
            command.append(f"--log-dir={folder}")
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*command, *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **settings},
                start_new_session=True,
            )
        try:
            addresses = _wait_until_ready(process, log)
            cluster = Cluster(addresses["http"], addresses["grpc"], process, log)
            running.append(cluster)
            try:
                yield cluster
            except Exception as error:
                for path in sorted(Path(folder).glob("*.log")):
                    error.add_note(f"{path.name}:\n{path.read_text()[-LOG_CHARACTERS:]}")
                raise
            finally:
                running.remove(cluster)
        finally:
            _stop(process, log)


def _wait_until_ready(process: subprocess.Popen[str], log: Path) -> dict[str, str]:
    stdout = _require(process.stdout)
    line = stdout.readline()
    if not line.startswith("ready "):
        process.wait(STOP_TIMEOUT_S)
        raise RuntimeError(f"tandem up did not become ready (exit {process.returncode}):\n{log.read_text()}")
    return dict(part.split("=", 1) for part in line.split()[1:])


def _stop(process: subprocess.Popen[str], log: Path) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"tandem up did not end on SIGTERM:\n{log.read_text()}") from None
    _require(process.stdout).close()


def _require(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "the process was started with a pipe"
    return stream


@dataclass
class Answer:
    """One streamed answer with the time at which each message arrived, in seconds since the request was sent."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = 0
    usage: inference_pb2.Usage | None = None
    arrivals_s: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens in the message) of every message that had tokens."""
    sent_at_s: float = 0.0
    """time.monotonic() when the request was sent."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0][0]

    @property
    def itls_s(self) -> list[float]:
        """Gaps between messages with tokens."""
        times = [time_s for time_s, _ in self.arrivals_s]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def request(prompt: Sequence[int] | str, request_id: str = "", **sampling: Any) -> inference_pb2.GenerateRequest:
    """A GenerateRequest for token ids or text, with SamplingParams by name."""
    message = inference_pb2.GenerateRequest(request_id=request_id, sampling=inference_pb2.SamplingParams(**sampling))
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


async def stream(
    stub: "inference_pb2_grpc.InferenceAsyncStub",
    message: inference_pb2.GenerateRequest,
    *,
    timeout_s: float = 120,
) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """The messages of one Generate call."""
    async for response in stub.Generate(message, timeout=timeout_s):
        yield response


async def collect(
    stub: "inference_pb2_grpc.InferenceAsyncStub",
    message: inference_pb2.GenerateRequest,
    *,
    timeout_s: float = 120,
) -> Answer:
    """Run one Generate call to its end. Raises AssertionError when an index is missing or repeated."""
    answer = Answer(sent_at_s=time.monotonic())
    async for response in stream(stub, message, timeout_s=timeout_s):
        if response.token_ids:
            assert response.first_index == len(answer.token_ids), "an index is missing or repeated"
            answer.arrivals_s.append((time.monotonic() - answer.sent_at_s, len(response.token_ids)))
        answer.token_ids += response.token_ids
        answer.text += response.text
        answer.finish_reason = response.finish_reason
        if response.HasField("usage"):
            answer.usage = response.usage
    assert answer.finish_reason, "the stream ended without a finish reason"
    return answer
