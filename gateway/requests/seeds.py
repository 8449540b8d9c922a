"""What is drawn for a request that does not say it: its id, and the seeds of its answers."""

import hashlib
import random
import re
import secrets
from collections.abc import Callable, Iterator

from gateway.limits import MAX_NAME_CHARS

ID_BYTES = 12
IDS_PER_DRAW = 256

_NAME = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_NAME_CHARS}}}")
_SEED_STEP = 0x9E3779B97F4A7C15


def seed_source(seed: int | None) -> Callable[[], int]:
    """Returns a source of seeds for requests without one: repeatable with a `seed`, unpredictable without."""
    source = random.Random(secrets.randbits(256) if seed is None else seed)  # noqa: S311 - a generator that a seed repeats, seeded well
    return lambda: source.getrandbits(63)


def id_source() -> Iterator[str]:
    """Request ids that nobody can guess; asking the system for randomness once for many is far cheaper."""
    while True:
        digits = secrets.token_hex(ID_BYTES * IDS_PER_DRAW)
        for start in range(0, len(digits), 2 * ID_BYTES):
            yield digits[start : start + 2 * ID_BYTES]


def refused_id(asked: str | None) -> str:
    """Returns the id of a request that was not accepted: its client's name for it, if that is one, or a drawn id."""
    return asked if asked is not None and _NAME.fullmatch(asked) else secrets.token_hex(ID_BYTES)


def key_seed(tenant: str, idempotency_key: str) -> int:
    """Returns one seed for one call, on every gateway: a call that is repeated gets the same answer."""
    named = f"{len(tenant)}:{tenant}{idempotency_key}".encode()
    return int.from_bytes(hashlib.sha256(named).digest()[:8]) >> 1


def choice_seed(seed: int, choice: int) -> int:
    """Returns an int64 seed for one of several answers to a prompt; the first one has the request's own."""
    return (seed + choice * _SEED_STEP + 2**63) % 2**64 - 2**63
