"""What a Redis URL says: one server, or the sentinels that know which server is the primary. Opens no connection."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.connection import parse_url

from services.runtime.addresses import RAW_DELIMITER_RULE, has_raw_delimiter, split_host_port
from services.runtime.config import shown
from services.runtime.errors import ConfigError

SENTINEL_PORT = 26379
SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
CLIENT_OPTIONS: Mapping[str, Any] = {"retry": None, "retry_on_error": [], "driver_info": None}
"""Options of every connection: no retries, and no CLIENT SETINFO, which Redis 7.0 does not know."""
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True)
class Sentinels:
    """The sentinels of a service, and how they and its servers are reached: arguments of redis-py's connections."""

    addresses: tuple[tuple[str, int], ...]
    service: str
    server: Mapping[str, Any]
    sentinel: Mapping[str, Any]
    """Arguments for the sentinels: TLS as for the servers, and the user and password that `sentinel_username` and
    `sentinel_password` give."""
    has_tls: bool


def check_url(url: str) -> str:
    """The URL itself, if it is one by which Redis can be reached. Raises ConfigError, without the password."""
    if has_raw_delimiter(url):
        raise ConfigError(f"the Redis URL is {shown(url)} but {RAW_DELIMITER_RULE}")
    try:
        sentinels = sentinels_of(url)
        arguments = dict(parse_url(url) if sentinels is None else sentinels.server)
        pool = redis.asyncio.ConnectionPool(**arguments)
        pool.make_connection()  # type: ignore[no-untyped-call]
    except TypeError:  # a name behind the question mark that redis-py does not know
        raise ConfigError(f"the Redis URL is {shown(url)} but has a parameter that redis-py does not know") from None
    except (ValueError, redis.RedisError):  # their texts, which may quote a part of the password, are left out
        raise ConfigError(
            f"the Redis URL is {shown(url)} but must begin with redis://, rediss://, unix://, redis+sentinel:// or "
            "rediss+sentinel:// and be well formed"
        ) from None
    for name in _FILES:
        if name in arguments and not Path(arguments[name]).is_file():
            raise ConfigError(f"{name} of the Redis URL is {arguments[name]!r:.200} but must be a file")
    return url


def sentinels_of(url: str) -> Sentinels | None:
    """What a URL of sentinels says; None: it is one of another kind. Raises ValueError.

    redis+sentinel://[user:password@]host1[:26379],host2,…/SERVICE[/DB][?…], the user and the password being those of
    the servers; with rediss+sentinel:// all connections are TLS.
    """
    parts = urlsplit(url)
    if parts.scheme not in SENTINEL_SCHEMES:
        return None
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service or not hosts:
        raise ValueError("the sentinels or the name of the service are missing")
    has_tls = parts.scheme == "rediss+sentinel"
    # What is not about sentinels is redis-py's to read.
    one = f"redis://{credentials}{'@' if credentials else ''}server/{database}?{parts.query}"
    server = dict(parse_url(one))
    del server["host"]
    sentinel = {name: value for name, value in server.items() if name.startswith("ssl_")}
    for name in ("username", "password"):
        if f"sentinel_{name}" in server:
            sentinel[name] = server.pop(f"sentinel_{name}")
    return Sentinels(
        addresses=tuple(_address(host) for host in hosts.split(",")),
        service=unquote(service),
        server=server,
        sentinel=sentinel,
        has_tls=has_tls,
    )


def _address(host: str) -> tuple[str, int]:
    has_port = ":" in host.rpartition("]")[2]
    found = split_host_port(host if has_port else f"{host}:{SENTINEL_PORT}")
    return found.host, found.port
