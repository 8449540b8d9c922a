"""The file of API keys: what is in it, reading it strictly, and following it while it changes. Knows no request.

A key is 256 random bits, so its plain SHA-256 gives nothing away, and the file holds no key itself.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.limits import DEFAULT_SERVICE_CLASS, MAX_PRIORITY, SERVICE_CLASSES
from services.cluster.rate_limits import TenantLimits
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import ConfigError

KEY_PREFIX = "tandem-"
KEY_BYTES = 32
CHECK_INTERVAL_S = 1.0
MAX_FILE_BYTES = 8 * 2**20
MAX_LIMIT = 10**9
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0

_YOUNG_NS = 2 * 10**9
"""A file changed so recently may change again without its time of change telling."""
_TENANT = r"[A-Za-z0-9_.:-]{1,64}"
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")
_NO_DIGEST = "0" * 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What one key allows. `models` None: all. `expires_s`: unix time, None: never."""

    sha256: str
    tenant: str
    name: str = ""
    models: frozenset[str] | None = None
    service_class: str = DEFAULT_SERVICE_CLASS
    """The most urgent one."""
    priority: int = 0
    """The highest one."""
    allow_fallback: bool = False
    """What a request means that does not say whether another model may answer."""
    choose_prefill: bool = False
    """Whether its requests may say who computes their prompts."""
    is_admin: bool = False
    expires_s: float | None = None

    def allows_model(self, model: str) -> bool:
        """Whether it may answer; `model` is its own name, not an alias."""
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class Tenant:
    """What the file says of one tenant. `limits` None: the default ones.

    `weight` is its share where the queue is fair: with 3 it gets three times the tokens of one with 1. Tenants with the
    same `share_cache` find each other's cached pages; empty: nobody else finds its own.
    """

    limits: TenantLimits | None = None
    weight: float = 1.0
    share_cache: str = ""


@dataclass(frozen=True, slots=True)
class KeySet:
    """All keys by their digest, and what the file says of tenants."""

    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    default_limits: TenantLimits = field(default_factory=TenantLimits)
    """Of tenants without limits of their own; each has them for itself."""

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key. How long it takes tells nothing about any key: only digests are compared."""
        return self.find_digest(digest_of_key(key))

    def find_digest(self, digest: str) -> ApiKey | None:
        """The entry of the key with this digest."""
        found = self.keys.get(digest)
        is_same = hmac.compare_digest(_NO_DIGEST if found is None else found.sha256, digest)
        return found if is_same else None

    def limits_of(self, tenant: str) -> TenantLimits:
        """The tenant's own, or the default."""
        limits = self.tenants.get(tenant, _PLAIN_TENANT).limits
        return self.default_limits if limits is None else limits

    def share_cache_of(self, tenant: str) -> str:
        """The name under which the tenant shares cached pages with others; empty: it does not."""
        return self.tenants.get(tenant, _PLAIN_TENANT).share_cache

    @property
    def weights(self) -> dict[str, float]:
        """Of tenants for which the file says something; all others have 1."""
        return {name: tenant.weight for name, tenant in self.tenants.items()}


_PLAIN_TENANT = Tenant()


