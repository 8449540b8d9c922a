"""The number of pods of StatefulSets or Deployments, by their `scale` subresource: one call each, no client library."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from planning.autoscaler.actors import TIMEOUT_S, ActorFailed, Sizes
from services.cluster.leadership import Lease
from services.runtime.api_client import ApiRefused, ApiUnreachable, get_json, patch_json
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a service account's token, namespace and the CA of its API server."""


@dataclass(frozen=True, slots=True)
class KubernetesActor:
    """Scales the objects `prefill` and `decode`, such as statefulsets/tandem-prefill, in the pod's own namespace.

    The token is read anew for each call, as Kubernetes replaces it. A change of somebody else between reading a size
    and setting it is not overwritten: the order fails, and the next decision sees it.
    """

    url: str
    prefill: str
    decode: str
    account: Path = ACCOUNT
    clock: Clock = SYSTEM_CLOCK
    _versions: dict[str, tuple[int, str]] = field(default_factory=dict)

    def sizes(self, ready: Sizes) -> Sizes:
        """Returns the replicas that both objects are to have."""
        del ready  # Kubernetes knows better
        return Sizes(self._replicas(self.prefill), self._replicas(self.decode))

    def resize(self, sizes: Sizes, lease: Lease | None = None) -> None:
        """Sets the replicas of both objects, as far as they differ from what was read last.

        What another copy has changed since then is not overwritten, as nothing of anybody else is.
        """
        for name, replicas in ((self.prefill, sizes.prefill), (self.decode, sizes.decode)):
            if name not in self._versions:
                self._replicas(name)
            before, version = self._versions[name]
            if before == replicas:
                continue
            del self._versions[name]
            if lease is not None and lease.until_s <= self.clock.monotonic():
                raise ActorFailed(f"{name} is not scaled to {replicas}: the lease has ended, and another copy may act")
            patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
            path, token, tls = self._path(name), self._read("token"), self._tls()
            try:
                patch_json(self.url, path, body=patch, timeout_s=TIMEOUT_S, api_key=token, tls=tls)
            except (ApiUnreachable, ApiRefused, ConfigError) as error:
                raise ActorFailed(f"{name} cannot be scaled to {replicas}: {error.message}") from error

    def _replicas(self, name: str) -> int:
        path, token, tls = self._path(name), self._read("token"), self._tls()
        try:
            told = get_json(self.url, path, timeout_s=TIMEOUT_S, api_key=token, tls=tls)
            # Kubernetes leaves a number out that is 0.
            replicas, version = int(told["spec"].get("replicas", 0)), str(told["metadata"]["resourceVersion"])
        except (ApiUnreachable, ApiRefused, ConfigError) as error:
            raise ActorFailed(f"the scale of {name} cannot be read: {error.message}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ActorFailed(f"the scale of {name} cannot be read: the answer is not that of Kubernetes") from error
        self._versions[name] = replicas, version
        return replicas

    def _path(self, name: str) -> str:
        return f"/apis/apps/v1/namespaces/{self._read('namespace')}/{name}/scale"

    def _tls(self) -> ssl.SSLContext | None:
        if not self.url.startswith("https:"):
            return None
        try:
            return ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise ActorFailed(f"{self.account / 'ca.crt'} cannot be read ({error})") from error

    def _read(self, name: str) -> str:
        file = self.account / name
        try:
            return file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ActorFailed(f"{file} cannot be read ({error}); is this a pod with a service account?") from error
