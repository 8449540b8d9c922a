"""The settings of `tandem up`: its own, and those that it forwards to the programs that it starts."""

import pytest

from cli.up_settings import DECIDED, DEMO_DRAFT, DEMO_MODEL, UpSettings
from decode_worker.config import DecodeWorkerConfig
from gateway.config import GatewayConfig
from prefill_worker.config import PrefillWorkerConfig
from services.runtime.config import all_settings_of, load, settings_of
from services.runtime.errors import ConfigError


def test_settings_come_from_flags_and_variables() -> None:
    environ = {"TANDEM_PREFILL": "2", "TANDEM_DECODE": "3", "TANDEM_ADMISSION": "worst_case"}
    settings = load(UpSettings, ["--decode", "1", "--kv-memory", "2GiB"], prog="tandem up", environ=environ)
    assert settings.services == {"admission": "worst_case", "kv_memory": "2GiB"}
    worker = settings.decode_worker
    assert (worker.admission, worker.swap_memory, worker.kv_memory) == ("worst_case", None, 2 << 30)
    assert (settings.prefill, settings.decode) == (2, 1)
    assert settings.model == DEMO_MODEL


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--decode", "0"], "--decode"),
        (["--prefill", "-1"], "--prefill"),
        (["--http-port", "65536"], "--http-port"),
        (["--page-size", "0"], "--page-size"),
        (["--dtype", "int8"], "--dtype"),
        (["--transport", "carrier-pigeon"], "--transport"),
        (["--kv-memory", "much"], "--kv-memory"),
        (["--admission", "hope"], "--admission"),
        (["--swap-memory", "-1"], "--swap-memory"),
        (["--kv-pages", "8", "--kv-memory", "1GiB"], "--kv-pages"),
        (["--http-port", "9000", "--grpc-port", "9000"], "--grpc-port"),
        (["--redis", "http://x"], "--redis"),
        (["--models", "m.toml", "--model", "/m"], "--models and --model"),
        (["--models", "m.toml", "--model-name", "m"], "--models and --model"),
        (["--models", "m.toml", "--lora", "sql=a", "--engine", "vllm"], "--models and --lora"),
        (["--lora", "sql=a"], "adapters sql, and its engine is native"),
        (["--seed", "-1"], "--seed"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_bad_setting_is_named(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(UpSettings, flags, prog="tandem up", environ={})


def up(*flags: str) -> UpSettings:
    return load(UpSettings, flags, prog="tandem up", environ={})


def test_the_services_settings_are_read_with_the_services_defaults() -> None:
    settings = up("--seed=7", "--admission=worst_case")
    assert (settings.gateway.seed, settings.gateway.http_port, settings.gateway.routing) == (7, 8000, "hybrid")
    assert (settings.decode_worker.admission, settings.decode_worker.max_batch) == ("worst_case", 64)


@pytest.mark.parametrize(
    ("flags", "role", "name", "text"),
    [
        (["--tls-cert=/c", "--tls-key=/k"], "decode", "tls_cert", None),
        (["--tls-cert=/c", "--tls-key=/k", "--tls-ca=/a"], "decode", "tls_cert", "/c"),
        (["--tensor-parallel=2"], "prefill", "tensor_parallel", "2"),
        (["--tensor-parallel=2", "--prefill-tensor-parallel=4"], "prefill", "tensor_parallel", "4"),
        (["--tensor-parallel=2", "--prefill-tensor-parallel=4"], "decode", "tensor_parallel", "2"),
        (["--speculative=draft"], "decode", "draft_model", str(DEMO_DRAFT)),
        (["--speculative=draft", "--draft-model=/d"], "decode", "draft_model", "/d"),
        (["--speculative=ngram"], "decode", "draft_model", None),
        (["--speculative=auto", "--model=/m"], "decode", "draft_model", None),
    ],
)
def test_what_workers_are_given(flags: list[str], role: str, name: str, text: str | None) -> None:
    assert up(*flags).worker_texts(role).get(name) == text


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "tandem-demo"),
        (["--model=/models/My Llama"], "My-Llama"),
        (["--model=/"], "model"),
        (["--model-name=x"], "x"),
    ],
)
def test_the_name_that_clients_use(flags: list[str], name: str) -> None:
    assert up(*flags).served_name == name


def test_every_setting_of_a_service_can_be_given_or_is_decided() -> None:
    known = {setting.name for setting in all_settings_of(UpSettings)} | DECIDED
    for config in (GatewayConfig, PrefillWorkerConfig, DecodeWorkerConfig):
        assert {setting.name for setting in settings_of(config)} <= known
