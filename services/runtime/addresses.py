"""Whether anybody can dial the address that a worker registers, as far as its flags and its Redis tell. Pure."""

import ipaddress
from urllib.parse import urlsplit

from services.runtime.config import is_loopback
from services.runtime.errors import ConfigError


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
    """Whether this is an address to listen on, which nobody can connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_on_this_machine(url: str) -> bool:
    """Whether a Redis URL leads to this machine: a Unix socket, or a loopback address."""
    parts = urlsplit(url)
    return parts.scheme == "unix" or is_loopback(parts.hostname or "localhost")
