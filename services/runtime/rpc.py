"""gRPC servers and channels with one way to fail, keepalive, health and reflection. Knows no service of ours.

Every handler runs inside `services.runtime.interceptor`, which gives it one way to fail, to read and to write.

A server for clients that we do not know has an `Intake` too: it identifies the caller before it asks for a message, so
that a stranger can make it hold no more than a stream's first window, and takes exactly one message where a method has
one.

The process's identity (`services.runtime.tls`) is set once and holds for every server and channel made after that, so
that no port and no connection can be forgotten. The same holds for the process's membership of its cluster
(`services.runtime.membership`): servers made for one incarnation of a worker ask their callers for a proof, and
`prove` gives it.
"""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.rpc import status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from protos import membership_pb2, membership_pb2_grpc
from services.runtime import status
from services.runtime.addresses import join_host_port
from services.runtime.clock import SYSTEM_CLOCK, Clock, Deadline
from services.runtime.errors import ConfigError, NotProven, TandemError
from services.runtime.grpc_server import Server
from services.runtime.idle_connections import IdleConnections
from services.runtime.intake import Intake
from services.runtime.interceptor import DETAILS_METADATA_KEY, StatusInterceptor
from services.runtime.membership import Guard, Member, Proof
from services.runtime.reach import Obstacle, obstacle
from services.runtime.tls import Identity, Pem

MAX_MESSAGE_BYTES = 16 * 2**20
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
READINESS = "readiness"
"""The name under which every server's health is asked whether it should get work; "" says that it lives."""
REASON_TIMEOUT_S = 0.5
"""The time for the status of a call whose answer began without a proof."""
WINDOW_BYTES = 16 * 1024
"""What a public server takes of a message before it is asked for; less would be a round trip more for usual ones."""
MAX_METADATA_BYTES = 16 * 1024
"""The most metadata of one call to a public server; a head over HTTP has the same limit."""
READ_BYTES = 64 * 1024
"""The most that a public server reads from a connection before it looks at it."""
_IDENTITY_ONLY = 1
"""The set of compressions that has none: a compressed message may be a thousand times what came over the wire."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""The time after which a connection without a handshake is cut off; gRPC's own limit is two minutes."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How patient a connection is."""

    keepalive_time_ms: int
    """Silence after which the peer is pinged."""
    keepalive_timeout_ms: int
    """Time for which the peer's kernel may leave bytes unacknowledged before the connection is given up."""
    ping_timeout_ms: int
    """Time for which the peer's process may leave a ping unanswered although its kernel acknowledges it."""
    min_ping_interval_ms: int
    """Fastest pinging that the server takes from a client."""
    write_timeout_s: float
    """Time that one streamed message may wait for a reader before the call is cut off."""
    max_streams_per_connection: int
    asks_for_certificate: bool = True
    """Whether clients must show a certificate, where this process believes a CA."""
    is_public: bool = False
    """Whether the server's windows, metadata and reads are kept small, and compressed messages refused."""
    max_connection_idle_ms: int | None = None
    """Time without a call after which a connection ends; None: it does not."""
    max_connection_age_ms: int | None = None
    """Age at which a connection takes no new calls; those that run continue."""


INTERNAL = Profile(
    keepalive_time_ms=1000,
    keepalive_timeout_ms=1500,
    ping_timeout_ms=10_000,
    min_ping_interval_ms=500,
    write_timeout_s=3.0,
    max_streams_per_connection=1024,
)
"""Between our own processes: a machine that vanished is noticed within 2.5 s. A process that gets no time on a busy
machine answers no ping either, so pings decide late; sessions and Links have their own limits of silence (3 s), which
know more of a process than that it is slow."""

PUBLIC = Profile(
    keepalive_time_ms=20_000,
    keepalive_timeout_ms=10_000,
    ping_timeout_ms=10_000,
    min_ping_interval_ms=5000,
    write_timeout_s=30.0,
    max_streams_per_connection=128,
    asks_for_certificate=False,
    is_public=True,
    max_connection_idle_ms=30_000,
    max_connection_age_ms=3_600_000,
)
"""Towards clients that we do not know."""


