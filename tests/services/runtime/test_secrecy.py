"""Passwords and secrets are in no text that is printed, logged or seen by other users of the machine."""

import logging
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.doctor import DoctorSettings
from cli.up_settings import UpSettings
from gateway.config import GatewayConfig
from services.cluster.probe import probe
from services.cluster.redis_store import Store, thread_client
from services.cluster.redis_url import check_url
from services.runtime.config import load, option, redacted, settings_of
from services.runtime.errors import ConfigError, StoreUnavailable
from services.runtime.kinds import secret, text
from worker.config import WorkerConfig

PASSWORD = "hunter2"
URL = f"redis://:{PASSWORD}@127.0.0.1:1"
CONFIGS: list[tuple[type[Any], list[str]]] = [
    (UpSettings, []),
    (GatewayConfig, ["--model=m"]),
    (WorkerConfig, ["--id=a", "--model=m"]),
    (DoctorSettings, []),
]


@dataclass(frozen=True)
class Settings:
    """Some."""

    key: str | None = option(secret(), default=None, help="Nobody's business.")
    name: str = option(text(), default="n", help="A name.")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "redis://***@127.0.0.1:1"),
        ("redis://me:p@ss@host", "redis://***@host"),
        ("redis://:pa/ss@host:1/0", "redis://***@host:1/0"),
        ("rediss://host?password=hunter2&db=1", "rediss://host?password=***&db=1"),
        ("unix:///run/r.sock?db=0&PASSWORD=x", "unix:///run/r.sock?db=0&PASSWORD=***"),
        ("unix:///run/r.sock?username=x", "unix:///run/r.sock?username=***"),
        ("redis://host:6379/0", "redis://host:6379/0"),
    ],
)
def test_urls_are_shown_without_what_opens_them(url: str, shown: str) -> None:
    assert redacted(url) == shown


@pytest.mark.parametrize(("config", "flags"), CONFIGS)
def test_settings_do_not_print_passwords(config: type[Any], flags: list[str]) -> None:
    settings = load(config, flags, prog="test", environ={"TANDEM_REDIS": URL, "TANDEM_OTLP": f"http://a:{PASSWORD}@b"})
    assert settings.redis == URL
    assert PASSWORD not in repr(settings)


@pytest.mark.parametrize("field", ["redis", "otlp"])
@pytest.mark.parametrize(
    "given", [f"ftp://:{PASSWORD}@h", f"redis://:{PASSWORD}/x@h:port", f"redis://h:x?password={PASSWORD}"]
)
def test_errors_of_settings_do_not_print_passwords(field: str, given: str) -> None:
    for flags, environ in (([f"--{field}={given}"], {}), ([], {f"TANDEM_{field.upper()}": given})):
        with pytest.raises(ConfigError) as raised:
            load(WorkerConfig, ["--id=a", "--model=m", *flags], prog="test", environ=environ)
        assert PASSWORD not in "".join(traceback.format_exception(raised.value))


def test_a_mistyped_flag_does_not_print_its_password() -> None:
    with pytest.raises(ConfigError, match="--rediss") as raised:
        load(WorkerConfig, ["--id=a", "--model=m", f"--rediss={URL}"], prog="test", environ={})
    assert PASSWORD not in raised.value.message


async def test_a_redis_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(StoreUnavailable) as unavailable:
        probe(URL)
    with pytest.raises(ConfigError) as malformed:
        check_url(f"redis://:{PASSWORD}/x@h")
    for raised in (unavailable.value, malformed.value):
        assert PASSWORD not in "".join(traceback.format_exception(raised))
    store = Store(URL, cluster="test")
    client = thread_client(URL)
    assert PASSWORD not in repr(vars(store)) + repr(client) + repr(client.connection_pool)
    client.close()
    await store.close()


def test_a_password_on_the_command_line_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    load(WorkerConfig, ["--id=a", "--model=m", "--advertise-host=127.0.0.1", f"--redis={URL}"], prog="test", environ={})
    (record,) = caplog.records
    assert "--redis has a password on the command line" in record.getMessage()
    assert "TANDEM_REDIS" in record.getMessage()
    assert PASSWORD not in record.getMessage()
    caplog.clear()
    load(
        WorkerConfig,
        ["--id=a", "--model=m", "--advertise-host=127.0.0.1", "--redis=redis://h"],
        prog="test",
        environ={"TANDEM_OTLP": f"http://a:b@{PASSWORD}"},
    )
    assert not caplog.records


def test_a_secret_has_no_flag_and_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_KEY", PASSWORD)
    monkeypatch.setenv("TANDEM_NAME", "other")
    settings = load(Settings, [], prog="test")
    assert (settings.key, settings.name) == (PASSWORD, "other")
    assert PASSWORD not in repr(settings)
    assert "TANDEM_KEY" not in os.environ
    assert os.environ["TANDEM_NAME"] == "other"
    assert [setting.flag for setting in settings_of(Settings)] == ["", "--name"]
    with pytest.raises(ConfigError, match="--key"):
        load(Settings, ["--key=x"], prog="test", environ={})


WORKER = ["--id=a", "--model=m"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "worker.example"])
def test_a_worker_beyond_this_machine_needs_tls_or_the_word_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--tls-ca, or --insecure .*--cluster-secret-file"):
        load(WorkerConfig, [*WORKER, f"--host={host}"], prog="test", environ={"TANDEM_CLUSTER_SECRET": "s" * 32})
    assert load(WorkerConfig, [*WORKER, f"--host={host}", "--insecure"], prog="test", environ={}).insecure
    tls = ["--tls-cert=c", "--tls-key=k", "--tls-ca=a"]
    assert load(WorkerConfig, [*WORKER, f"--host={host}", *tls], prog="test", environ={}).tls is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_worker_on_this_machine_needs_neither(host: str) -> None:
    assert load(WorkerConfig, [*WORKER, f"--host={host}"], prog="test", environ={}).host == host


def test_which_secret_a_process_proves(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("f" * 32)
    tls = ["--tls-cert=c", "--tls-key=k", "--tls-ca=a"]
    redis = ["--redis=redis://h", "--advertise-host=w"]

    def worker(*flags: str) -> Any:
        return load(WorkerConfig, [*WORKER, *flags], prog="test", environ={}).secrets

    def gateway(*flags: str) -> Any:
        return load(GatewayConfig, ["--model=m", *flags], prog="test", environ={}).secrets

    assert worker() is None
    assert worker(*redis).is_shared
    assert gateway().is_shared
    assert gateway(*tls[:2]).is_shared, "workers are reached without TLS"
    assert worker(*redis, *tls) is gateway(*tls) is None, "certificates prove it"
    for found in (worker(f"--cluster-secret-file={file}"), gateway(*tls, f"--cluster-secret-file={file}")):
        assert found() == (b"f" * 32,)
