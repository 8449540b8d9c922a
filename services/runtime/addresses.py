"""Addresses: their text, what reaches them, and whether the one that a worker registers can be dialled. Pure."""

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from services.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HostPort:
    """Where to listen or to connect."""

    host: str
    port: int

    def __str__(self) -> str:
        """host:port, with an IPv6 host in brackets."""
        return join_host_port(self.host, self.port)


def split_host_port(value: str) -> HostPort:
    """Reads host:port, an IPv6 host in brackets. Raises ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]/]+)):(\d{1,5})", value)
    if match is None or int(match[3]) > 65535:
        raise ValueError("this is not host:port with a port from 0 to 65535")
    return HostPort(match[1] or match[2], int(match[3]))


def join_host_port(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ipv6(host: str) -> bool:
    """Returns whether this is an IPv6 address; it may end in a %zone."""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches an address. A name other than localhost counts as reached by others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_dialled(host: str, advertise_host: str | None, *, redis: str | None) -> None:
    """Refuses an address that leads its callers to themselves; without `redis`, nobody learns it and any will do.

    Raises ConfigError with the flag to change.
    """
    if redis is None:
        return
    flag, dialled = ("--host", host) if advertise_host is None else ("--advertise-host", advertise_host)
    if is_every_interface(dialled):
        raise ConfigError(
            f"{flag} is {dialled}, which others cannot connect to: give the address of this machine in --advertise-host"
        )
    if advertise_host is None and is_loopback(host) and not is_on_this_machine(redis):
        raise ConfigError(
            f"--host is {host}, which only this machine reaches, but --redis is on another one: give the address that "
            f"gateways and other workers reach in --host or --advertise-host, or --advertise-host {host} if all of "
            "them run here"
        )


def is_every_interface(host: str) -> bool:
    """Returns whether this is an address to listen on, which nobody can connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


RAW_DELIMITER_RULE = "must have %2F, %3F or %23 instead of /, ? or # in its user and password"


def has_raw_delimiter(url: str) -> bool:
    """Returns whether the user or password of a Redis URL contains a /, ? or # that is not percent-encoded.

    Such a character ends the host for every parser, so that the rest of the password becomes a path.
    """
    found = re.fullmatch(r"[^:]*://([^/?#@]+)([/?#].*)", url, re.DOTALL)
    if found is None or "@" not in found[2]:
        return False
    _, colon, port = found[1].rpartition("]")[2].rpartition(":")
    # An @ in a parameter, as in ?password=a@b, is allowed.
    has_parameter = re.search(r"\?[a-z_]+=.*@", found[2]) is not None
    return not has_parameter or bool(colon and not port.isdecimal())


def is_on_this_machine(url: str) -> bool:
    """Returns whether a Redis URL leads to this machine: a Unix socket, or a loopback address."""
    parts = urlsplit(url)
    return parts.scheme == "unix" or is_loopback(parts.hostname or "localhost")


def connectable(host: str) -> str:
    """Returns an address at which a server that listens on `host` answers from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - what a name means, not a bind
