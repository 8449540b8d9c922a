"""The file of API keys: what is in it, reading it strictly, and following it while it changes. Knows no request.

A key is 256 random bits, so its plain SHA-256 gives nothing away, and the file holds no key itself.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from gateway.limits import DEFAULT_SERVICE_CLASS, MAX_PRIORITY, SERVICE_CLASSES
from services.cluster.tenant_usage import TenantLimits
from services.runtime import toml_file
from services.runtime.background_tasks import supervise
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import ConfigError
from services.scheduling.regions import MAX_REGIONS, REGION, Residency, residency_of

KEY_PREFIX = "tandem-"
KEY_BYTES = 32
CHECK_INTERVAL_S = 1.0
MAX_FILE_BYTES = 8 * 2**20
MAX_LIMIT = 10**9
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0

_YOUNG_NS = 2 * 10**9
"""Age of a file, below which it may change again without its time of change telling."""
_TENANT = r"[A-Za-z0-9_.:-]{1,64}"
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")
_NO_DIGEST = "0" * 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Permissions of one key. `models` None: all. `expires_s`: unix time, None: never."""

    sha256: str
    tenant: str
    name: str = ""
    models: frozenset[str] | None = None
    service_class: str = DEFAULT_SERVICE_CLASS
    """The most urgent class of its requests."""
    priority: int = 0
    """The highest priority of its requests within their class."""
    allow_fallback: bool = False
    """Whether another model may answer requests that do not say so themselves."""
    choose_prefill: bool = False
    """Whether its requests may choose the workers that compute their prompts."""
    is_admin: bool = False
    expires_s: float | None = None

    def allows_model(self, model: str) -> bool:
        """Returns whether it may answer; `model` is its own name, not an alias."""
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's part of the file. `limits` None: the default ones.

    `weight` is the tenant's share where the queue is fair: with 3 it gets three times the tokens of one with 1. Tenants
    with the same `share_cache` find each other's cached pages; empty: the tenant shares none.
    """

    limits: TenantLimits | None = None
    weight: float = 1.0
    share_cache: str = ""
    residency: Residency = ()
    """The only regions in which the tenant's data may be; empty: all."""


@dataclass(frozen=True, slots=True)
class KeySet:
    """All keys by their digest, and what the file says of tenants."""

    keys: Mapping[str, ApiKey] = dataclasses.field(default_factory=dict)
    tenants: Mapping[str, Tenant] = dataclasses.field(default_factory=dict)
    default_limits: TenantLimits = dataclasses.field(default_factory=TenantLimits)
    """Limits of tenants without limits of their own; each tenant has them for itself."""

    def find(self, key: str) -> ApiKey | None:
        """Returns the entry of a key. The time that it takes tells nothing about any key: only digests are compared."""
        return self.find_digest(digest_of_key(key))

    def find_digest(self, digest: str) -> ApiKey | None:
        """Returns the entry of the key with this digest."""
        found = self.keys.get(digest)
        is_same = hmac.compare_digest(_NO_DIGEST if found is None else found.sha256, digest)
        return found if is_same else None

    def limits_of(self, tenant: str) -> TenantLimits:
        """Returns the tenant's own, or the default."""
        limits = self.tenants.get(tenant, _PLAIN_TENANT).limits
        return self.default_limits if limits is None else limits

    def share_cache_of(self, tenant: str) -> str:
        """Returns the name under which the tenant shares cached pages with others; empty: it does not."""
        return self.tenants.get(tenant, _PLAIN_TENANT).share_cache

    def residency_of(self, tenant: str) -> Residency:
        """Returns the only regions in which the tenant's data may be; empty: all."""
        return self.tenants.get(tenant, _PLAIN_TENANT).residency

    @property
    def tenant_names(self) -> frozenset[str]:
        """The tenants that have a key or a table."""
        return frozenset(self.tenants).union(key.tenant for key in self.keys.values())

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the tenants that the file names; all others have 1."""
        return {name: tenant.weight for name, tenant in self.tenants.items()}


_PLAIN_TENANT = Tenant()


class _KeyTable(Struct, forbid_unknown_fields=True):
    """A [[key]] as it is written."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: Annotated[str, Meta(pattern=rf"^{_TENANT}\Z")]
    name: Annotated[str, Meta(pattern=r"^[^\"\\\x00-\x1f\x7f]{0,128}\Z")] = ""
    models: Literal["all"] | Annotated[list[Annotated[str, Meta(pattern=r"^\S{1,256}\Z")]], Meta(min_length=1)] = "all"
    service_class: Annotated[str, Meta(pattern=rf"^({'|'.join(SERVICE_CLASSES)})\Z")] = DEFAULT_SERVICE_CLASS
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    allow_fallback: bool = False
    choose_prefill: bool = False
    admin: bool = False
    expires: Annotated[datetime, Meta(tz=True)] | None = None

    def entry(self) -> ApiKey:
        """Returns what the key allows."""
        return ApiKey(
            sha256=self.sha256,
            tenant=self.tenant,
            name=self.name,
            models=None if isinstance(self.models, str) else frozenset(self.models),
            service_class=self.service_class,
            priority=self.priority,
            allow_fallback=self.allow_fallback,
            choose_prefill=self.choose_prefill,
            is_admin=self.admin,
            expires_s=None if self.expires is None else self.expires.timestamp(),
        )


