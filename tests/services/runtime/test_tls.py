"""A process's certificate: what is refused at the start, what a rotation changes, and what each role may call."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import GatewayConfig
from gateway.http.connections import connection_of
from gateway.http.server import HttpServer
from protos import inference_pb2, inference_pb2_grpc, link_pb2, link_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.runtime import rpc, tls
from services.runtime.clock import ManualClock
from services.runtime.config import load
from services.runtime.errors import ConfigError, PermissionDenied, TandemError, Unauthenticated
from services.runtime.metrics import CertificateEnd
from services.runtime.rpc import set_identity
from services.runtime.tls import Identity, TlsFiles, check_caller, client_context, pinned_context, roles_of, tls_files
from tests.certificates import Authority, serial_of
from tests.waiting import HANG_LIMIT_S
from worker.config import WorkerConfig
from worker.host import channel_tls, worker_identity

TIMEOUT_S = HANG_LIMIT_S
LONG_AGO_NS = 1_000_000_000_000_000_000


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(autouse=True)
def no_identity_is_left() -> Iterator[None]:
    yield
    rpc.set_identity(None)


def refusal_of(files: TlsFiles, *roles: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Identity(files, roles=roles)
    return caught.value.message


# ---- settings


def test_certificate_and_key_go_together(tmp_path: Path) -> None:
    assert tls_files(None, None, None) is None
    with pytest.raises(ConfigError, match=r"--tls-key \(TANDEM_TLS_KEY\) is missing"):
        tls_files(tmp_path, None, None)
    with pytest.raises(ConfigError, match=r"--tls-cert .* is missing"):
        tls_files(None, tmp_path, None)
    with pytest.raises(ConfigError, match=r"--tls-cert .* is missing"):
        tls_files(None, None, tmp_path)


def test_a_worker_needs_a_ca_for_tls() -> None:
    flags = ["--id=a", "--model=m", "--tls-cert=c", "--tls-key=k"]
    with pytest.raises(ConfigError, match=r"--tls-ca .* is missing"):
        load(WorkerConfig, flags, prog="worker", environ={})
    settings = load(WorkerConfig, flags, prog="worker", environ={"TANDEM_TLS_CA": "a"})
    assert settings.tls == TlsFiles(Path("c"), Path("k"), Path("a"))


@pytest.mark.parametrize(
    ("hosts", "flags", "fits"),
    [
        (["127.0.0.1"], [], True),
        (["127.0.0.1"], ["--host=10.0.0.1", "--insecure"], False),
        (["10.0.0.1"], ["--host=10.0.0.1"], True),
        (["10.0.0.1"], ["--host=10.0.0.1", "--advertise-host=worker.example"], False),
        (["worker.example"], ["--host=10.0.0.1", "--advertise-host=worker.example"], True),
        (["*.pods.example"], ["--host=10.0.0.1", "--advertise-host=a.pods.example"], True),
        (["other.example"], ["--host=10.0.0.1", "--advertise-host=worker.example"], False),
    ],
)
def test_a_workers_certificate_must_be_for_the_host_that_it_advertises(
    authority: Authority, hosts: list[str], flags: list[str], fits: bool
) -> None:
    files = authority.issue("named", roles=["decode"], hosts=hosts)
    given = ["--id=a", "--model=m", f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]
    settings = load(WorkerConfig, [*given, *flags], prog="worker", environ={})
    if fits:
        assert worker_identity(settings, role="decode") is not None
        return
    with pytest.raises(ConfigError, match=r"--tls-cert is .* but it is not for .*--advertise-host"):
        worker_identity(settings, role="decode")


def test_a_worker_says_that_pages_are_not_encrypted_where_it_is_told_so(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("worker", roles=["decode"], hosts=["127.0.0.1", "0.0.0.0", "10.0.0.1", "worker.example"])
    flags = ["--id=a", "--model=m", f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]

    def warnings(*more: str) -> list[str]:
        caplog.clear()
        settings = load(WorkerConfig, [*flags, *more], prog="worker", environ={})
        set_identity(worker_identity(settings, role="decode"))
        assert (channel_tls(settings) is None) == settings.insecure
        set_identity(None)
        return [record.message for record in caplog.records if record.name.startswith(("services.", "worker."))]

    assert warnings("--insecure") == warnings("--host=0.0.0.0", "--transport=shm", "--insecure") == []
    for far in (["--host=0.0.0.0"], ["--host=10.0.0.1", "--transport=tcp"], ["--advertise-host=worker.example"]):
        assert warnings(*far) == []
        assert warnings(*far, "--insecure") == [
            "KV pages on the channel tcp or nccl are not encrypted, as --insecure asks for it"
        ]
    with pytest.raises(ConfigError, match="spiffe://tandem/prefill"):
        worker_identity(load(WorkerConfig, flags, prog="worker", environ={}), role="prefill")


def test_an_operators_port_needs_a_ca() -> None:
    with pytest.raises(ConfigError, match=r"--operator-port is given without --tls-ca"):
        load(GatewayConfig, ["--model=m", "--operator-port=0"], prog="gateway", environ={})


# ---- the files at the start


def test_good_files_are_taken(authority: Authority) -> None:
    files = authority.issue("good", roles=["gateway", "prefill"])
    pem = Identity(files, roles=["gateway", "prefill"]).pem()
    assert (pem.cert_chain, pem.private_key) == (files.cert.read_bytes(), files.key.read_bytes())
    assert pem.ca == authority.path.read_bytes()
    assert pem.private_key.decode().splitlines()[1] not in repr(pem)


@pytest.mark.parametrize("missing", ["cert", "key", "ca"])
def test_a_missing_file_is_named(authority: Authority, missing: str, tmp_path: Path) -> None:
    good = authority.issue("missing", roles=["gateway"])
    paths = {"cert": good.cert, "key": good.key, "ca": good.ca} | {missing: tmp_path / "none.pem"}
    message = refusal_of(TlsFiles(**paths), "gateway")
    assert message == f"--tls-{missing} is {tmp_path / 'none.pem'}, which cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("broken", "rule"), [("cert", "certificates"), ("key", "a private key"), ("ca", "certificates")]
)
def test_a_file_that_is_no_pem_is_named(authority: Authority, broken: str, rule: str, tmp_path: Path) -> None:
    good = authority.issue("broken", roles=["gateway"])
    (tmp_path / "x.pem").write_text("-----BEGIN NOTHING-----\n")
    paths = {"cert": good.cert, "key": good.key, "ca": good.ca} | {broken: tmp_path / "x.pem"}
    message = refusal_of(TlsFiles(**paths), "gateway")
    assert message.startswith(f"--tls-{broken} is {tmp_path / 'x.pem'} but must ")
    assert f"{rule} in PEM form" in message


def test_an_endless_file_is_not_read(authority: Authority, tmp_path: Path) -> None:
    good = authority.issue("endless")
    (tmp_path / "big.pem").write_bytes(bytes(tls.MAX_FILE_BYTES + 1))
    assert "must have at most" in refusal_of(TlsFiles(good.cert, tmp_path / "big.pem"))


def test_another_certificates_key_is_refused(authority: Authority) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    message = refusal_of(TlsFiles(one.cert, other.key))
    assert message == f"--tls-key is {other.key} but must be the key of --tls-cert {one.cert}"


def test_a_passphrase_is_refused_and_not_asked_for(authority: Authority) -> None:
    files = authority.issue("locked", passphrase=b"secret")
    assert refusal_of(files) == f"--tls-key is {files.key} but must be a key without a passphrase"


@pytest.mark.parametrize("with_ca", [True, False])
@pytest.mark.parametrize(("days", "rule"), [((-9, -1), "has expired"), ((1, 9), "is not valid yet")])
def test_a_certificate_out_of_its_time_is_refused(
    authority: Authority, days: tuple[int, int], rule: str, with_ca: bool
) -> None:
    files = authority.issue("late", roles=["gateway"], days=days)
    message = refusal_of(files if with_ca else TlsFiles(files.cert, files.key), "gateway")
    assert message.startswith(f"--tls-cert is {files.cert} but it")
    assert rule in message


def test_a_certificate_of_another_ca_is_refused(authority: Authority, tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("stranger", roles=["gateway"])
    message = refusal_of(TlsFiles(files.cert, files.key, authority.path), "gateway")
    assert message.startswith(f"--tls-cert is {files.cert} but it does not hold against --tls-ca {authority.path}: ")


def test_a_certificate_without_the_processes_role_is_refused(authority: Authority) -> None:
    files = authority.issue("prefill-only", roles=["prefill"])
    assert "spiffe://tandem/decode among its alternative names" in refusal_of(files, "decode")
    Identity(TlsFiles(files.cert, files.key), roles=["gateway"])  # without a CA nobody looks at roles


# ---- what each role may call

EVERY_ROLE = frozenset(tls.ROLES)


@given(st.sampled_from([*tls.CALLERS, *tls.OPEN_SERVICES, "tandem.v1.Other", ""]), st.sets(st.sampled_from(tls.ROLES)))
def test_only_a_named_role_gets_in(service: str, roles: set[str]) -> None:
    def verdict(shown: frozenset[str] | None) -> type[TandemError] | None:
        try:
            check_caller(service, shown)
        except (Unauthenticated, PermissionDenied) as error:
            return type(error)
        return None

    if service in tls.OPEN_SERVICES:
        assert verdict(None) is verdict(frozenset(roles)) is None
        return
    assert verdict(None) is Unauthenticated
    allowed = {"tandem.v1.PrefillWorker": {"gateway"}, "tandem.v1.DecodeWorker": {"gateway"}}
    allowed["tandem.v1.Link"] = allowed["tandem.v1.Prefixes"] = {"prefill", "decode"}
    expected = None if roles & allowed.get(service, set()) else PermissionDenied
    assert verdict(frozenset(roles)) is expected


@given(st.lists(st.one_of(st.sampled_from([tls.ROLE_URI_PREFIX + role for role in tls.ROLES]), st.text())))
def test_only_exact_uris_are_roles(uris: list[str]) -> None:
    assert roles_of(uris) == {role for role in tls.ROLES if tls.ROLE_URI_PREFIX + role in uris}
    assert roles_of(["spiffe://tandem/gateway/x", "SPIFFE://tandem/gateway", "https://tandem/gateway"]) == frozenset()


# ---- rotation


def age(files: TlsFiles) -> None:
    """Makes the files look long written."""
    for path in (files.cert, files.key):
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))


def test_new_files_are_taken_and_broken_ones_are_not(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    files = authority.issue("turning", roles=["gateway"])
    old_key = files.key.read_bytes()
    identity = Identity(files, roles=["gateway"])
    first = identity.pem()
    assert identity.pem() is first

    authority.issue("turning", roles=["gateway"])
    second = identity.pem()
    assert second.cert_chain == files.cert.read_bytes() != first.cert_chain

    good_key = files.key.read_bytes()
    files.key.write_bytes(old_key)  # half of a rotation
    with caplog.at_level(logging.ERROR):
        assert identity.pem() is identity.pem() is second
    assert [record.message for record in caplog.records] == ["the TLS certificate stays as it was"]
    files.key.write_bytes(good_key)
    assert identity.pem() is second

    authority.issue("turning", roles=["prefill"])  # no longer ours
    assert identity.pem() is second
    files.cert.unlink()
    assert identity.pem() is second
    authority.issue("turning", roles=["gateway"])
    assert identity.pem().cert_chain == files.cert.read_bytes() != second.cert_chain


def test_old_files_are_not_read_again(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    files = authority.issue("resting")
    age(files)
    os.utime(authority.path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    identity = Identity(files)
    monkeypatch.setattr(tls, "_load", lambda *_: pytest.fail("the files have not changed"))
    assert identity.pem() is identity.pem()


def test_young_files_are_read_again_whatever_their_time_stamps_say(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue("young")
    monkeypatch.setattr(tls, "_stamp_of", lambda _: (LONG_AGO_NS, 1, 1) * 3)
    clock = ManualClock(unix_ns=LONG_AGO_NS + 10**9)
    identity = Identity(files, clock=clock)
    authority.issue("young")
    clock.advance(60)
    second = identity.pem()  # the files were young when they were read last
    assert second.cert_chain == files.cert.read_bytes()
    authority.issue("young")
    assert identity.pem() is second


def test_an_end_that_is_near_is_logged(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    Identity(authority.issue("far", days=(-1, 9)))
    assert not caplog.records
    Identity(authority.issue("near", days=(-1, 6)))
    assert [record.message for record in caplog.records] == ["the TLS certificate expires soon"]


def test_an_end_that_comes_near_is_logged_once_a_day_and_in_the_metrics(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = time.time()
    clock = ManualClock(unix_ns=round((now_s + 43_200) * 1e9))
    rpc.set_identity(Identity(authority.issue("aging", days=(-1, 10)), clock=clock))
    ends = []
    for _ in range(12 * 24):
        clock.advance(3600)
        ends += [sample.value for family in CertificateEnd().collect() for sample in family.samples]
    assert [record.message for record in caplog.records] == [
        *["the TLS certificate expires soon"] * 7,
        *["the TLS certificate has expired"] * 3,
    ]
    assert len(ends) == 12 * 24
    assert ends == pytest.approx([now_s + 10 * 86_400] * len(ends), abs=60)


def test_without_a_certificate_there_is_no_end_of_one() -> None:
    assert [family.samples for family in CertificateEnd().collect()] == [[]]


# ---- on the wire


class Everything(
    inference_pb2_grpc.InferenceServicer, link_pb2_grpc.LinkServicer, worker_pb2_grpc.DecodeWorkerServicer
):
    """Answers all that get through to it."""

    async def Tokenize(self, request: Any, context: Any) -> Any:
        return inference_pb2.TokenizeResponse(token_ids=[7])

    async def Connect(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield link_pb2.LinkMessage()

    async def Session(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield worker_pb2.StepEvents()


@contextlib.asynccontextmanager
async def serving(files: TlsFiles, profile: rpc.Profile = rpc.INTERNAL) -> AsyncIterator[str]:
    rpc.set_identity(Identity(files))
    names = ["tandem.v1.Inference", "tandem.v1.Link", "tandem.v1.DecodeWorker"]
    server = rpc.make_server(names, profile=profile)
    servicer = Everything()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.server)
    link_pb2_grpc.add_LinkServicer_to_server(servicer, server.server)
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def believing(ca: Path, shown: TlsFiles | None) -> grpc.ChannelCredentials:
    pair = (None, None) if shown is None else (shown.key.read_bytes(), shown.cert.read_bytes())
    return grpc.ssl_channel_credentials(ca.read_bytes(), *pair)


@contextlib.asynccontextmanager
async def dialling(address: str, shown: TlsFiles | None, ca: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.secure_channel(address, believing(ca, shown)) as channel:
        yield channel


async def outcomes(channel: grpc.aio.Channel) -> dict[str, str]:
    """The status of a call to each service; OK where it was answered."""

    async def outcome(call: Any) -> str:
        try:
            await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    public = inference_pb2_grpc.InferenceStub(channel).Tokenize(inference_pb2.TokenizeRequest(), timeout=TIMEOUT_S)
    link = link_pb2_grpc.LinkStub(channel).Connect(timeout=TIMEOUT_S)
    session = worker_pb2_grpc.DecodeWorkerStub(channel).Session(timeout=TIMEOUT_S)
    calls = {"health": health, "public": public, "link": link, "session": session}
    return {name: await outcome(call) for name, call in calls.items()}


@pytest.mark.parametrize(
    ("roles", "link", "session"),
    [
        (["gateway"], "PERMISSION_DENIED", "OK"),
        (["prefill"], "OK", "PERMISSION_DENIED"),
        (["decode"], "OK", "PERMISSION_DENIED"),
        (["operator"], "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (["admin"], "PERMISSION_DENIED", "PERMISSION_DENIED"),
        ([], "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (["gateway", "prefill"], "OK", "OK"),
    ],
)
async def test_a_role_calls_what_is_its_own(authority: Authority, roles: list[str], link: str, session: str) -> None:
    caller = authority.issue("caller", roles=roles)
    async with serving(authority.issue("server")) as address, dialling(address, caller, authority.path) as channel:
        assert await outcomes(channel) == {"health": "OK", "public": "OK", "link": link, "session": session}


async def test_clients_of_the_public_port_need_no_certificate_and_get_nothing_internal(authority: Authority) -> None:
    async with (
        serving(authority.issue("server"), rpc.PUBLIC) as address,
        dialling(address, None, authority.path) as channel,
    ):
        refused = "UNAUTHENTICATED"
        assert await outcomes(channel) == {"health": "OK", "public": "OK", "link": refused, "session": refused}


async def test_without_a_ca_there_is_only_the_public_port(authority: Authority) -> None:
    files = authority.issue("server")
    async with (
        serving(TlsFiles(files.cert, files.key), rpc.PUBLIC) as address,
        dialling(address, None, authority.path) as channel,
    ):
        assert (await outcomes(channel))["public"] == "OK"


async def test_strangers_get_no_connection(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path).issue("stranger", roles=["gateway"])
    expired = authority.issue("expired", roles=["gateway"], days=(-9, -1))
    none = {"health": "UNAVAILABLE", "public": "UNAVAILABLE", "link": "UNAVAILABLE", "session": "UNAVAILABLE"}
    async with serving(authority.issue("server")) as address:
        for shown in (None, stranger, expired):
            async with dialling(address, shown, authority.path) as channel:
                assert await outcomes(channel) == none
        async with grpc.aio.insecure_channel(address) as channel:
            assert await outcomes(channel) == none
        async with dialling(address, authority.issue("caller", roles=["gateway"]), stranger.ca or tmp_path) as channel:
            assert await outcomes(channel) == none


async def test_who_connects_and_says_nothing_is_cut_off(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "HANDSHAKE_TIMEOUT_MS", 300)
    async with serving(authority.issue("server")) as address, asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_a_certificate_for_another_host_is_not_believed(authority: Authority) -> None:
    async with serving(authority.issue("elsewhere", hosts=["elsewhere.example", "127.0.0.2"])) as address:
        async with rpc.make_channel(address) as channel:
            assert set((await outcomes(channel)).values()) == {"UNAVAILABLE"}


async def test_make_channel_shows_the_processes_own_certificate(authority: Authority) -> None:
    async with serving(authority.issue("own", roles=["gateway"])) as address, rpc.make_channel(address) as channel:
        assert (await outcomes(channel))["session"] == "OK"


async def serial_at(address: str, shown: TlsFiles | None, ca: Path) -> int:
    """Number of the certificate that a new connection is shown; by an address without a name."""
    context = ssl.create_default_context(cafile=ca)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    host, _, port = address.rpartition(":")

    def connect() -> bytes:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain:
            with context.wrap_socket(plain, server_hostname=host) as secure:
                return secure.getpeercert(True) or b""

    return serial_of(ssl.DER_cert_to_PEM_cert(await asyncio.to_thread(connect)).encode())


async def test_a_server_and_new_channels_use_new_files_and_open_connections_go_on(authority: Authority) -> None:
    files = authority.issue("rotating", roles=["gateway"])
    caller = authority.issue("caller", roles=["gateway"])
    async with serving(files) as address, rpc.make_channel(address) as early:
        first = serial_of(files.cert.read_bytes())
        assert await serial_at(address, caller, authority.path) == first
        assert (await outcomes(early))["session"] == "OK"

        authority.issue("rotating", roles=["prefill"])
        second = serial_of(files.cert.read_bytes())
        assert await serial_at(address, caller, authority.path) == second != first
        assert (await outcomes(early))["session"] == "OK"  # its connection has the role that it began with
        async with rpc.make_channel(address) as late:
            found = await outcomes(late)
            assert (found["session"], found["link"]) == ("PERMISSION_DENIED", "OK")


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": scope["scheme"][:2].encode()})


async def exchange(port: int, context: ssl.SSLContext | None) -> bytes:
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_http_speaks_tls_alone_and_uses_new_files(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("web")
    server = HttpServer(hello, identity=Identity(files))
    port = await server.start("127.0.0.1", 0)
    try:
        believing = ssl.create_default_context(cafile=authority.path)
        assert (await exchange(port, believing)).endswith(b"\r\n\r\nht")
        with contextlib.suppress(ConnectionError):
            assert await exchange(port, None) == b""
        with pytest.raises(ssl.SSLCertVerificationError):
            await exchange(port, ssl.create_default_context(cafile=Authority(tmp_path).path))
        address = f"127.0.0.1:{port}"
        before = await serial_at(address, None, authority.path)
        authority.issue("web")
        after = await serial_at(address, None, authority.path)
        assert before != after == serial_of(files.cert.read_bytes())
    finally:
        await server.stop(1)


async def test_a_client_that_leaves_is_noticed_through_tls(authority: Authority) -> None:
    lost, begun = asyncio.Event(), asyncio.Event()

    async def wait_for_the_end(scope: Any, receive: Any, send: Any) -> None:
        connection_of(scope).on_lost = lost.set
        begun.set()
        await lost.wait()

    server = HttpServer(wait_for_the_end, identity=Identity(authority.issue("web")))
    port = await server.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            believing = ssl.create_default_context(cafile=authority.path)
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=believing)
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await begun.wait()
            writer.transport.abort()
            await lost.wait()
    finally:
        await server.stop(1)


async def test_a_pinned_certificate_is_believed_for_any_host_and_no_other_is(authority: Authority) -> None:
    files = authority.issue("pinned", hosts=["elsewhere.example"])
    sister = authority.issue("sister", hosts=["127.0.0.1"])
    server = HttpServer(hello, identity=Identity(files))
    port = await server.start("127.0.0.1", 0)
    try:
        assert (await exchange(port, pinned_context(files.cert))).endswith(b"ht")
        with pytest.raises(ssl.SSLCertVerificationError):
            await exchange(port, pinned_context(sister.cert))
        with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
            await exchange(port, client_context(None, None, authority.path))
    finally:
        await server.stop(1)


def test_a_clients_files_are_checked_too(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("client")
    assert client_context(files.cert, files.key, files.ca).verify_mode is ssl.CERT_REQUIRED
    assert client_context(None, None, None).check_hostname
    none = tmp_path / "none.pem"
    with pytest.raises(ConfigError, match=r"--tls-ca is .*none\.pem, which cannot be read"):
        client_context(None, None, none)
    with pytest.raises(ConfigError, match=r"--tls-key .* is missing"):
        client_context(files.cert, None, files.ca)
    with pytest.raises(ConfigError, match=r"--tls-cert is .*none\.pem, which cannot be read"):
        client_context(none, files.key, None)
    with pytest.raises(ConfigError, match=r"--tls-cert is .*none\.pem, which cannot be read"):
        pinned_context(none)
