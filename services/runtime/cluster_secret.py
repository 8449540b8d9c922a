"""The place of a cluster's secret: in a file, in the environment, or in the Redis that all its processes name.

Knows no Redis: `services.cluster.secret` talks to it and passes on what it holds. For any thread.
"""

from __future__ import annotations

import logging
import secrets as randomness
import threading
from pathlib import Path

from services.runtime.errors import ConfigError
from services.runtime.membership import MAX_SECRETS

MIN_CHARACTERS = 32
MAX_FILE_BYTES = 4096
SHARED_CHARACTERS = 64
"""The length of a secret that a process makes: 32 random bytes in hexadecimal."""

logger = logging.getLogger(__name__)


class Secrets:
    """The secrets that this process holds now, newest first where they came from Redis.

    `file` has one in each line and is read again whenever they are asked for; a file that has become unusable changes
    nothing but the log. `value` is one secret. With neither, they are `shared`: they come from Redis. Raises
    ConfigError that names file and rule.
    """

    def __init__(self, *, file: Path | None = None, value: str | None = None) -> None:
        if file is not None and value is not None:
            raise ConfigError(
                "--cluster-secret-file and TANDEM_CLUSTER_SECRET are both given; the cluster's secret is one of them"
            )
        self._file = file
        self._error = ""
        self._lock = threading.Lock()
        self._held: tuple[bytes, ...] = ()
        self._candidate = randomness.token_hex(SHARED_CHARACTERS // 2).encode()
        if file is not None:
            self._held = _read(file)
        elif value is not None:
            self._held = (_checked(value.strip(), "TANDEM_CLUSTER_SECRET"),)
        self.is_shared = not self._held

    def __call__(self) -> tuple[bytes, ...]:
        """Returns at most MAX_SECRETS of them; an empty tuple until Redis has answered."""
        with self._lock:
            if self._file is not None:
                self._read_again(self._file)
            return self._held

    @property
    def offer(self) -> bytes:
        """The secret that Redis is to hold where it holds none."""
        with self._lock:
            return self._held[0] if self._held else self._candidate

    def adopt(self, secret: bytes) -> None:
        """Takes the secret that Redis holds. Its former ones stay valid, for processes that learn of it later."""
        with self._lock:
            if self._held[:1] == (secret,):
                return
            if self._held:
                logger.warning("the cluster's secret in Redis is another one now; those before it count as well")
            self._held = (secret, *(each for each in self._held if each != secret))[:MAX_SECRETS]

    def _read_again(self, file: Path) -> None:
        try:
            self._held, self._error = _read(file), ""
        except ConfigError as error:
            if error.message != self._error:
                self._error = error.message
                logger.error("the cluster's secrets stay as they were", extra={"error": error.message})


def _read(file: Path) -> tuple[bytes, ...]:
    flag = "--cluster-secret-file"
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} is {file}, which cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{flag} is {file} but must have at most {MAX_FILE_BYTES} bytes")
    try:
        lines = [line.strip() for line in data.decode().splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} is {file} but must be text, one secret in each line") from None
    found = tuple(_checked(line, f"{flag} {file}") for line in lines if line and not line.startswith("#"))
    if not 1 <= len(found) <= MAX_SECRETS:
        raise ConfigError(f"{flag} is {file} but must have 1 to {MAX_SECRETS} secrets, one in each line")
    return found


def _checked(secret: str, where: str) -> bytes:
    if len(secret) < MIN_CHARACTERS or not secret.isprintable():
        raise ConfigError(
            f"a secret in {where} is too short or not printable: it must have at least {MIN_CHARACTERS} characters, "
            "such as `openssl rand -hex 32` prints"
        )
    return secret.encode()
