"""The command lines of the processes of a cluster."""

import dataclasses
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.children import (
    Addresses,
    ModelPlan,
    child_environment,
    first_role,
    gateway_spec,
    model_plans,
    worker_specs,
)
from cli.cores import Machine
from cli.up_settings import DEMO_DRAFT, UpSettings
from dual_worker.config import DualWorkerConfig
from gateway.config import GatewayConfig
from services.runtime.config import load
from services.runtime.errors import ConfigError


def up(*flags: str) -> UpSettings:
    """The settings of `tandem up` with these flags."""
    return load(UpSettings, flags, prog="tandem up", environ={})


ADDRESSES = Addresses(redis_url="unix:///tmp/r.sock", http_port=8123, grpc_port=50123)
MACHINE = Machine(cores=((0,), (1,)))


def test_every_worker_has_a_name_and_the_cluster_s_settings() -> None:
    settings = up("--model=/m", "--prefill=2", "--kv-memory=1MiB", "--transport=tcp", "--threads=3")
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {"A": "b"}, MACHINE)
    assert [spec.name for spec in specs] == ["prefill-0", "prefill-1", "decode-0"]
    for spec in specs:
        assert spec.command[:4] == (sys.executable, "-P", "-m", "dual_worker")
        assert f"--role={spec.name.partition('-')[0]}" in spec.command
        assert {"--model=/m", "--kv-memory=1MiB"} <= set(spec.command)
        assert {"--transport=tcp", "--threads=3", "--host=127.0.0.1", "--port=0"} <= set(spec.command)
        assert not any(flag.startswith("--kv-pages") for flag in spec.command)
        assert spec.environment == {"A": "b", "TANDEM_REDIS": "unix:///tmp/r.sock"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [((), [None] * 3), (("--metrics-port=0",), [0] * 3), (("--metrics-port=9100",), [9100, 9101, 9102])],
)
def test_no_two_workers_serve_metrics_on_one_port(given: tuple[str, ...], expected: list[int | None]) -> None:
    settings = up("--prefill=2", *given)
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    ports = [
        next((int(flag.partition("=")[2]) for flag in spec.command if flag.startswith("--metrics-port=")), None)
        for spec in specs
    ]
    assert ports == expected


def test_each_program_gets_the_settings_that_it_has_and_that_are_given() -> None:
    given = {
        "gateway": {"--routing=sticky", "--max-queued-requests=9", "--no-reflection"},
        "prefill-0": {"--tensor-parallel=2"},
        "decode-0": set[str](),
    }
    of_workers = {"--step-timeout=9", "--no-share-weights", "--max-waiting=5", "--max-batch=7", "--speculative-depth=3"}
    of_all = {"--region=eu", "--log-level=debug"}
    settings = up("--prefill-tensor-parallel=2", *of_all, *of_workers, *given["gateway"])
    specs = [
        gateway_spec(settings, ADDRESSES, {}),
        *worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE),
    ]
    everything = of_all.union(of_workers, *given.values())
    for spec in specs:
        expected = given[spec.name] | of_all | (set() if spec.name == "gateway" else of_workers)
        assert set(spec.command) & everything == expected
        config = GatewayConfig if spec.name == "gateway" else DualWorkerConfig
        read = load(config, spec.command[4:], prog=spec.name, environ=spec.environment)
        assert (read.region, read.log_level) == ("eu", "debug")


@pytest.mark.parametrize(
    ("given", "prefill", "decode"),
    [
        ([], (1, 3), (1, 3)),
        (["--tensor-parallel=2"], (2, 3), (2, 3)),
        (["--tensor-parallel=2", "--prefill-tensor-parallel=4"], (4, 3), (2, 3)),
        (["--decode-tensor-parallel=2"], (1, 3), (2, 3)),
        (["--prefill-pipeline-parallel=2"], (1, 2), (1, 3)),
        (["--prefill-pipeline-parallel=1", "--decode-pipeline-parallel=4"], (1, 1), (1, 4)),
    ],
)
def test_each_role_may_have_its_own_degree(given: list[str], prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    settings = up("--pipeline-parallel=3", *given)
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    read = [load(DualWorkerConfig, spec.command[4:], prog="worker", environ={}) for spec in specs]
    assert [(one.tensor_parallel, one.pipeline_parallel) for one in read] == [prefill, decode]


def test_workers_of_either_role_are_told_how_a_decode_worker_makes_room() -> None:
    settings = up("--decode=2", "--admission=worst_case", "--swap-memory=0")
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    for spec in specs:
        assert {"--admission=worst_case", "--swap-memory=0"} <= set(spec.command)
        read = load(DualWorkerConfig, spec.command[4:], prog="decode_worker", environ={})
        assert (read.admission, read.swap_memory) == ("worst_case", 0)


def test_workers_of_either_role_are_told_what_a_decode_worker_proposes() -> None:
    for settings, draft in (
        (up(), None),
        (up("--speculative=auto"), DEMO_DRAFT),
        (up("--speculative=auto", "--model=/m"), None),
        (up("--speculative=draft", "--model=/m", "--draft-model=/d"), Path("/d")),
    ):
        for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE):
            read = load(DualWorkerConfig, spec.command[4:], prog="worker", environ={})
            assert (read.speculative, read.draft_model) == (settings.services.get("speculative", "off"), draft)
    with pytest.raises(ConfigError, match="--draft-model"):
        up("--speculative=draft", "--model=/m")


