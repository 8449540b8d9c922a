"""How a process proves that it holds its cluster's secret, and finds out whether the other does. Pure: no sockets.

    caller → asks the worker for a nonce (`Guard.challenge`)
    caller → the call itself, with both nonces and an HMAC-SHA256 of each of its secrets (`Proof.metadata`)
    worker → checks it before it reads anything (`Guard.check`), and answers with an HMAC of its own (`Proof.check`)

Both HMACs are over a label for the direction, the method, the caller's role, the worker's incarnation and both nonces,
so neither serves for another method, role, worker or call. The worker keeps nothing of a caller that has not proven
itself: its nonces carry a tag by which it knows them again, and only those that were used are remembered.

A cluster may have several secrets while one takes another's place: the caller proves all of its own, and one that both
have is enough. The steps are those of a mutual challenge and response (ISO/IEC 9798-4, mechanism for three passes).
"""

from __future__ import annotations

import hmac
import secrets as randomness
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import NotProven, Unauthenticated, WorkerUnavailable
from services.runtime.tls import OPEN_SERVICES, check_caller

NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_SECRETS = 4
CHALLENGE_S = 5.0
"""For this long a worker's nonce may be used."""
ROLE_KEY = "tandem-role"
NONCES_KEY = "tandem-nonces-bin"
PROOFS_KEY = "tandem-proofs-bin"
ANSWER_KEY = "tandem-proof-bin"
"""Metadata of a call; the last is the worker's."""

_TIME_BYTES, _RANDOM_BYTES, _TAG_BYTES = 8, 16, 32
CHALLENGE_BYTES = _TIME_BYTES + _RANDOM_BYTES + _TAG_BYTES
_CALLER, _WORKER, _RECORD = b"tandem caller", b"tandem worker", b"tandem worker record"


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a proof is for: one method of one incarnation of a worker, called in a role."""

    method: str
    """Such as /tandem.v1.Link/Connect."""
    role: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Member:
    """This process as a caller. `secrets` gives those that it holds now, at most MAX_SECRETS; none: not known yet."""

    secrets: Callable[[], Sequence[bytes]] = field(repr=False)
    role: str

    def proof_for(self, method: str, incarnation: str, challenge: bytes) -> Proof:
        """Returns the proof for one call. Raises NotProven if the worker's nonce is invalid or no secret known yet."""
        held = tuple(self.secrets())
        if not held:
            raise NotProven("the cluster's secret is not known yet: Redis has not answered")
        if len(challenge) != CHALLENGE_BYTES:
            raise NotProven("the worker's nonce has the wrong length")
        return Proof(Purpose(method, self.role, incarnation), held, randomness.token_bytes(NONCE_BYTES) + challenge)


@dataclass(frozen=True, slots=True)
class Proof:
    """A caller's proof for one call, and what the worker must answer."""

    purpose: Purpose
    secrets: tuple[bytes, ...] = field(repr=False)
    nonces: bytes

    @property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What the call carries."""
        proofs = b"".join(_proof(secret, _CALLER, self.purpose, self.nonces) for secret in self.secrets)
        return (ROLE_KEY, self.purpose.role), (NONCES_KEY, self.nonces), (PROOFS_KEY, proofs)

    def check(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Takes the metadata that the worker's answer begins with. Raises NotProven."""
        answer = dict(metadata or ()).get(ANSWER_KEY, b"")
        expected = [_proof(secret, _WORKER, self.purpose, self.nonces) for secret in self.secrets]
        if not _is_one_of(answer, expected):
            raise NotProven("the worker has not proven that it holds this cluster's secret")


