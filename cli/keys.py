"""`tandem keys`: makes API keys and tables of tenants, and checks the file that they are entered in. Writes no file."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from cli.commands import CommandParser
from gateway.access.keys import (
    MAX_LIMIT,
    MAX_WEIGHT,
    MIN_WEIGHT,
    ApiKey,
    Tenant,
    digest_of_key,
    new_key,
    read_keys,
    shown_weight,
    toml_entry,
    toml_tenant,
)
from gateway.limits import DEFAULT_SERVICE_CLASS, MAX_PRIORITY, SERVICE_CLASSES
from services.cluster.tenant_usage import TenantLimits
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import choice, comma_separated, flag, integer, number, path, text
from services.scheduling.regions import REGION, named, residency_of

DAY_S = 86_400

_NAME = text(pattern=r"[A-Za-z0-9_.:-]{1,64}", rule="1 to 64 characters of [A-Za-z0-9_.:-]")


@dataclass(frozen=True, kw_only=True)
class NewKeySettings:
    """Makes an API key. The key goes to standard error, once; its entry for the file goes to standard output."""

    tenant: str = option(_NAME, help="Tenant to which requests with this key are accounted.")
    name: str | None = option(
        text(pattern=r"[^\"\\\x00-\x1f\x7f]{1,128}", rule="1 to 128 characters, no quotes and no backslashes"),
        default=None,
        help="What it is for; only people read it.",
    )
    models: tuple[str, ...] | None = option(
        comma_separated(text(pattern=r"[^\s\"\\]{1,256}", rule="1 to 256 characters, no spaces, quotes, backslashes")),
        default=None,
        help="Models that it may use, by their own names; all if not given.",
    )
    allow_fallback: bool = option(
        flag(), default=False, help="Another model that it may use may answer, unless the request says otherwise."
    )
    choose_prefill: bool = option(
        flag(), default=False, help="Its requests may choose with X-Tandem-Prefill which workers compute their prompts."
    )
    service_class: str = option(
        choice(*SERVICE_CLASSES), default=DEFAULT_SERVICE_CLASS, help="Most urgent class of its requests."
    )
    priority: int = option(
        integer(-MAX_PRIORITY, MAX_PRIORITY), default=0, help="Highest priority of its requests within their class."
    )
    admin: bool = option(flag(), default=False, help="It may also see the cluster, drain workers and act for tenants.")
    days: float | None = option(
        number(0.001, 36_500), default=None, help="Days after which it is refused; never if not given."
    )


@dataclass(frozen=True, kw_only=True)
class TenantSettings:
    """Prints a tenant's table for the file of API keys. A file has one for each tenant at most."""

    tenant: str = option(_NAME, help="Tenant of the table.")
    requests_per_minute: int | None = option(
        integer(0, MAX_LIMIT), default=None, help="Requests that it may send; 0: none."
    )
    tokens_per_minute: int | None = option(
        integer(0, MAX_LIMIT), default=None, help="Tokens of prompts and answers that it may use; 0: none."
    )
    concurrency: int | None = option(
        integer(0, MAX_LIMIT), default=None, help="Requests that it may have running at once; 0: none."
    )
    weight: float = option(
        number(MIN_WEIGHT, MAX_WEIGHT), default=1.0, help="Its share of the tokens where --queue-strategy is fair."
    )
    share_cache: str | None = option(
        _NAME, default=None, help="Tenants with the same name here find each other's cached pages."
    )
    residency: tuple[str, ...] | None = option(
        comma_separated(text(pattern=REGION, rule="1 to 64 of A-Z, a-z, 0-9, _ . and -")),
        default=None,
        help="The only regions in which its data may be; may be given several times.",
    )


@dataclass(frozen=True, kw_only=True)
class CheckKeysSettings:
    """Checks a file of API keys and says what it gives to tenants. Exit code 2 if a gateway would refuse it."""

    file: Path = option(path(), help="The file.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser the three commands."""
    new_parser = parser.add_command("new", "make an API key")
    new_parser.runs(NewKeySettings, lambda settings: new(settings, sys.stdout, sys.stderr, now_s=time.time()))
    tenant_parser = parser.add_command("tenant", "print a tenant's table")
    tenant_parser.runs(TenantSettings, lambda settings: tenant(settings, sys.stdout))
    check_parser = parser.add_command("check", "check a file of API keys")
    check_parser.runs(CheckKeysSettings, lambda settings: check(settings, sys.stdout))


def new(settings: NewKeySettings, stdout: TextIO, stderr: TextIO, *, now_s: float) -> int:
    """Prints a key that nobody has seen before, and its entry."""
    key = new_key()
    entry = ApiKey(
        sha256=digest_of_key(key),
        tenant=settings.tenant,
        name=settings.name or "",
        models=None if settings.models is None else frozenset(settings.models),
        service_class=settings.service_class,
        priority=settings.priority,
        allow_fallback=settings.allow_fallback,
        choose_prefill=settings.choose_prefill,
        is_admin=settings.admin,
        expires_s=None if settings.days is None else float(int(now_s + settings.days * DAY_S)),
    )
    stderr.write(f"the key, shown only now: {key}\n")
    stderr.flush()
    stdout.write(toml_entry(entry))
    return 0


def tenant(settings: TenantSettings, stdout: TextIO) -> int:
    """Prints the table of a tenant. Raises ConfigError where nothing is given, which would lift all limits."""
    limits = TenantLimits(settings.requests_per_minute, settings.tokens_per_minute, settings.concurrency)
    entry = Tenant(
        None if limits.is_unlimited else limits,
        settings.weight,
        settings.share_cache or "",
        residency_of(settings.residency or ()),
    )
    if entry == Tenant():
        raise ConfigError(
            "nothing but the tenant is given; give it a limit, a --weight, a --share-cache name or a --residency"
        )
    stdout.write(toml_tenant(settings.tenant, entry))
    return 0


def check(settings: CheckKeysSettings, stdout: TextIO) -> int:
    """Says what is in the file."""
    keys = read_keys(settings.file)
    tenants = {key.tenant for key in keys.keys.values()}
    num_limited = sum(entry.limits is not None for entry in keys.tenants.values())
    stdout.write(f"{len(keys.keys)} keys of {len(tenants)} tenants, {num_limited} with limits of their own\n")
    for name, entry in sorted(keys.tenants.items()):
        shared = f", shares its cache as {entry.share_cache}" if entry.share_cache else ""
        held = f", held to {named(entry.residency)}" if entry.residency else ""
        stdout.write(f"{name}: weight {shown_weight(entry.weight)}, {_shown_limits(entry.limits)}{shared}{held}\n")
    return 0


def _shown_limits(limits: TenantLimits | None) -> str:
    if limits is None:
        return "default limits"
    given = {
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "concurrency": limits.concurrency,
    }
    return ", ".join(f"{name} {value}" for name, value in given.items() if value is not None) or "no limits"