def test_workers_on_one_gpu_share_its_memory_and_others_have_one_of_their_own() -> None:
    settings = up("--decode=2")
    for gpus, firsts, parts in (((), [None] * 3, [1] * 3), (("0", "1"), ["0", "0", "1"], [0.5, 0.5, 1])):
        specs = worker_specs(settings, model_plans(settings), ADDRESSES, {"A": "b"}, MACHINE, gpus)
        visible = [spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in specs]
        assert [None if one is None else one.split(",")[0] for one in visible] == firsts
        assert all(spec.environment["A"] == "b" for spec in specs)
        read = [load(DualWorkerConfig, spec.command[4:], prog="worker", environ={}) for spec in specs[1:]]
        assert [one.engine_settings()["gpu_memory_share"] for one in read] == parts[1:]


def test_workers_are_told_where_models_run() -> None:
    settings = up("--device=cpu")
    assert all(
        "--device=cpu" in spec.command for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    )


def test_workers_stay_on_loopback_when_the_gateway_is_opened() -> None:
    settings = up("--host=0.0.0.0")
    assert "--http-host=0.0.0.0" in gateway_spec(settings, ADDRESSES, {}).command
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    assert all("--host=127.0.0.1" in spec.command for spec in specs)


def test_all_processes_show_one_certificate_where_there_is_a_ca() -> None:
    for has_ca, flags in (
        (False, {"--tls-cert=/c", "--tls-key=/k"}),
        (True, {"--tls-cert=/c", "--tls-key=/k", "--tls-ca=/a"}),
    ):
        settings = up(*flags)
        gateway = gateway_spec(settings, ADDRESSES, {})
        assert {flag for flag in gateway.command if flag.startswith("--tls")} == flags
        for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE):
            found = {flag for flag in spec.command if flag.startswith("--tls")}
            assert found == (flags if has_ca else set())


def test_what_is_secret_is_on_no_command_line(tmp_path: Path) -> None:
    redis, otlp, secret = "redis://:s3cretPW@10.0.0.1", "https://me:t0ken@10.0.0.2", "c" * 64
    secrets = {"TANDEM_REDIS": redis, "TANDEM_OTLP": otlp, "TANDEM_CLUSTER_SECRET": secret}
    settings = load(UpSettings, [], prog="tandem up", environ=secrets)
    addresses = dataclasses.replace(ADDRESSES, redis_url=redis)
    specs = [
        gateway_spec(settings, addresses, {}),
        *worker_specs(settings, model_plans(settings), addresses, {}, MACHINE),
    ]
    for spec in specs:
        assert not any(part in " ".join(spec.command) for part in ("s3cretPW", "t0ken", secret))
        assert spec.environment == secrets
    assert not any(part in repr(settings) for part in ("s3cretPW", "t0ken", secret))
    file = tmp_path / "secret"
    file.write_text(secret)
    settings = up(f"--cluster-secret-file={file}")
    for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE):
        assert f"--cluster-secret-file={file}" in spec.command
    given = {"TANDEM_CLUSTER_SECRET": secret, "TANDEM_REDIS": redis, "TANDEM_CLUSTER_SECRET_FILE": str(file)}
    assert child_environment(given, parent_pid=1).keys() & given.keys() == set()


def test_settings_of_the_environment_are_passed_on_as_flags_and_not_inherited() -> None:
    given = {"TANDEM_TLS_CERT": "/c", "TANDEM_TLS_KEY": "/k", "TANDEM_TLS_CA": "/a", "TANDEM_OPERATOR_PORT": "0"}
    assert child_environment(given, parent_pid=1).keys() & given.keys() == set()
    settings = load(UpSettings, [], prog="tandem up", environ=given)
    assert {"--tls-ca=/a", "--operator-port=0"} <= set(gateway_spec(settings, ADDRESSES, {}).command)


