"""Why a worker cannot be reached, from what gRPC itself writes when it meets each obstacle."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos import membership_pb2, membership_pb2_grpc
from services.runtime import reach, rpc
from services.runtime.tls import Identity, TlsFiles
from tests.certificates import Authority
from tests.waiting import HANG_LIMIT_S


@pytest.fixture(autouse=True)
def without_identity() -> Iterator[None]:
    yield
    rpc.set_identity(None)


async def obstacle_between(server: TlsFiles | None, client: TlsFiles | None, *, address: str = "") -> reach.Obstacle:
    """What a client meets that dials a server."""
    rpc.set_identity(None if server is None else Identity(server))
    listening = rpc.make_server(["tandem.v1.Link"])
    port = await listening.start("127.0.0.1", 0)
    rpc.set_identity(None if client is None else Identity(client))
    try:
        async with rpc.make_channel(address or f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await membership_pb2_grpc.MembershipStub(channel).Challenge(
                    membership_pb2.ChallengeRequest(), timeout=HANG_LIMIT_S
                )
        return rpc.obstacle_of(caught.value)
    finally:
        await listening.stop(0)


async def test_each_obstacle_is_named(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    good = ours.issue("good")
    assert await obstacle_between(ours.issue("other", hosts=["worker.example"]), good) == reach.OTHER_NAME
    assert await obstacle_between(None, good) == reach.NO_TLS
    assert await obstacle_between(good, None) == reach.CLOSED_TO_PLAIN
    assert await obstacle_between(theirs.issue("foreign"), good) == reach.OTHER_CA
    assert await obstacle_between(None, None, address="127.0.0.1:1") == reach.REFUSED
    assert await obstacle_between(None, None, address="worker.invalid:1") == reach.NO_NAME


@pytest.mark.parametrize(
    ("details", "has_tls", "found"),
    [
        ("... CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", True, reach.EXPIRED),
        ("failed to connect to all addresses; last error: UNAVAILABLE: Socket closed", True, reach.CLOSED_TO_TLS),
        ("Socket closed", True, reach.ENDED),
        ("connect: No route to host (113)", False, reach.NO_ROUTE),
        ("Connection reset by peer", False, reach.RESET),
        ("last error: UNKNOWN: ipv4:10.0.0.1:1: tcp handshaker shutdown", False, reach.SILENT),
        ("connection attempt timed out before receiving SETTINGS frame", False, reach.SILENT),
    ],
)
def test_what_is_known_by_its_text(details: str, has_tls: bool, found: reach.Obstacle) -> None:
    assert reach.obstacle(details, code="UNAVAILABLE", has_tls=has_tls) == found


def test_what_is_not_known_is_not_repeated() -> None:
    found = reach.obstacle("10.1.2.3 said: secret", code="INTERNAL", has_tls=True)
    assert found.cause == "the connection fails (INTERNAL)"
