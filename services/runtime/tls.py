"""TLS of one process: its certificate, the CA it trusts, what callers' roles allow. Knows no gRPC and opens no port.

A process has one identity: `--tls-cert` and `--tls-key` are what it shows, `--tls-ca` is whose certificates it
believes.

- With a certificate and its key the gateway's ports, those of HTTP and of gRPC, speak TLS and nothing else. Clients
  need no certificate; API keys identify them.
- With a CA too, everything between our own processes is mutual TLS: each side shows a certificate that the CA has
  signed, and the one that connects checks that the other's is for the host it has dialled. A worker's port is for our
  own processes only, so a worker takes all three settings or none; a gateway without a CA reaches its workers without
  TLS.
- What a caller may do is its role: a URI among its certificate's subject alternative names, `spiffe://tandem/ROLE`
  with a role of `ROLES`. `CALLERS` says which roles may call a service; one that is not in it cannot be called. A
  certificate may name several roles (that of `tandem up` names three); one without a role may ask for health and what
  clients may ask for.

The files are looked at again before each handshake. New ones serve from the next connection on, in both directions;
connections that are open keep what they began with. Files that are broken, or that do not belong together because only
one of them has been replaced so far, change nothing but the log. At the start they are an error.
"""

import contextlib
import logging
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import ConfigError, PermissionDenied, Unauthenticated
from services.runtime.handshakes import log_failures

ROLE_URI_PREFIX = "spiffe://tandem/"
ROLES = ("gateway", "prefill", "decode", "operator")
OPERATOR = "operator"

CALLERS: Mapping[str, frozenset[str]] = {
    "tandem.v1.PrefillWorker": frozenset({"gateway"}),
    "tandem.v1.DecodeWorker": frozenset({"gateway"}),
    "tandem.v1.Link": frozenset({"prefill", "decode"}),
    "tandem.v1.Prefixes": frozenset({"prefill", "decode"}),
}
"""Services between our own processes, and the roles that may call them."""
OPEN_SERVICES = frozenset(
    {
        "tandem.v1.Inference",
        # The servicer itself asks for an operator's certificate or an admin's key.
        "tandem.v1.Cluster",
        # Gives nonces to callers that are about to prove themselves.
        "tandem.v1.Membership",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.reflection.v1.ServerReflection",
    }
)
"""Services that ask for no certificate: the port may, and so may the servicer."""

MAX_FILE_BYTES = 1 << 20
NUM_READS = 3
"""Files that change while they are read are read again, so often."""
EXPIRES_SOON_S = 7 * 86_400.0
SAY_EVERY_NS = 86_400 * 10**9
"""So often it is said that the certificate expires soon, for as long as it does."""

