"""`tandem keys`: makes API keys and checks the file that they are entered in. Talks to no server and writes no file."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gateway.api_keys import ApiKey, digest_of_key, new_key, read_keys, toml_entry
from gateway.validation import DEFAULT_SERVICE_CLASS, MAX_PRIORITY, SERVICE_CLASSES
from services.runtime.config import choice, comma_separated, flag, integer, load, number, option, path, text
from services.runtime.errors import ConfigError

DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class NewKeySettings:
    """Makes an API key. The key goes to standard error, once; its entry for the file goes to standard output."""

    tenant: str = option(
        text(pattern=r"[A-Za-z0-9_.:-]{1,64}", rule="1 to 64 characters of [A-Za-z0-9_.:-]"),
        help="Whom requests with this key are accounted to.",
    )
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
    service_class: str = option(
        choice(*SERVICE_CLASSES), default=DEFAULT_SERVICE_CLASS, help="Most urgent class of its requests."
    )
    priority: int = option(
        integer(-MAX_PRIORITY, MAX_PRIORITY), default=0, help="Highest priority of its requests within their class."
    )
    admin: bool = option(flag(), default=False, help="It may also see the cluster, drain workers and act for tenants.")
    days: float | None = option(
        number(0.001, 36_500), default=None, help="After so many days it is refused; never if not given."
    )


@dataclass(frozen=True, kw_only=True)
class CheckKeysSettings:
    """Checks a file of API keys. Exit code 2 if a gateway would refuse it."""

    file: Path = option(path(), help="The file.")


def run(argv: Sequence[str], stdout: TextIO, stderr: TextIO) -> int:
    """Runs one of the commands; returns the exit code. Raises ConfigError."""
    if argv[:1] == ["new"]:
        return new(load(NewKeySettings, argv[1:], prog="tandem keys new"), stdout, stderr, now_s=time.time())
    if argv[:1] == ["check"]:
        return check(load(CheckKeysSettings, argv[1:], prog="tandem keys check"), stdout)
    raise ConfigError("tandem keys needs new or check after it; each explains itself with --help")


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
        is_admin=settings.admin,
        expires_s=None if settings.days is None else float(int(now_s + settings.days * DAY_S)),
    )
    stderr.write(f"the key, shown only now: {key}\n")
    stderr.flush()
    stdout.write(toml_entry(entry))
    return 0


def check(settings: CheckKeysSettings, stdout: TextIO) -> int:
    """Says what is in the file."""
    keys = read_keys(settings.file)
    tenants = {key.tenant for key in keys.keys.values()}
    stdout.write(f"{len(keys.keys)} keys of {len(tenants)} tenants, {len(keys.limits)} with limits of their own\n")
    return 0