def test_the_gateway_gets_real_ports_and_the_model_s_name() -> None:
    command = gateway_spec(up("--http-port=0", "--grpc-port=0", "--seed=7"), ADDRESSES, {}).command
    assert {"--http-port=8123", "--grpc-port=50123", "--model-name=tandem-demo", "--seed=7"} <= set(command)
    assert {"--min-prefill=1", "--expect=prefill=1,decode=1", "--drain-s=10.0", "--linger-s=0"} <= set(command)
    assert "--min-prefill=0" in gateway_spec(up("--prefill=0"), ADDRESSES, {}).command
    wanted = gateway_spec(up("--min-prefill=0", "--expect=prefill=2"), ADDRESSES, {}).command
    assert {"--min-prefill=0", "--expect=prefill=2"} <= set(wanted)
    named = gateway_spec(up("--model=/models/My Llama"), ADDRESSES, {}).command
    assert "--model-name=My-Llama" in named


def test_the_gateway_is_told_of_keys_by_file_and_digest() -> None:
    addresses = dataclasses.replace(ADDRESSES, starter_key_digest="a" * 64)
    command = gateway_spec(up("--api-keys=/k.toml", "--admin-port=9000"), addresses, {}).command
    assert {"--api-keys=/k.toml", f"--starter-key-digest={'a' * 64}", "--admin-port=9000"} <= set(command)
    plain = " ".join(gateway_spec(up(), ADDRESSES, {}).command)
    assert not re.search("--(api-keys|starter-key-digest|admin|allowed-hosts|cors-origins)", plain)


def test_the_gateway_is_told_what_browsers_and_operators_may() -> None:
    given = {f"--admin-key-digest={'b' * 64}", "--admin-socket=/a.sock", "--allowed-hosts=a.example"}
    given |= {"--cors-origins=https://b"}
    assert given <= set(gateway_spec(up(*given), ADDRESSES, {}).command)


def test_children_inherit_what_up_does_not_decide() -> None:
    environ = {"PATH": "/bin", "TANDEM_HTTP_PORT": "1", "TANDEM_KV_MEMORY": "1GiB", "TANDEM_NO_AMX": "1"}
    environment = child_environment(environ, parent_pid=42)
    assert environment["TANDEM_DIE_WITH_PARENT"] == "42"
    assert environment["TANDEM_NO_AMX"] == "1"
    assert "TANDEM_HTTP_PORT" not in environment
    assert "TANDEM_KV_MEMORY" not in environment
    assert environment["PATH"] == "/bin"


def test_workers_keep_to_cores_of_their_own_with_a_thread_for_each() -> None:
    machine = Machine(cores=((0, 4), (1, 5), (2, 6), (3, 7)))
    settings = up()
    prefill, decode = worker_specs(settings, model_plans(settings), ADDRESSES, {}, machine)
    assert {"--threads=2", "--cores=0,1,4,5"} <= set(prefill.command)
    assert {"--threads=2", "--cores=2,3,6,7"} <= set(decode.command)
    read = load(DualWorkerConfig, decode.command[4:], prog="decode_worker", environ={})
    assert (read.cores, read.engine_settings()["threads"]) == ((2, 3, 6, 7), 2)


@pytest.mark.parametrize("settings", [up("--no-pin"), up("--prefill=2"), up("--threads=2")])
def test_nobody_keeps_to_cores_when_told_or_too_many(settings: UpSettings) -> None:
    for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE):
        assert not any(flag.startswith("--cores") for flag in spec.command)
        assert f"--threads={settings.decode_worker.threads or 1}" in spec.command


def test_each_model_of_the_file_has_its_own_workers(tmp_path: Path) -> None:
    for name in ("big", "small"):
        (tmp_path / name).mkdir()
    models = tmp_path / "models.toml"
    models.write_text(
        '[[model]]\nname = "Big/1.5"\npath = "big"\ndecode = 2\nfallback = ["big-1-5"]\n'
        '[[model]]\nname = "big-1-5"\npath = "small"\nprefill = 0\n'
    )
    settings = up(f"--models={models}")
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


SHARED = '[[model]]\nname = "a/1"\npath = "."\nshare = "x"\nprefill = 3\ndecode = 2\n'
SHARED += '[[model]]\nname = "own"\npath = "."\n[[model]]\nname = "b"\npath = "."\nshare = "x"\n'