_YOUNG_NS = 2_000_000_000
"""A file written less than this before it was read may have changed once more without another time stamp."""
_EXPIRED, _NOT_YET_VALID = 10, 9
"""X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID."""
_OTHER_NAME = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one process. The first certificate of `cert` is its own; those that signed it may follow."""

    cert: Path
    key: Path
    ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Pem:
    """What the files held, together and checked."""

    cert_chain: bytes
    private_key: bytes = field(repr=False)
    ca: bytes | None = None


def tls_files(cert: Path | None, key: Path | None, ca: Path | None, *, needs_ca: bool = False) -> TlsFiles | None:
    """Returns the files that settings name; None: no TLS. Raises ConfigError where one is missing beside the others."""
    if cert is None and key is None and ca is None:
        return None
    for name, value in (("cert", cert), ("key", key)):
        if value is None:
            raise ConfigError(
                f"--tls-{name} (TANDEM_TLS_{name.upper()}) is missing: --tls-cert and --tls-key go together"
            )
    if needs_ca and ca is None:
        raise ConfigError(
            "--tls-ca (TANDEM_TLS_CA) is missing: a worker's ports are for the cluster's own processes, "
            "which only a CA can tell from others"
        )
    assert cert is not None
    assert key is not None
    return TlsFiles(cert, key, ca)


class Identity:
    """Certificate, key and CA of this process, as the files are now. For any thread.

    With a CA the certificate must name each of `roles` and be signed by the CA; with a `host` it must be for that, with
    which others compare it. Raises ConfigError that names file and rule.
    """

    def __init__(
        self, files: TlsFiles, *, roles: Iterable[str] = (), host: str = "", clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.files = files
        self._roles = frozenset(roles)
        self._host = host
        self._clock = clock
        self._lock = threading.Lock()
        self._error = ""
        self._stamp, self._loaded = _load(files, self._roles, host)
        self._is_settled = not self._is_young(self._stamp)
        self._note_expiry()

    @property
    def is_mutual(self) -> bool:
        """Whether our own processes show each other certificates."""
        return self.files.ca is not None

    def pem(self) -> Pem:
        """Returns the last good content of the files."""
        return self._look().pem

    def http_context(self) -> ssl.SSLContext:
        """For a server whose clients show no certificate; each handshake uses the files as they are then.

        One that fails is logged.
        """
        entry = _server_context(self.files)

        def choose(sock: Any, server_name: str | None, context: ssl.SSLContext) -> None:
            sock.context = self._look().context

        entry.sni_callback = choose  # called without a name too
        log_failures(entry)
        return entry

    def channel_context(self, *, is_server: bool) -> ssl.SSLContext:
        """For one payload channel between workers, with the files as they are now: TLS 1.3, both sides show theirs.

        Which worker the other one is, is proven inside (`kv_transfer.transports.tls`): any certificate of the CA will
        do. Raises ConfigError while the files are being replaced.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if is_server:
            context.num_tickets = 0  # no channel is opened twice
        assert self.files.ca is not None, "channels are encrypted where there is a CA"
        _believe(context, self.files.ca, "--tls-ca")
        _load_chain(context, self.files)
        return context

    def end_unix_s(self) -> float:
        """When the certificate expires, in seconds since 1970."""
        return ssl.cert_time_to_seconds(self._look().expires)

    def _look(self) -> "_Loaded":
        with self._lock:
            self._read_again()
            if self._clock.unix_ns() - self._noted_unix_ns >= SAY_EVERY_NS:
                self._note_expiry()
            return self._loaded

    def _read_again(self) -> None:
        stamp = _stamp_of(self.files)
        if stamp == self._stamp and self._is_settled:
            return
        try:
            self._stamp, loaded = _load(self.files, self._roles, self._host)
        except ConfigError as error:
            self._stamp = stamp
            if error.message != self._error:
                self._error = error.message
                logger.error("the TLS certificate stays as it was", extra={"error": error.message})
            return
        finally:
            self._is_settled = not self._is_young(self._stamp)
        self._error = ""
        if loaded.pem != self._loaded.pem:
            self._loaded = loaded
            logger.info("the TLS certificate was read again", extra={"expires": loaded.expires})
            self._note_expiry()

    def _is_young(self, stamp: tuple[int, ...]) -> bool:
        now_ns = self._clock.unix_ns()
        return any(abs(now_ns - changed_ns) < _YOUNG_NS for changed_ns in stamp[::3])

    def _note_expiry(self) -> None:
        self._noted_unix_ns = self._clock.unix_ns()
        left_s = ssl.cert_time_to_seconds(self._loaded.expires) - self._noted_unix_ns / 1e9
        if left_s < EXPIRES_SOON_S:
            what = "the TLS certificate expires soon" if left_s > 0 else "the TLS certificate has expired"
            logger.warning(what, extra={"expires": self._loaded.expires})


def check_caller(service: str, roles: frozenset[str] | None) -> None:
    """Whether a caller with these roles may call the service (a full name); None: it has shown no certificate.

    Raises Unauthenticated or PermissionDenied.
    """
    if service in OPEN_SERVICES:
        return
    if roles is None:
        raise Unauthenticated(f"{service} is for the cluster's own processes, which show a certificate")
    allowed = CALLERS.get(service, frozenset())
    if not roles & allowed:
        raise PermissionDenied(f"the caller's certificate has no role that may call {service}")


def roles_of(uris: Iterable[str]) -> frozenset[str]:
    """Returns the roles that a certificate's URIs name."""
    named = {uri.removeprefix(ROLE_URI_PREFIX) for uri in uris if uri.startswith(ROLE_URI_PREFIX)}
    return frozenset(named & set(ROLES))


