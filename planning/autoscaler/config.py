"""The settings of `python -m planning.autoscaler`."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from planning.autoscaler.actors import Actor, LocalActor, PrintOnly
from planning.autoscaler.kubernetes import ACCOUNT, KubernetesActor
from planning.autoscaler.policy import AutoscalerSettings
from planning.planner.question import LatencyTargets
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import choice, comma_separated, integer, number, path, redis_url, secret, text, url
from services.runtime.logs import LEVELS
from services.runtime.tls import client_context, pinned_context

PRINT, UP, KUBERNETES = "print", "up", "kubernetes"
_WORKLOAD = text(pattern=r"(statefulsets|deployments)/[a-z0-9.-]{1,253}", rule="statefulsets/NAME or deployments/NAME")


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """When the number of workers changes, and by how much."""

    scale_every: float = option(number(0.5, 3600), default=5.0, help="Seconds between two decisions.")
    scale_start_up: float = option(
        number(0, 86_400), default=120.0, help="Seconds from the order of a worker until it takes requests."
    )
    scale_settle: float = option(
        number(0, 86_400), default=30.0, help="Seconds without need for a worker before it is taken away."
    )
    scale_backlog: float = option(
        number(0.1, 86_400),
        default=20.0,
        help="Seconds, beside those of a start-up, within which more prefill workers are to work off what waits.",
    )
    scale_give_up: float = option(
        number(1, 86_400),
        default=600.0,
        help="Seconds beyond their start-up after which workers that have not come are given up: no more are ordered.",
    )
    scale_headroom: float = option(
        number(1, 10), default=1.1, help="How many times the workers that a load takes there are to be."
    )
    scale_tpot: float | None = option(
        number(1e-6), default=None, help="Seconds per token after the first that batches must keep; else the largest."
    )


@dataclass(frozen=True, kw_only=True)
class AutoscalerConfig(ScalingSettings):
    """Watches gateways, decides how many prefill and decode workers there are to be, and has them started and drained.

    Several copies may run: with the same --redis one of them acts, and another one takes over when it ends.
    """

    gateways: tuple[str, ...] = option(
        comma_separated(url("http", "https")),
        help="Addresses of the gateways' HTTP APIs, or of their --admin-port. An http name stands for all of its "
        "addresses.",
    )
    actor: str = option(
        choice(PRINT, UP, KUBERNETES), default=PRINT, help="What carries decisions out; print: nothing does."
    )
    scaled_model: str | None = option(
        text(), default=None, help="Which model's workers, where several are served; a workload of all without it."
    )
    min_prefill: int = option(integer(0, 4096), default=1, help="The fewest prefill workers.")
    min_decode: int = option(integer(1, 4096), default=1, help="The fewest decode workers.")
    max_workers: int = option(integer(1, 8192), default=16, help="The most workers, of both roles together.")
    drain: float = option(number(0, 86_400), default=600.0, help="Seconds that a worker of `tandem up` gets to drain.")
    api_key: str | None = option(secret(), default=None, help="The key to show, where gateways ask for one.")
    tls_ca: Path | None = option(path(), default=None, help="PEM file of the CA to believe behind https addresses.")
    tls_cert: Path | None = option(path(), default=None, help="PEM file of a certificate to show; needs --tls-key.")
    tls_key: Path | None = option(path(), default=None, help="PEM file of its private key, without a passphrase.")
    gateway_cert: Path | None = option(
        path(), default=None, help="PEM file of the gateway's own certificate, to be known by it whatever its host."
    )
    redis: str | None = option(redis_url(), default=None, help="The cluster's Redis, by which one of several acts.")
    cluster: str = option(text(), default="default", help="The cluster's name in Redis.")
    lease: float = option(
        number(1, 3600), default=15.0, help="Seconds after which another copy acts in place of one that fell silent."
    )
    decisions: Path | None = option(
        path(),
        default=None,
        help="File of decisions with their reasons, one for each copy; `tandem autoscaler replay` reads it.",
    )
    kubernetes: str = option(
        url("http", "https"), default="https://kubernetes.default.svc", help="Address of the Kubernetes API."
    )
    kubernetes_account: Path = option(
        path(), default=ACCOUNT, help="Folder of the service account: token, namespace, ca.crt."
    )
    prefill_workload: str = option(
        _WORKLOAD, default="statefulsets/tandem-prefill", help="What prefill workers are in Kubernetes."
    )
    decode_workload: str = option(
        _WORKLOAD, default="statefulsets/tandem-decode", help="What decode workers are in Kubernetes."
    )
    log_level: str = option(choice(*LEVELS), default="info", help="Least level of the log.")

    def __post_init__(self) -> None:
        if self.min_prefill + self.min_decode > self.max_workers:
            raise ConfigError(
                f"--max-workers is {self.max_workers} but must be at least --min-prefill and --min-decode together"
            )

    @property
    def policy(self) -> AutoscalerSettings:
        """The policy's settings. Only workers of `tandem up` change their role."""
        return AutoscalerSettings(
            start_up_s=self.scale_start_up,
            interval_s=self.scale_every,
            settle_s=self.scale_settle,
            backlog_s=self.scale_backlog,
            min_prefill=self.min_prefill,
            min_decode=self.min_decode,
            max_workers=self.max_workers,
            headroom=self.scale_headroom,
            changes_roles=self.actor == UP,
            give_up_s=self.scale_give_up,
        )

    @property
    def targets(self) -> LatencyTargets:
        """What batches must keep."""
        return LatencyTargets(tpot_s=self.scale_tpot)

    def tls(self) -> ssl.SSLContext:
        """How gateways are known, and what is shown to them. Raises ConfigError."""
        if self.gateway_cert is not None:
            return pinned_context(self.gateway_cert)
        return client_context(self.tls_cert, self.tls_key, self.tls_ca)

    def make_actor(self) -> Actor:
        """Returns what carries decisions out."""
        if self.actor == UP:
            return LocalActor(self.gateways[0], self.scaled_model, self.drain)
        if self.actor == KUBERNETES:
            return KubernetesActor(
                self.kubernetes, self.prefill_workload, self.decode_workload, account=self.kubernetes_account
            )
        return PrintOnly()