def test_models_that_share_have_the_same_workers_in_groups_of_one_that_decodes(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(SHARED)
    settings, addresses = up(f"--models={tmp_path / 'models.toml'}"), replace(ADDRESSES, roles=tmp_path)
    specs = {spec.name: spec.command for spec in worker_specs(settings, model_plans(settings), addresses, {}, MACHINE)}
    files = {"prefill-a-1-0": 0, "prefill-a-1-1": 1, "prefill-a-1-2": 0, "decode-a-1-0": 0, "decode-a-1-1": 1}
    assert set(specs) == {*files, "prefill-own-0", "decode-own-0"}
    for name, number in files.items():
        told = {f"--model-file={tmp_path}/a-1-{number}.model", f"--other-models=b={tmp_path}", "--models-asleep=1"}
        assert {*told, "--model-name=a/1", "--drain-timeout=30.0"} <= set(specs[name])
        assert not any(flag.startswith("--role-file") for flag in specs[name])
    own = " ".join(specs["decode-own-0"])
    assert not any(flag in own for flag in ("--model-file", "--other-models", "--drain-timeout"))
    assert f"--model-files={tmp_path}" in gateway_spec(settings, addresses, {}).command
    assert not any(flag.startswith("--model-files") for flag in gateway_spec(up(), addresses, {}).command)


def test_models_that_vllm_computes_share_no_workers(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(SHARED)
    with pytest.raises(ConfigError, match="a/1 shares workers, but --engine is vllm"):
        model_plans(up(f"--models={tmp_path / 'models.toml'}", "--engine=vllm"))


def test_workers_of_a_model_have_its_engine_and_run_where_that_is(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(
        '[[model]]\nname = "a"\npath = "."\n[[model]]\nname = "b"\npath = "."\nengine = "native"\n'
    )
    settings = up(f"--models={tmp_path / 'models.toml'}", "--engine=vllm")
    first, second = model_plans(settings)
    specs = worker_specs(settings, [replace(first, python="/venv/python"), second], ADDRESSES, {}, MACHINE)
    told = [(spec.command[0], next(flag for flag in spec.command if flag.startswith("--engine="))) for spec in specs]
    assert told == [("/venv/python", "--engine=vllm")] * 2 + [(sys.executable, "--engine=native")] * 2
    assert gateway_spec(settings, ADDRESSES, {}).command[0] == sys.executable
    (only,) = model_plans(up())
    assert only.engine == "native"


def test_a_bad_models_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml does not exist"):
        model_plans(up(f"--models={tmp_path / 'missing.toml'}"))


def test_the_gateway_goes_first_and_workers_give_nobody_way() -> None:
    settings = up()
    assert "--nice=-10" in gateway_spec(settings, ADDRESSES, {}).command
    for spec in worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE):
        assert not any(flag.startswith("--nice") for flag in spec.command)


def test_workers_have_the_adapters_of_their_models(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(
        '[[model]]\nname = "a"\npath = "."\nengine = "vllm"\nlora = {sql = "."}\n[[model]]\nname = "b"\npath = "."\n'
    )
    settings = up(f"--models={tmp_path / 'models.toml'}")
    specs = worker_specs(settings, model_plans(settings), ADDRESSES, {}, MACHINE)
    told = [[flag for flag in spec.command if flag.startswith("--lora")] for spec in specs]
    assert told == [[f"--lora=sql={tmp_path}"]] * 2 + [[]] * 2
    one = up("--engine=vllm", f"--lora=sql={tmp_path}")
    for spec in (*worker_specs(one, model_plans(one), ADDRESSES, {}, MACHINE), gateway_spec(one, ADDRESSES, {})):
        assert f"--lora=sql={tmp_path}" in spec.command


def test_a_model_of_the_native_engine_has_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text('[[model]]\nname = "a"\npath = "."\nlora = {sql = "."}\n')
    assert len(model_plans(up(f"--models={tmp_path / 'models.toml'}", "--engine=vllm"))) == 1
    with pytest.raises(ConfigError, match="adapters sql, and its engine is native"):
        model_plans(up(f"--models={tmp_path / 'models.toml'}"))


def test_each_worker_has_a_file_that_says_what_it_is_and_one_of_vllm_a_program_of_its_role(tmp_path: Path) -> None:
    settings = up("--model=/m")
    addresses = replace(ADDRESSES, roles=tmp_path)
    prefill, decode = worker_specs(settings, model_plans(settings), addresses, {}, MACHINE)
    for spec, role in ((prefill, "prefill"), (decode, "decode")):
        read = load(DualWorkerConfig, spec.command[4:], prog="worker", environ={})
        assert (read.role, read.role_file) == (role, tmp_path / f"{role}-0.role")
    settings = up("--model=/m", "--engine=vllm")
    for spec in worker_specs(settings, model_plans(settings), addresses, {}, MACHINE):
        assert spec.command[3] == f"{spec.name.partition('-')[0]}_worker"
        assert not any(flag.startswith("--role") for flag in spec.command)


def test_a_worker_s_name_says_how_it_began() -> None:
    plan = ModelPlan("a model", Path("m"), 1, 1, "tandem", "a-model")
    assert plan.worker_name("decode", 3) == "decode-a-model-3"
    assert first_role("decode-a-model-3") == "decode"