_identity: Identity | None = None


def set_identity(identity: Identity | None) -> None:
    """What servers and channels made from now on show and ask for; None: they do without TLS."""
    global _identity
    _identity = identity


def identity() -> Identity | None:
    """Returns what was set last."""
    return _identity


_member: Member | None = None


def set_member(member: Member | None) -> None:
    """What servers and calls from now on prove, and ask their callers for; None: they do without."""
    global _member
    _member = member


async def prove(channel: grpc.aio.Channel, method: str, *, incarnation: str) -> Proof | None:
    """Returns a proof for the next call of this method (/service/name) of a worker; None: this process has no secret.

    The call carries its `metadata`; before anything that the worker says is believed, and anything secret is said,
    `check_answer` looks at what it answers. Raises NotProven, and what gRPC raises where it cannot be reached.
    """
    if _member is None:
        return None
    try:
        reply = await membership_pb2_grpc.MembershipStub(channel).Challenge(membership_pb2.ChallengeRequest())
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        raise NotProven(
            "the worker knows nothing of the cluster's secret: it is of an earlier version, or was started with "
            "neither --redis nor --cluster-secret-file"
        ) from error
    return _member.proof_for(method, incarnation, reply.nonce)


async def check_answer(proof: Proof | None, call: Any) -> None:
    """Waits for the beginning of the worker's answer, a stream, and checks its proof.

    Raises NotProven, and what gRPC raises: a worker that refuses the call gives no proof but a reason.
    """
    if proof is None:
        return
    try:
        proof.check(await call.initial_metadata())
    except NotProven:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REASON_TIMEOUT_S):
                await call.read()
        raise


def metadata_of(proof: Proof | None) -> tuple[tuple[str, str | bytes], ...] | None:
    """Returns what a call carries with this proof, as the stubs take it."""
    return None if proof is None else proof.metadata


async def write_if_open(call: Any, message: Any) -> None:
    """Writes a message to a stream, unless the peer has already ended it: the next read then raises the peer's reason.

    gRPC raises InvalidStateError for such a write, which hides that reason.
    """
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(message)


def refusal(error: grpc.aio.AioRpcError) -> NotProven | None:
    """Returns a worker's words if it does not take this process for one of its cluster; None: it was something else.

    For callers without a secret too, so that both logs say the same.
    """
    if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return None
    return NotProven(f"the worker refuses this process: {error_from_rpc(error).message}")


def obstacle_of(error: grpc.aio.AioRpcError) -> Obstacle:
    """Returns why a call did not reach a process of the cluster, in words that hold no address."""
    has_tls = _identity is not None and _identity.is_mutual
    return obstacle(error.details() or "", code=error.code().name, has_tls=has_tls)