def client_context(cert: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext:
    """For a client on the command line. Without a CA the system's are believed. Raises ConfigError."""
    context = ssl.create_default_context(cafile=None if ca is None else _readable_ca(ca))
    if cert is not None or key is not None:
        files = tls_files(cert, key, ca)
        assert files is not None
        _read(files)
        _load_chain(context, files)
    return context


def pinned_context(cert: Path) -> ssl.SSLContext:
    """For a client that knows which very certificate the server has, whatever host it is for. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    _believe(context, cert, "--tls-cert")
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


@dataclass(frozen=True, slots=True)
class _Loaded:
    pem: Pem
    context: ssl.SSLContext
    expires: str
    """As certificates have it: Jan  5 09:34:43 2027 GMT."""


def _load(files: TlsFiles, roles: frozenset[str], host: str) -> tuple[tuple[int, ...], _Loaded]:
    """Returns the files' stamp and content, of one moment. Raises ConfigError."""
    for _ in range(NUM_READS):
        stamp = _stamp_of(files)
        pem = _read(files)
        context = _server_context(files)
        shown = _rehearse(files, host)
        if _stamp_of(files) == stamp:
            break
    else:
        raise ConfigError(f"{files.cert} and the other TLS files change while they are read")
    if files.ca is not None:
        has = roles_of(value for kind, value in shown.get("subjectAltName", ()) if kind == "URI")
        for role in sorted(roles - has):
            raise ConfigError(
                f"--tls-cert is {files.cert} but must have the URI {ROLE_URI_PREFIX}{role} among its alternative names"
            )
    return stamp, _Loaded(pem, context, str(shown["notAfter"]))


def _read(files: TlsFiles) -> Pem:
    ca = None if files.ca is None else _content(files.ca, "--tls-ca")
    return Pem(_content(files.cert, "--tls-cert"), _content(files.key, "--tls-key"), ca)


def _content(path: Path, flag: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} is {path}, which cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{flag} is {path} but must have at most {MAX_FILE_BYTES} bytes")
    return data


def _rehearse(files: TlsFiles, host: str) -> Mapping[str, Any]:
    """Shakes hands with itself in memory, as its peers will: what they would not believe is found here.

    With a `host` the peer is taken to have dialled that.

    Returns the certificate as `SSLSocket.getpeercert` does. Raises ConfigError.
    """
    server, client = _server_context(files), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = bool(host)
    if files.ca is None:
        _believe(client, files.cert, "--tls-cert")
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    else:
        for context in (client, server):
            _believe(context, files.ca, "--tls-ca")
        server.verify_mode = ssl.CERT_REQUIRED
        _load_chain(client, files)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=host or None), server.wrap_bio(up, down, server_side=True)]
    try:
        for _ in range(4):  # two round trips are a whole handshake of any version
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"--tls-cert is {files.cert} but {_unbelieved(error, files, host)}") from error
    except ssl.SSLError as error:
        raise ConfigError(
            f"--tls-cert is {files.cert}, with which no connection comes about: {error.reason}"
        ) from error
    shown = ends[0].getpeercert()
    assert shown, "a verified peer has shown a certificate"
    return shown


def _unbelieved(error: ssl.SSLCertVerificationError, files: TlsFiles, host: str) -> str:
    if error.verify_code in _OTHER_NAME:
        return (
            f"it is not for {host}, which others connect to and compare it with: name that among its alternative "
            "names, or give --advertise-host a name that the certificate has"
        )
    if error.verify_code == _EXPIRED:
        return "it, or one that signed it, has expired"
    if error.verify_code == _NOT_YET_VALID:
        return "it is not valid yet"
    against = "" if files.ca is None else f" against --tls-ca {files.ca}"
    return f"it does not hold{against}: {error.verify_message}"


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, files)
    return context


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    def refuse() -> str:
        raise ConfigError(f"--tls-key is {files.key} but must be a key without a passphrase")

    # First, so that what follows can only be the key's fault.
    _believe(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files.cert, "--tls-cert")
    try:
        context.load_cert_chain(files.cert, files.key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"--tls-key is {files.key} but must be the key of --tls-cert {files.cert}") from error
        raise ConfigError(f"--tls-key is {files.key} but must be a private key in PEM form") from error
    except OSError as error:
        raise ConfigError(f"--tls-key is {files.key}, which cannot be read: {error.strerror}") from error


def _believe(context: ssl.SSLContext, path: Path, flag: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag} is {path} but must hold certificates in PEM form") from error
    except OSError as error:
        raise ConfigError(f"{flag} is {path}, which cannot be read: {error.strerror}") from error


def _readable_ca(path: Path) -> Path:
    _believe(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), path, "--tls-ca")
    return path


def _stamp_of(files: TlsFiles) -> tuple[int, ...]:
    """Returns three numbers of each file, the time of its last change first; zeros where no file exists."""
    stamp: list[int] = []
    for path in (files.cert, files.key, files.ca):
        try:
            found = None if path is None else path.stat()
        except OSError:
            found = None
        stamp += (0, 0, 0) if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
    return tuple(stamp)
