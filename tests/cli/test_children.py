"""The command lines of the processes of a cluster."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from cli.children import Addresses, child_environment, gateway_spec, model_plans, worker_specs
from cli.cores import Machine
from cli.up_settings import DEMO_DRAFT, DEMO_MODEL, UpSettings
from decode_worker.config import DecodeWorkerConfig
from services.runtime.config import load
from services.runtime.errors import ConfigError

ADDRESSES = Addresses(redis_url="unix:///tmp/r.sock", http_port=8123, grpc_port=50123)
MACHINE = Machine(cores=((0,), (1,)))


def test_every_worker_has_a_name_and_the_cluster_s_settings() -> None:
    settings = UpSettings(model=Path("/m"), prefill=2, decode=1, kv_memory=1 << 20, transport="tcp", threads=3)
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {"A": "b"}, MACHINE)
    assert [spec.name for spec in specs] == ["prefill-0", "prefill-1", "decode-0"]
    assert specs[0].command[:4] == (sys.executable, "-P", "-m", "prefill_worker")
    assert specs[2].command[:4] == (sys.executable, "-P", "-m", "decode_worker")
    for spec in specs:
        assert {"--model=/m", "--kv-memory=1048576"} <= set(spec.command)
        assert {"--transport=tcp", "--threads=3", "--host=127.0.0.1", "--port=0"} <= set(spec.command)
        assert not any(flag.startswith("--kv-pages") for flag in spec.command)
        assert spec.environment == {"A": "b", "TANDEM_REDIS": "unix:///tmp/r.sock"}
    assert {"--max-batch=64", "--admission=expected"} <= set(specs[2].command)
    assert not any(flag.startswith("--swap-memory") for flag in specs[2].command)
    assert not any(flag.startswith(("--max-batch", "--admission")) for flag in specs[0].command)


@pytest.mark.parametrize(
    ("given", "prefill", "decode"),
    [
        ({}, 1, 1),
        ({"tensor_parallel": 2}, 2, 2),
        ({"tensor_parallel": 2, "prefill_tensor_parallel": 4}, 4, 2),
        ({"decode_tensor_parallel": 2}, 1, 2),
    ],
)
def test_each_role_may_have_its_own_degree(given: dict[str, int], prefill: int, decode: int) -> None:
    settings = UpSettings(pipeline_parallel=3, **given)
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    degrees = [{flag for flag in spec.command if "-parallel=" in flag} for spec in specs]
    expected = [{f"--tensor-parallel={degree}", "--pipeline-parallel=3"} for degree in (prefill, decode)]
    assert degrees == expected


def test_decode_workers_alone_are_told_how_to_make_room() -> None:
    settings = UpSettings(decode=2, admission="worst_case", swap_memory=0)
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    for spec in specs[1:]:
        assert {"--admission=worst_case", "--swap-memory=0"} <= set(spec.command)
        read = load(DecodeWorkerConfig, spec.command[4:], prog="decode_worker", environ={})
        assert (read.admission, read.swap_memory) == ("worst_case", 0)
    assert not any(flag.startswith(("--admission", "--swap-memory")) for flag in specs[0].command)


def test_decode_workers_alone_are_told_what_to_propose() -> None:
    for settings, draft in (
        (UpSettings(), None),
        (UpSettings(speculative="auto"), DEMO_DRAFT),
        (UpSettings(speculative="auto", model=Path("/m")), None),
        (UpSettings(speculative="draft", model=Path("/m"), draft_model=Path("/d")), Path("/d")),
    ):
        prefill, decode = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
        assert not any(flag.startswith(("--speculative", "--draft")) for flag in prefill.command)
        read = load(DecodeWorkerConfig, decode.command[4:], prog="decode_worker", environ={})
        assert (read.speculative, read.draft_model) == (settings.speculative, draft)
    with pytest.raises(ConfigError, match="--draft-model"):
        UpSettings(speculative="draft", model=Path("/m"))


def test_workers_on_one_gpu_share_its_memory_and_others_have_one_of_their_own() -> None:
    settings = UpSettings(decode=2)
    for gpus, firsts, parts in (((), [None] * 3, [1] * 3), (("0", "1"), ["0", "0", "1"], [0.5, 0.5, 1])):
        specs = worker_specs(settings, model_plans(settings), ADDRESSES, {"A": "b"}, MACHINE, gpus)
        visible = [spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in specs]
        assert [None if one is None else one.split(",")[0] for one in visible] == firsts
        assert all(spec.environment["A"] == "b" for spec in specs)
        read = [load(DecodeWorkerConfig, spec.command[4:], prog="worker", environ={}) for spec in specs[1:]]
        assert [one.engine_settings()["gpu_memory_share"] for one in read] == parts[1:]


def test_workers_are_told_where_models_run() -> None:
    settings = UpSettings(device="cpu")
    assert all(
        "--device=cpu" in spec.command for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    )


def test_workers_stay_on_loopback_when_the_gateway_is_opened() -> None:
    settings = UpSettings(host="0.0.0.0")
    assert "--http-host=0.0.0.0" in gateway_spec(settings, ADDRESSES, {}).command
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    assert all("--host=127.0.0.1" in spec.command for spec in specs)


def test_all_processes_show_one_certificate_where_there_is_a_ca() -> None:
    pair = {"tls_cert": Path("/c"), "tls_key": Path("/k")}
    for ca, flags in (
        (None, {"--tls-cert=/c", "--tls-key=/k"}),
        (Path("/a"), {"--tls-cert=/c", "--tls-key=/k", "--tls-ca=/a"}),
    ):
        settings = UpSettings(**pair, tls_ca=ca)
        gateway = gateway_spec(settings, ADDRESSES, {})
        assert {flag for flag in gateway.command if flag.startswith("--tls")} == flags
        for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE):
            found = {flag for flag in spec.command if flag.startswith("--tls")}
            assert found == (set() if ca is None else flags)


def test_what_is_secret_is_on_no_command_line(tmp_path: Path) -> None:
    redis, otlp, secret = "redis://:s3cretPW@10.0.0.1", "https://me:t0ken@10.0.0.2", "c" * 64
    settings = UpSettings(redis=redis, otlp=otlp, cluster_secret=secret)
    addresses = dataclasses.replace(ADDRESSES, redis_url=redis)
    specs = [
        gateway_spec(settings, addresses, {}),
        *worker_specs(settings, model_plans(settings), addresses, {}, MACHINE),
    ]
    for spec in specs:
        assert not any(part in " ".join(spec.command) for part in ("s3cretPW", "t0ken", secret))
        given = {"TANDEM_REDIS": redis, "TANDEM_OTLP": otlp, "TANDEM_CLUSTER_SECRET": secret}
        assert spec.environment == given
    file = tmp_path / "secret"
    file.write_text(secret)
    settings = UpSettings(cluster_secret_file=file)
    for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE):
        assert f"--cluster-secret-file={file}" in spec.command
    given = {"TANDEM_CLUSTER_SECRET": secret, "TANDEM_REDIS": redis, "TANDEM_CLUSTER_SECRET_FILE": str(file)}
    assert child_environment(given, parent_pid=1).keys() & given.keys() == set()


def test_tls_settings_of_the_environment_are_not_inherited() -> None:
    given = {"TANDEM_TLS_CERT": "/c", "TANDEM_TLS_KEY": "/k", "TANDEM_TLS_CA": "/a", "TANDEM_OPERATOR_PORT": "0"}
    assert child_environment(given, parent_pid=1).keys() & given.keys() == {"TANDEM_OPERATOR_PORT"}


def test_the_gateway_gets_real_ports_and_the_model_s_name() -> None:
    command = gateway_spec(UpSettings(http_port=0, grpc_port=0, seed=7), ADDRESSES, {}).command
    assert {"--http-port=8123", "--grpc-port=50123", "--model-name=tandem-demo", "--seed=7"} <= set(command)
    assert {"--min-prefill=1", "--min-decode=1", "--drain-s=10.0"} <= set(command)
    assert "--min-prefill=0" in gateway_spec(UpSettings(prefill=0), ADDRESSES, {}).command
    named = gateway_spec(UpSettings(model=Path("/models/My Llama")), ADDRESSES, {}).command
    assert "--model-name=My-Llama" in named


def test_the_gateway_is_told_of_keys_by_file_and_digest() -> None:
    addresses = dataclasses.replace(ADDRESSES, starter_key_digest="a" * 64)
    command = gateway_spec(UpSettings(api_keys=Path("/k.toml"), admin_port=9000), addresses, {}).command
    assert {"--api-keys=/k.toml", f"--starter-key-digest={'a' * 64}", "--admin-port=9000"} <= set(command)
    plain = " ".join(gateway_spec(UpSettings(), ADDRESSES, {}).command)
    assert not re.search("--(api-keys|starter-key-digest|admin|allowed-hosts|cors-origins)", plain)


def test_the_gateway_is_told_what_browsers_and_operators_may() -> None:
    settings = UpSettings(
        admin_key_digest="b" * 64, admin_socket=Path("/a.sock"), allowed_hosts="a.example", cors_origins="https://b"
    )
    given = {f"--admin-key-digest={'b' * 64}", "--admin-socket=/a.sock", "--allowed-hosts=a.example"}
    assert given | {"--cors-origins=https://b"} <= set(gateway_spec(settings, ADDRESSES, {}).command)


def test_children_inherit_what_up_does_not_decide() -> None:
    environ = {"PATH": "/bin", "TANDEM_HTTP_PORT": "1", "TANDEM_KV_MEMORY": "1GiB", "TANDEM_ROUTING": "round_robin"}
    environment = child_environment(environ, parent_pid=42)
    assert environment["TANDEM_DIE_WITH_PARENT"] == "42"
    assert environment["TANDEM_ROUTING"] == "round_robin"
    assert "TANDEM_HTTP_PORT" not in environment
    assert "TANDEM_KV_MEMORY" not in environment
    assert environment["PATH"] == "/bin"


def test_workers_keep_to_cores_of_their_own_with_a_thread_for_each() -> None:
    machine = Machine(cores=((0, 4), (1, 5), (2, 6), (3, 7)))
    settings = UpSettings()
    prefill, decode = worker_specs(settings, model_plans(settings), ADDRESSES, {}, machine)
    assert {"--threads=2", "--cores=0,1,4,5"} <= set(prefill.command)
    assert {"--threads=2", "--cores=2,3,6,7"} <= set(decode.command)
    read = load(DecodeWorkerConfig, decode.command[4:], prog="decode_worker", environ={})
    assert (read.cores, read.engine_settings()["threads"]) == ((2, 3, 6, 7), 2)


@pytest.mark.parametrize("settings", [UpSettings(pin=False), UpSettings(prefill=2), UpSettings(threads=2)])
def test_nobody_keeps_to_cores_when_told_or_too_many(settings: UpSettings) -> None:
    for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE):
        assert not any(flag.startswith("--cores") for flag in spec.command)
        assert f"--threads={settings.threads or 1}" in spec.command


def test_each_model_of_the_file_has_its_own_workers(tmp_path: Path) -> None:
    for name in ("big", "small"):
        (tmp_path / name).mkdir()
    models = tmp_path / "models.toml"
    models.write_text(
        '[[model]]\nname = "Big/1.5"\npath = "big"\ndecode = 2\nfallback = ["big-1-5"]\n'
        '[[model]]\nname = "big-1-5"\npath = "small"\nprefill = 0\n'
    )
    settings = UpSettings(models=models, prefill=1, decode=1)
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    assert [spec.name for spec in specs] == [
        "prefill-big-1-5-0",
        "decode-big-1-5-0",
        "decode-big-1-5-1",
        "decode-big-1-5-2-0",
    ]
    for spec in specs[:3]:
        assert {f"--model={tmp_path / 'big'}", "--model-name=Big/1.5"} <= set(spec.command)
    assert {f"--model={tmp_path / 'small'}", "--model-name=big-1-5"} <= set(specs[3].command)
    assert "--threads=1" in specs[0].command
    command = gateway_spec(settings, ADDRESSES, {}).command
    assert f"--models={models}" in command
    assert not any(flag.startswith(("--model=", "--model-name=")) for flag in command)


def test_a_bad_models_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml does not exist"):
        model_plans(UpSettings(models=tmp_path / "missing.toml"))


def test_settings_come_from_flags_and_variables() -> None:
    environ = {"TANDEM_PREFILL": "2", "TANDEM_DECODE": "3", "TANDEM_ADMISSION": "worst_case"}
    settings = load(UpSettings, ["--decode", "1", "--kv-memory", "2GiB"], prog="tandem up", environ=environ)
    assert (settings.admission, settings.swap_memory) == ("worst_case", None)
    assert (settings.prefill, settings.decode, settings.kv_memory) == (2, 1, 2 << 30)
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
        (["--seed", "-1"], "--seed"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_bad_setting_is_named(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(UpSettings, flags, prog="tandem up", environ={})


def test_the_gateway_goes_first_and_workers_give_nobody_way() -> None:
    settings = UpSettings(prefill=1, decode=1)
    assert "--nice=-10" in gateway_spec(settings, ADDRESSES, {}).command
    for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE):
        assert not any(flag.startswith("--nice") for flag in spec.command)