class _Challenges(membership_pb2_grpc.MembershipServicer):
    """Serves `tandem.v1.Membership`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def Challenge(self, request: membership_pb2.ChallengeRequest, context: Any) -> membership_pb2.ChallengeReply:
        """Returns a nonce for a caller that is about to prove itself."""
        return membership_pb2.ChallengeReply(nonce=self._guard.challenge())


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Health per service, with the method that lists them, which the library's servicer lacks."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, None] = {}

    async def set(self, service: str, status: Any) -> None:
        """Sets the health of a service."""
        self._names[service] = None
        await super().set(service, status)

    async def List(self, request: Any, context: Any) -> Any:
        """Returns the health of all services, as `Check` has it: a server that stops serves none."""
        asked = {name: health_pb2.HealthCheckRequest(service=name) for name in self._names}
        statuses = {name: await self.Check(one, context) for name, one in asked.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


class RpcServer:
    """A gRPC server with health per service; register servicers on `server` before `start`.

    The health of "" is that the process lives and its event loop runs: SERVING from `start` to `stop`, also while the
    process drains. The health of each service, and of `READINESS`, says whether it should get work now.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        service_names: Sequence[str],
        *,
        asks_for_certificate: bool = True,
        connections: IdleConnections | None = None,
    ) -> None:
        self.server = server
        self.connections = connections
        self._asks_for_certificate = asks_for_certificate
        # gRPC calls back into them at each handshake and does not keep them itself.
        self._credentials: list[grpc.ServerCredentials] = []
        self._service_names = (READINESS, *service_names)
        self._stopping = asyncio.Lock()
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def start(self, host: str, port: int) -> int:
        """Listens on exactly this address and says on which port; 0 picks a free one. No service is ready yet.

        Raises ConfigError where the address cannot be had, also when another process listens on it.
        """
        bound_port = self.listen(host, port, asks_for_certificate=self._asks_for_certificate)
        await self.set_serving(False)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()
        if self.connections is not None:
            self.connections.start()
        return bound_port

    def listen(self, host: str, port: int, *, asks_for_certificate: bool) -> int:
        """Adds an address before `start`, as that does. With TLS and a CA it may ask for the caller's certificate."""
        if not host:
            raise ConfigError("the host to listen on is '' but must be an address; 0.0.0.0 means all")
        address = join_host_port(host, port)
        try:
            if _identity is None:
                bound_port = self.server.add_insecure_port(address)
            else:
                self._credentials.append(_server_credentials(_identity, asks_for_certificate=asks_for_certificate))
                bound_port = self.server.add_secure_port(address, self._credentials[-1])
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: it is in use or not an address of ours") from error
        if self.connections is not None:
            self.connections.add_port(bound_port)
        return bound_port

    async def set_serving(self, is_serving: bool, *service_names: str) -> None:
        """Sets the health of some services, or of all of them and `READINESS`."""
        known = health_pb2.HealthCheckResponse
        value = known.SERVING if is_serving else known.NOT_SERVING
        for name in service_names or self._service_names:
            await self._health.set(name, value)

    async def stop(self, grace_s: float) -> None:
        """Takes no new call, waits `grace_s` for the running ones, then cancels them.

        May be called again at any time; while another call is still waiting, this one waits for it.
        """
        await self._health.enter_graceful_shutdown()
        async with self._stopping:  # Two at once in gRPC: the second uses what the first has freed, a crash.
            await self.server.stop(grace_s)
            if self.connections is not None:
                await self.connections.close()


def make_server(
    service_names: Sequence[str],
    *,
    profile: Profile = INTERNAL,
    with_reflection: bool = True,
    incarnation: str = "",
    intake: Intake | None = None,
    max_connections: int | None = None,
) -> RpcServer:
    """Returns a server for these services (full names such as tandem.v1.Link); called on the event loop that runs it.

    With `incarnation` it is a worker's, and asks its callers for the cluster's secret where this process has one.
    """
    guard = Guard(_member.secrets, incarnation=incarnation) if _member is not None and incarnation else None
    options = dict(_server_options(profile))
    if intake is not None:
        options["grpc.max_receive_message_length"] = intake.max_message_bytes
    connections = None
    if max_connections is not None:
        # The library would refuse new ones; the idlest end before it comes to that.
        options["grpc.max_allowed_incoming_connections"] = max_connections
        connections = IdleConnections(max_connections)
    server = Server(
        [
            StatusInterceptor(
                write_timeout_s=profile.write_timeout_s,
                checks_callers=_identity is not None and _identity.is_mutual,
                guard=guard,
                intake=intake,
                connections=connections,
            )
        ],
        list(options.items()),
    )
    if guard is not None:
        membership_pb2_grpc.add_MembershipServicer_to_server(_Challenges(guard), cast(Any, server))
    if with_reflection:
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        _add_reflection(names, server)
    return RpcServer(
        cast(Any, server),
        service_names,
        asks_for_certificate=profile.asks_for_certificate,
        connections=connections,
    )


def _add_reflection(names: Sequence[str], server: Any) -> None:
    """Adds reflection under both of its names: v1 has the messages of v1alpha."""
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_registered_method_handlers(_REFLECTION_V1, handlers)


