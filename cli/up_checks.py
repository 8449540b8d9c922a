"""What `tandem up` and `join` find out before they start anything: models, certificates, addresses that are free."""

import errno
import random
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from cli.children import SOURCE_ROOT, WORKER_HOST, ModelPlan
from cli.up_settings import UpSettings
from gateway.models.model_files import read_model_files
from services.engine.weights.config import load_config
from services.hub.models import local_model
from services.runtime import extras
from services.runtime.addresses import is_loopback, join_host_port
from services.runtime.engines import VLLM
from services.runtime.errors import TandemError
from services.runtime.tls import Identity
from worker.vllm.installed import interpreter_with_vllm

AUTOMATIC_PORTS = range(10_000, 20_000)
"""Ports that replace port 0. By default, Linux does not use them for outgoing connections, which could take one."""
MAX_TRIES = 100


class PortTaken(TandemError):
    """An API's address cannot be used."""


def with_local_draft(services: Mapping[str, str], draft: Path | None) -> Mapping[str, str]:
    """Returns the settings with the draft model's folder, so that no two workers bring it here. Raises ModelError."""
    return services if draft is None else {**services, "draft_model": str(local_model(draft))}


def checked(plan: ModelPlan) -> ModelPlan:
    """Returns the plan with its workers' interpreter. Raises ModelError or ConfigError as they would."""
    read_model_files(plan.path)
    if plan.engine == VLLM:
        return replace(plan, python=interpreter_with_vllm(SOURCE_ROOT))
    extras.check("worker")
    sharers = {name: local_model(path) for name, path in plan.sharers.items()}
    for path in (plan.path, *sharers.values()):
        read_model_files(path)
        load_config(path)
    return replace(plan, sharers=sharers)


def check_certificate(settings: UpSettings, roles: Iterable[str]) -> None:
    """Refuses what children of these roles would refuse. Raises ConfigError that names file and rule."""
    if settings.gateway.tls is not None:
        Identity(settings.gateway.tls, roles=roles, host="" if settings.gateway.tls_ca is None else WORKER_HOST)


def open_address(settings: UpSettings) -> str | None:
    """What it means that both APIs can be reached from elsewhere without a key; None where that is not so."""
    if settings.gateway.api_keys is not None or is_loopback(settings.host):
        return None
    words = (
        "" if settings.gateway.tls is not None else ", and nobody on the way is kept from reading along (--tls-cert)"
    )
    return (
        f"warning: --host {settings.host} lets everybody who reaches this machine use the models and see the dashboard "
        f"with all requests: no key is asked for (--api-keys){words}"
    )


def claim_port(host: str, port: int, *, flag: str, taken: int | None = None) -> int:
    """Returns the port if it is free, or for port 0 a free one of AUTOMATIC_PORTS. Raises PortTaken.

    The port does not stay open. If another program takes it before the gateway starts, the gateway reports that.
    """
    tried = [port] if port else random.sample(AUTOMATIC_PORTS, MAX_TRIES)
    error: OSError | UnicodeError | None = None
    for candidate in tried:
        if not port and candidate == taken:
            continue
        error = _bind_error(host, candidate)
        if error is None:
            return candidate
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            reason = f"cannot be used ({getattr(error, 'strerror', None) or error}); check --host and"
            raise PortTaken(f"{join_host_port(host, port)} {reason} {flag}") from error
    raise PortTaken(
        f"{join_host_port(host, port)} is taken by another program; give another port with {flag}"
    ) from error


def _bind_error(host: str, port: int) -> OSError | UnicodeError | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        return error
    return None
