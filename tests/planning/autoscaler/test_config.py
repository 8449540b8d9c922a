"""Settings of the autoscaler and what they make."""

from pathlib import Path

import pytest

from planning.autoscaler.actors import LocalActor, PrintOnly
from planning.autoscaler.config import AutoscalerConfig
from planning.autoscaler.kubernetes import KubernetesActor
from services.runtime.config import load
from services.runtime.errors import ConfigError

GATEWAY = ["--gateways", "http://127.0.0.1:8000"]


def config(*words: str) -> AutoscalerConfig:
    return load(AutoscalerConfig, [*GATEWAY, *words], prog="test", environ={})


def test_each_actor_can_be_had() -> None:
    assert isinstance(config().make_actor(), PrintOnly)
    assert config("--actor", "up").make_actor() == LocalActor("http://127.0.0.1:8000", None, 600.0)
    made = config("--actor", "kubernetes", "--decode-workload", "deployments/d").make_actor()
    assert isinstance(made, KubernetesActor)
    assert (made.decode, made.account) == ("deployments/d", Path("/var/run/secrets/kubernetes.io/serviceaccount"))


def test_limits_must_fit() -> None:
    with pytest.raises(ConfigError, match="--max-workers is 3 but must be at least"):
        config("--min-prefill", "2", "--min-decode", "2", "--max-workers", "3")
    policy = config("--max-workers", "4", "--scale-every", "2", "--scale-tpot", "0.05").policy
    assert (policy.max_workers, policy.interval_s, policy.changes_roles) == (4, 2.0, False)
    assert config("--actor", "up").policy.changes_roles
    assert config("--scale-tpot", "0.05").targets.tpot_s == 0.05
    with pytest.raises(ConfigError, match="statefulsets/NAME"):
        config("--decode-workload", "../secrets/x")