def make_channel(address: str, *, profile: Profile = INTERNAL) -> grpc.aio.Channel:
    """Returns a channel with a connection of its own that notices a dead peer, comes back fast and uses no proxy.

    Where this process believes a CA, it is mutual TLS; the channel keeps the certificate as it is now.
    """
    options = _channel_options(profile)
    credentials = channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def channel_credentials() -> grpc.ChannelCredentials | None:
    """Returns what this process shows and believes as a client, as the files are now; None without a CA."""
    if _identity is None or not _identity.is_mutual:
        return None
    pem = _identity.pem()
    return grpc.ssl_channel_credentials(pem.ca, pem.private_key, pem.cert_chain)


def call_deadline(
    context: "grpc.aio.ServicerContext[Any, Any]", *, maximum_s: float, clock: Clock = SYSTEM_CLOCK
) -> Deadline:
    """Returns the caller's deadline, or `maximum_s` from now where that is sooner or the caller gave none."""
    remaining_s = context.time_remaining()
    if remaining_s is None or not math.isfinite(remaining_s):
        remaining_s = maximum_s
    return Deadline.after(min(remaining_s, maximum_s), clock=clock)


def error_from_rpc(error: grpc.RpcError) -> TandemError:
    """Returns the error that a failed call means: the very class if our own server answered, else by its status code.

    Texts of gRPC itself hold addresses and are left out; chain the original with `raise … from error`.
    """
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    details = _rich_details(error) if isinstance(error, grpc.aio.AioRpcError) else None
    message = details.message if details is not None else f"a call ended with {code.name}"
    return status.from_rich_status(code, message, details)


def is_reply(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether one of our own servers replied with this error. Otherwise the call did not reach one."""
    return _rich_details(error) is not None


def _rich_details(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_METADATA_KEY and isinstance(value, bytes):
            with contextlib.suppress(ValueError):
                return status_pb2.Status.FromString(value)
    return None


def _server_credentials(identity: Identity, *, asks_for_certificate: bool) -> grpc.ServerCredentials:
    """Credentials that look at the identity's files at each handshake."""
    given = identity.pem()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        pem = identity.pem()
        if pem is given:
            return None
        given = pem
        return _configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        cast(Any, fetch),  # the stubs do not know that None means "as before"
        require_client_authentication=asks_for_certificate and identity.is_mutual,
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.private_key, pem.cert_chain)], pem.ca)


def _common_options(profile: Profile) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", profile.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", profile.keepalive_timeout_ms),
        # Without this one a peer whose kernel still answers (a stopped process, a stuck proxy) is noticed after 60 s.
        ("grpc.http2.ping_timeout_ms", profile.ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _server_options(profile: Profile) -> list[tuple[str, int]]:
    return [
        *_common_options(profile),
        ("grpc.http2.min_ping_interval_without_data_ms", profile.min_ping_interval_ms),
        ("grpc.max_concurrent_streams", profile.max_streams_per_connection),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # Two processes that share a port would each get half of the calls, and nobody would notice.
        ("grpc.so_reuseport", 0),
        *(_public_options() if profile.is_public else ()),
        *_age_options(profile),
    ]


def _public_options() -> list[tuple[str, int]]:
    """Returns the options that bound what a client can make us hold before it is identified."""
    return [
        # Otherwise the windows grow to many MiB a stream with the speed at which a client sends.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.experimental.tcp_max_read_chunk_size", READ_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
    ]


def _age_options(profile: Profile) -> list[tuple[str, int]]:
    options = []
    if profile.max_connection_idle_ms is not None:
        options.append(("grpc.max_connection_idle_ms", profile.max_connection_idle_ms))
    if profile.max_connection_age_ms is not None:
        # The grace that follows has no end unless one is set, so no stream is cut.
        options.append(("grpc.max_connection_age_ms", profile.max_connection_age_ms))
    return options


def _channel_options(profile: Profile) -> list[tuple[str, int]]:
    return [
        *_common_options(profile),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Retries are the caller's decision, which knows attempts and fences.
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