class Guard:
    """A worker's side: asks each caller for a proof and gives its own. Belongs to one event loop."""

    def __init__(
        self, secrets: Callable[[], Sequence[bytes]], *, incarnation: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._secrets = secrets
        self._incarnation = incarnation
        self._clock = clock
        self._key = randomness.token_bytes(_TAG_BYTES)
        self._used: OrderedDict[bytes, float] = OrderedDict()
        """Nonces that callers have proven themselves with, and until when they would have been good."""

    def challenge(self) -> bytes:
        """Returns a nonce that is good for one call within CHALLENGE_S. Nothing is kept of it."""
        made_ms = round(self._clock.monotonic() * 1000)
        content = made_ms.to_bytes(_TIME_BYTES) + randomness.token_bytes(_RANDOM_BYTES)
        return content + self._tag(content)

    def check(self, method: str, metadata: Mapping[str, str | bytes]) -> tuple[tuple[str, bytes], ...]:
        """Checks that a caller may call a method (/service/name). Returns the metadata that the answer begins with.

        Raises Unauthenticated, PermissionDenied for a method of other roles, and WorkerUnavailable as long as this
        worker does not know the secret itself.
        """
        service = method.strip("/").partition("/")[0]
        if service in OPEN_SERVICES:
            return ()
        held = self._secrets()
        if not held:
            raise WorkerUnavailable("the worker does not know its cluster's secret yet: Redis has not answered it")
        role, nonces, proofs = (metadata.get(key, b"") for key in (ROLE_KEY, NONCES_KEY, PROOFS_KEY))
        if not isinstance(role, str) or not isinstance(nonces, bytes) or not isinstance(proofs, bytes):
            raise Unauthenticated(
                f"{service} is for the cluster's own processes, and the caller has not proven that it is one: it needs "
                "the --cluster-secret-file of this worker or, where that has none, the same --redis and --cluster"
            )
        purpose = Purpose(method, role, self._incarnation)
        secret = self._secret_of(purpose, nonces, proofs, held)
        if secret is None:
            raise Unauthenticated(
                "the caller's proof is not one of this worker's cluster: --cluster-secret-file (or, without one, "
                "--redis and --cluster) must be the same on both sides"
            )
        self._use_up(nonces[NONCE_BYTES:])
        check_caller(service, frozenset({role}))
        return ((ANSWER_KEY, _proof(secret, _WORKER, purpose, nonces)),)

    def _secret_of(self, purpose: Purpose, nonces: bytes, proofs: bytes, held: Sequence[bytes]) -> bytes | None:
        """Returns the secret that the caller has proven; None: it has proven none of ours."""
        is_sized = len(nonces) == NONCE_BYTES + CHALLENGE_BYTES and len(proofs) <= MAX_SECRETS * PROOF_BYTES
        if not is_sized or len(proofs) % PROOF_BYTES:
            return None
        shown = [proofs[start : start + PROOF_BYTES] for start in range(0, len(proofs), PROOF_BYTES)]
        found = None
        for secret in held:
            expected = _proof(secret, _CALLER, purpose, nonces)
            if any([hmac.compare_digest(expected, each) for each in shown]):
                found = secret
        return found

    def _use_up(self, challenge: bytes) -> None:
        """Takes a nonce of ours; only those who have proven themselves come here, so what is kept is theirs.

        Raises Unauthenticated for one that is not ours, too old, or used.
        """
        content, tag = challenge[:-_TAG_BYTES], challenge[-_TAG_BYTES:]
        now_s = self._clock.monotonic()
        while self._used and next(iter(self._used.values())) < now_s:
            self._used.popitem(last=False)
        good_until_s = int.from_bytes(content[:_TIME_BYTES]) / 1000 + CHALLENGE_S
        is_ours = hmac.compare_digest(tag, self._tag(content))
        if not is_ours or good_until_s < now_s or content in self._used:
            raise Unauthenticated(
                f"the nonce of the caller's proof is not one of the last {CHALLENGE_S:g} s, or was used"
            )
        self._used[content] = now_s + CHALLENGE_S + 0.001  # in order, and not forgotten before it has expired

    def _tag(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, "sha256")


def sign_record(secrets: Sequence[bytes], cluster: str, record: bytes) -> bytes:
    """Returns the proof that goes with a worker's record: an HMAC of each secret, in hexadecimal."""
    return b"".join(_record_proof(secret, cluster, record) for secret in secrets).hex().encode()


def is_signed(secrets: Sequence[bytes], cluster: str, record: bytes, signature: bytes) -> bool:
    """Returns whether a holder of one of the secrets has made the record, for this cluster."""
    try:
        shown = bytes.fromhex(signature.decode("ascii"))
    except ValueError:
        return False
    proofs = [shown[start : start + PROOF_BYTES] for start in range(0, len(shown), PROOF_BYTES)][:MAX_SECRETS]
    expected = [_record_proof(secret, cluster, record) for secret in secrets]
    return any([_is_one_of(proof, expected) for proof in proofs])


def _is_one_of(shown: object, expected: Sequence[bytes]) -> bool:
    """Compares with all, in a time that does not tell which one it was."""
    return isinstance(shown, bytes) and any([hmac.compare_digest(shown, each) for each in expected])


def _proof(secret: bytes, label: bytes, purpose: Purpose, nonces: bytes) -> bytes:
    return _digest(secret, label, purpose.method.encode(), purpose.role.encode(), purpose.incarnation.encode(), nonces)


def _record_proof(secret: bytes, cluster: str, record: bytes) -> bytes:
    return _digest(secret, _RECORD, cluster.encode(), record)


def _digest(secret: bytes, *parts: bytes) -> bytes:
    """Returns a digest of the parts, each with its length in front, so that no two lists are the same text."""
    return hmac.digest(secret, b"".join(len(part).to_bytes(8) + part for part in parts), "sha256")
