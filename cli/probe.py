"""`tandem probe`: asks a process whether it lives, or whether it should get work, and says so by its exit code.

For containers without a shell, and where the prober of the cluster cannot do it: Kubernetes' own gRPC probes know no
TLS. It needs no API key, since what it asks is open, and reads nothing but its flags and the files that they name.
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.commands import CommandParser
from services.runtime import rpc
from services.runtime.api_client import get_status
from services.runtime.config import option
from services.runtime.errors import TandemError
from services.runtime.kinds import argument, choice, number, path, text
from services.runtime.tls import Identity, client_context, tls_files

LIVE, READY = "live", "ready"
PAGES = {LIVE: "/health", READY: "/ready"}
SERVICES = {LIVE: "", READY: rpc.READINESS}


class ProbeFailed(TandemError):
    """The process does not live, or should get no work, or cannot be asked."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Asks a gateway or a worker whether it lives, or is ready for work. Exit code 1 if not."""

    question: str = option(argument(choice(LIVE, READY)), help="What is asked.")
    address: str = option(
        argument(text()),
        help="HOST:PORT of a gRPC server, or the URL of a gateway's HTTP API; as certificates name it.",
    )
    timeout: float = option(number(0.1, 600), default=5.0, help="Seconds to wait for the answer.")
    tls_ca: Path | None = option(path(), default=None, help="PEM file of the CA to believe.")
    tls_cert: Path | None = option(
        path(), default=None, help="PEM file of the certificate to show; workers ask for one. Needs --tls-key."
    )
    tls_key: Path | None = option(path(), default=None, help="PEM file of its private key, without a passphrase.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(ProbeSettings, lambda settings: run(settings, sys.stdout))


def run(settings: ProbeSettings, stdout: TextIO) -> int:
    """Prints the answer; returns 0. Raises ProbeFailed, ApiUnreachable, and ConfigError for bad TLS files."""
    if "://" in settings.address:
        is_good = _ask_page(settings)
    else:
        is_good = asyncio.run(_ask_service(settings))
    if not is_good:
        raise ProbeFailed(f"{settings.address} is not {settings.question}")
    stdout.write(f"{settings.address} is {settings.question}\n")
    return 0


def _ask_page(settings: ProbeSettings) -> bool:
    tls = client_context(settings.tls_cert, settings.tls_key, settings.tls_ca)
    return get_status(settings.address, PAGES[settings.question], timeout_s=settings.timeout, tls=tls) == 200


async def _ask_service(settings: ProbeSettings) -> bool:
    files = tls_files(settings.tls_cert, settings.tls_key, settings.tls_ca)
    rpc.set_identity(None if files is None else Identity(files))
    request = health_pb2.HealthCheckRequest(service=SERVICES[settings.question])
    async with rpc.make_channel(settings.address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(request, timeout=settings.timeout)
        except grpc.aio.AioRpcError as error:
            raise ProbeFailed(f"{settings.address} cannot be asked: {rpc.obstacle_of(error).cause}") from error
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