def new_key() -> str:
    """A key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of_key(key: str) -> str:
    """What stands in the file for a key: 64 hex digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> KeySet:
    """Reads the file. Raises ConfigError that names file, line, field and rule."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the API keys cannot be read from {path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} must have at most {MAX_FILE_BYTES} bytes")
    try:
        return parse_keys(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid UTF-8, which TOML is") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def parse_keys(text: str) -> KeySet:
    """The keys of a TOML document. Raises ConfigError that names line, field and rule."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"this is no TOML: {error}") from error
    reader = _Reader(text)
    reader.check_names(document, ("key", "tenant", "default_limits"), "", "")
    entries = document.get("key", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise reader.error("", "key", "must be tables, each begun with [[key]]")
    keys: dict[str, ApiKey] = {}
    for number, entry in enumerate(entries):
        where = f"key#{number}"
        key = _key(reader, entry, where)
        if key.sha256 in keys:
            raise reader.error(where, "sha256", "is there twice")
        keys[key.sha256] = key
    tables = document.get("tenant", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise reader.error("", "tenant", "must be tables, each begun with [tenant.NAME]")
    tenants = {}
    for name, table in tables.items():
        if re.fullmatch(_TENANT, name) is None:
            raise reader.error(f"tenant.{name}", name, f"must match {_TENANT}")
        tenants[name] = _tenant(reader, table, f"tenant.{name}")
    default = document.get("default_limits", {})
    if not isinstance(default, dict):
        raise reader.error("", "default_limits", "must be a table")
    reader.check_names(default, _LIMITS, "default_limits", " of a tenant's limits")
    return KeySet(keys, tenants, _limits(reader, default, "default_limits"))


def toml_entry(key: ApiKey) -> str:
    """The entry of a key as `parse_keys` reads it. Texts hold neither quotes, backslashes nor control characters."""
    lines = ["[[key]]"]
    if key.name:
        lines.append(f'name = "{key.name}"')
    lines += [f'sha256 = "{key.sha256}"', f'tenant = "{key.tenant}"']
    if key.models is not None:
        models = ", ".join(f'"{model}"' for model in sorted(key.models))
        lines.append(f"models = [{models}]")
    lines += [f'service_class = "{key.service_class}"', f"priority = {key.priority}"]
    if key.allow_fallback:
        lines.append("allow_fallback = true")
    if key.choose_prefill:
        lines.append("choose_prefill = true")
    if key.is_admin:
        lines.append("admin = true")
    if key.expires_s is not None:
        lines.append(f"expires = {datetime.fromtimestamp(key.expires_s, UTC):%Y-%m-%dT%H:%M:%SZ}")
    return "\n".join(lines) + "\n"


def toml_tenant(name: str, tenant: Tenant) -> str:
    """The table of a tenant as `parse_keys` reads it: what is not the default."""
    lines = [f"[tenant.{name}]" if re.fullmatch("[A-Za-z0-9_-]+", name) else f'[tenant."{name}"]']
    for limit in _LIMITS if tenant.limits is not None else ():
        if (value := getattr(tenant.limits, limit)) is not None:
            lines.append(f"{limit} = {value}")
    if tenant.weight != _PLAIN_TENANT.weight:
        lines.append(f"weight = {shown_weight(tenant.weight)}")
    if tenant.share_cache:
        lines.append(f'share_cache = "{tenant.share_cache}"')
    return "\n".join(lines) + "\n"


def shown_weight(weight: float) -> str:
    """As short as can be: 3, 0.5."""
    return str(int(weight)) if weight == int(weight) else str(weight)


class KeyFile:
    """A file of keys that is looked at once a second; `keys` is its last good content.

    Raises ConfigError where it is broken when this is made. Later a broken or missing file changes nothing but the log.
    """

    def __init__(
        self, path: Path, *, on_change: Callable[[], None] = lambda: None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._path = path
        self._on_change = on_change
        self._clock = clock
        self._stamp = self._stat()
        self.keys = read_keys(path)
        self.error: ConfigError | None = None
        """What is wrong with the file as it is now."""
        self.num_checks = 0
        self._task: asyncio.Task[None] | None = None
        # Not one of asyncio's: while they are all busy, a key that was taken out would stay good.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="api-keys")

    def start(self) -> None:
        """Begins to look, on the running loop."""
        self._task = asyncio.create_task(self._follow(), name="api-keys")

    async def close(self) -> None:
        """Stops that."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check(self) -> None:
        """Reads the file again if it has changed. Disks can be slow, so it is done on a thread of its own."""
        loop = asyncio.get_running_loop()
        stamp = await loop.run_in_executor(self._thread, self._stat)
        if stamp != self._stamp or self._is_young(stamp):
            is_new = stamp != self._stamp
            self._stamp = stamp
            try:
                keys = await loop.run_in_executor(self._thread, read_keys, self._path)
            except ConfigError as error:
                if is_new or self.error is None or error.message != self.error.message:
                    logger.error("the API keys stay as they were", extra={"error": error.message})
                self.error = error
            else:
                self.error = None
                if keys != self.keys:
                    self.keys = keys
                    logger.info("the API keys were read again", extra={"keys": len(keys.keys)})
                    self._on_change()
        self.num_checks += 1

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.check()

    def _stat(self) -> tuple[int, ...]:
        """What differs between two contents of the file; nothing if there is no file."""
        with contextlib.suppress(OSError):
            found = self._path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
        return ()

    def _is_young(self, stamp: tuple[int, ...]) -> bool:
        return bool(stamp) and abs(self._clock.unix_ns() - stamp[0]) < _YOUNG_NS


class _Reader:
    """Takes values out of tables and says where they are wrong. TOML's parser tells no lines, so they are searched."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    def error(self, where: str, name: str, rule: str) -> ConfigError:
        """`where`: key#N, tenant.NAME, default_limits or, for the top of the file, empty."""
        number = self._line_of(where, name)
        place = f"line {number}, " if number else ""
        table = where.replace("#", " ") if not where.startswith("key#") else f"[[key]] {int(where[4:]) + 1}"
        return ConfigError(f"{place}{table[:80] + ': ' if table else ''}{name[:80]} {rule}")

    def check_names(self, table: Mapping[str, Any], known: tuple[str, ...], where: str, what: str) -> None:
        """Every field must be one that is read: a misspelt limit would limit nothing."""
        for name in table:
            if name not in known:
                raise self.error(where, name, f"is no field{what}; there are {', '.join(known)}")

    def take(self, table: Mapping[str, Any], where: str, name: str, default: Any, fits: Any, rule: str) -> Any:
        """The value of a field that keeps its rule; `...` as default: it must be there."""
        if name not in table:
            if default is ...:
                raise self.error(where, name, f"is missing; it must be {rule}")
            return default
        if not fits(table[name]):
            raise self.error(where, name, f"is {str(table[name])!r:.100} but must be {rule}")
        return table[name]

    def _line_of(self, where: str, name: str) -> int:
        """The field's line, or its table's; 0: not found."""
        begin = self._header_line(where)
        if where and not begin:
            return 0
        for number in range(begin, len(self._lines)):
            line = self._lines[number].strip()
            if where and line.startswith("["):
                break
            if re.match(rf"(\[+\s*)?[\"']?{re.escape(name)}[\"']?\s*[.=\]]", line):
                return number + 1
        return begin

    def _header_line(self, where: str) -> int:
        """The line, from 1, in which a table begins; 0: it is the top, or written otherwise."""
        num_keys = 0
        for number, line in enumerate(self._lines, start=1):
            header = re.sub(r"[\s\"']", "", line.partition("#")[0])
            if header == "[[key]]":
                if where == f"key#{num_keys}":
                    return number
                num_keys += 1
            elif header == f"[{where}]".replace(" ", ""):
                return number
        return 0


def _key(reader: _Reader, table: Mapping[str, Any], where: str) -> ApiKey:
    known = (
        *("name", "sha256", "tenant", "models", "service_class", "priority", "allow_fallback", "choose_prefill"),
        *("admin", "expires"),
    )
    reader.check_names(table, known, where, " of a key")

    def take(name: str, default: Any, fits: Callable[[Any], bool], rule: str) -> Any:
        return reader.take(table, where, name, default, fits, rule)

    models = take("models", "all", _is_models, 'a list of model names, not empty, or "all"')
    expires = take("expires", None, _is_moment, "a date and time with its offset, such as 2027-01-31T00:00:00Z")
    return ApiKey(
        sha256=take("sha256", ..., lambda value: _is_text(value, "[0-9a-f]{64}"), "64 hex digits in lower case"),
        tenant=take("tenant", ..., lambda value: _is_text(value, _TENANT), f"a text that matches {_TENANT}"),
        name=take("name", "", lambda value: _is_text(value, r"[^\"\\\x00-\x1f\x7f]{0,128}"), "up to 128 characters"),
        models=None if models == "all" else frozenset(models),
        service_class=take(
            "service_class",
            DEFAULT_SERVICE_CLASS,
            lambda value: value in SERVICE_CLASSES,
            f"one of {', '.join(SERVICE_CLASSES)}",
        ),
        priority=take(
            "priority",
            0,
            lambda value: type(value) is int and abs(value) <= MAX_PRIORITY,
            f"an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}]",
        ),
        allow_fallback=take("allow_fallback", False, lambda value: type(value) is bool, "true or false"),
        choose_prefill=take("choose_prefill", False, lambda value: type(value) is bool, "true or false"),
        is_admin=take("admin", False, lambda value: type(value) is bool, "true or false"),
        expires_s=None if expires is None else expires.timestamp(),
    )


def _tenant(reader: _Reader, table: Mapping[str, Any], where: str) -> Tenant:
    reader.check_names(table, (*_LIMITS, "weight", "share_cache"), where, " of a tenant")
    # Whoever gives a tenant a weight does not mean to lift its limits; an empty table does.
    has_limits = not table or any(name in table for name in _LIMITS)
    rule = f"a number greater than 0, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
    return Tenant(
        _limits(reader, table, where) if has_limits else None,
        float(reader.take(table, where, "weight", 1.0, _is_weight, rule)),
        reader.take(
            table, where, "share_cache", "", lambda value: _is_text(value, _TENANT), f"a text that matches {_TENANT}"
        ),
    )


def _limits(reader: _Reader, table: Mapping[str, Any], where: str) -> TenantLimits:
    rule = f"an integer in [0, {MAX_LIMIT}]"
    return TenantLimits(*(reader.take(table, where, name, None, _is_limit, rule) for name in _LIMITS))


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and MIN_WEIGHT <= value <= MAX_WEIGHT


def _is_limit(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_LIMIT


def _is_text(value: Any, pattern: str) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_models(value: Any) -> bool:
    return value == "all" or (
        isinstance(value, list) and bool(value) and all(_is_text(each, r"\S{1,256}") for each in value)
    )


def _is_moment(value: Any) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None
