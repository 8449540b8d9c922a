"""The gateway's settings: which of them go together."""

from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from services.runtime.config import load
from services.runtime.errors import ConfigError


def loaded(*flags: str) -> GatewayConfig:
    return load(GatewayConfig, flags, prog="gateway", environ={})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], r"neither --model \(TANDEM_MODEL\) nor --models"),
        (["--models=m.toml", "--model=/m"], "the models are one of them"),
        (["--models=m.toml", "--model-name=m"], "the models are one of them"),
        (["--models=m.toml", "--lora=sql=a"], "--models and --lora are both given"),
        (["--model=/m", "--lora=m=a"], "an adapter 'm', which is the name of the model itself"),
        (["--model=/m", "--operator-port=0"], "without --tls-ca"),
        (["--model=/m", "--tls-cert=/c"], "--tls-key"),
        (["--model=/m", "--routing=best"], "--routing is 'best' but must be one of hybrid, "),
        (["--model=/m", "--queue-strategy=lifo"], "--queue-strategy is 'lifo'"),
        (["--model=/m", "--trace-sample=1.1"], "at least 0 and at most 1"),
    ],
)
def test_what_does_not_go_together_is_named(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(*flags)


def test_one_model_or_a_file_of_them_is_enough() -> None:
    assert loaded("--model=/m").model == Path("/m")
    assert loaded("--models=m.toml").models == Path("m.toml")


def test_certificates_prove_the_cluster_where_a_ca_is_given() -> None:
    pair = ["--model=/m", "--tls-cert=/c", "--tls-key=/k"]
    assert loaded("--model=/m").tls is None
    assert loaded(*pair).secrets is not None
    with_ca = loaded(*pair, "--tls-ca=/a", "--operator-port=0")
    assert with_ca.secrets is None
    assert with_ca.tls is not None
    assert with_ca.tls.ca == Path("/a")