_Limit = Annotated[int, Meta(ge=0, le=MAX_LIMIT)]


class _LimitsTable(Struct, forbid_unknown_fields=True):
    """[default_limits] as it is written."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrency: _Limit | None = None

    def limits(self) -> TenantLimits:
        """Returns the limits; a limit that is not given is None."""
        return TenantLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)


class _TenantTable(_LimitsTable, forbid_unknown_fields=True):
    """A [tenant.NAME] as it is written."""

    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    share_cache: Annotated[str, Meta(pattern=rf"^{_TENANT}\Z")] = ""
    residency: Annotated[
        list[Annotated[str, Meta(pattern=rf"^{REGION}\Z")]], Meta(min_length=1, max_length=MAX_REGIONS)
    ] = field(default_factory=list)

    def entry(self, *, has_limits: bool) -> Tenant:
        """Returns what the file says of the tenant."""
        limits, residency = self.limits() if has_limits else None, residency_of(self.residency)
        return Tenant(limits, self.weight, self.share_cache, residency)


class _File(Struct, forbid_unknown_fields=True):
    key: list[_KeyTable] = []
    tenant: dict[str, dict[str, Any]] = {}
    default_limits: _LimitsTable = field(default_factory=_LimitsTable)


def new_key() -> str:
    """Returns a key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of_key(key: str) -> str:
    """Returns what the file has for a key: 64 hex digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> KeySet:
    """Reads the file. Raises ConfigError that names file, key and rule."""
    text = toml_file.read_text(path, "the file of API keys", max_bytes=MAX_FILE_BYTES)
    try:
        return parse_keys(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def parse_keys(text: str) -> KeySet:
    """Returns the keys of a TOML document. Raises ConfigError that names key and rule."""
    file = toml_file.parse(text, _File)
    keys: dict[str, ApiKey] = {}
    for number, table in enumerate(file.key):
        if table.sha256 in keys:
            raise ConfigError(f"key[{number}].sha256: an earlier key has it")
        keys[table.sha256] = table.entry()
    tenants = {}
    for name, given in file.tenant.items():
        if re.fullmatch(_TENANT, name) is None:
            raise ConfigError(f"tenant: {name!r:.100} must match {_TENANT}")
        # A tenant that is given a weight keeps the default limits; an empty table lifts them.
        has_limits = not given or any(limit in given for limit in _LIMITS)
        tenants[name] = toml_file.convert(given, _TenantTable, where=f"tenant.{name}").entry(has_limits=has_limits)
    return KeySet(keys, tenants, file.default_limits.limits())


def toml_entry(key: ApiKey) -> str:
    """Returns a key's entry as `parse_keys` reads it. Texts have no quotes, backslashes or control characters."""
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
    """Returns the table of a tenant as `parse_keys` reads it: what is not the default."""
    lines = [f"[tenant.{name}]" if re.fullmatch("[A-Za-z0-9_-]+", name) else f'[tenant."{name}"]']
    for limit in _LIMITS if tenant.limits is not None else ():
        if (value := getattr(tenant.limits, limit)) is not None:
            lines.append(f"{limit} = {value}")
    if tenant.weight != _PLAIN_TENANT.weight:
        lines.append(f"weight = {shown_weight(tenant.weight)}")
    if tenant.share_cache:
        lines.append(f'share_cache = "{tenant.share_cache}"')
    if tenant.residency:
        regions = ", ".join(f'"{region}"' for region in tenant.residency)
        lines.append(f"residency = [{regions}]")
    return "\n".join(lines) + "\n"


def shown_weight(weight: float) -> str:
    """Returns a weight in its shortest spelling: 3, 0.5."""
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
        self._warn_if_empty()
        self.error: ConfigError | None = None
        """What is wrong with the file as it is now."""
        self.num_checks = 0
        self._task: asyncio.Task[None] | None = None
        # Not one of asyncio's: while they are all busy, a key that was taken out would stay good.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="api-keys")

    def start(self) -> None:
        """Begins to look at the file, on the running loop."""
        self._task = supervise(self._follow, name="api-keys")

    async def close(self) -> None:
        """Stops looking."""
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
                    self._warn_if_empty()
                    self._on_change()
        self.num_checks += 1

    def _warn_if_empty(self) -> None:
        if not self.keys.keys:
            logger.warning("the file of API keys has no key: every call is refused", extra={"file": str(self._path)})

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.check()

    def _stat(self) -> tuple[int, ...]:
        """Returns a stamp that differs between two contents of the file; empty where the file does not exist."""
        with contextlib.suppress(OSError):
            found = self._path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
        return ()

    def _is_young(self, stamp: tuple[int, ...]) -> bool:
        return bool(stamp) and abs(self._clock.unix_ns() - stamp[0]) < _YOUNG_NS
