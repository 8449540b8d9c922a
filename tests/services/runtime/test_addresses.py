"""An address that nobody can dial is refused before anything listens, with the flag to change."""

import pytest

from decode_worker.config import DecodeWorkerConfig
from services.runtime import config
from services.runtime.addresses import HostPort, split_host_port
from services.runtime.errors import ConfigError

REQUIRED = ["--id=decode-0", "--model=/models/some", "--insecure"]
HERE = "--redis=redis://127.0.0.1:6379"
ELSEWHERE = "--redis=redis://10.0.0.1:6379"


def load(*flags: str) -> DecodeWorkerConfig:
    return config.load(DecodeWorkerConfig, [*REQUIRED, *flags], prog="test", environ={})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([HERE, "--host=0.0.0.0"], "--host is 0.0.0.0, which others cannot connect to.*--advertise-host"),
        ([HERE, "--host=::"], "--host is ::, which others cannot connect to"),
        ([HERE, "--host=10.0.0.2", "--advertise-host=0.0.0.0"], "--advertise-host is 0.0.0.0, which others"),
        ([ELSEWHERE], "--host is 127.0.0.1, which only this machine reaches, but --redis is on another one"),
        ([ELSEWHERE, "--host=::1"], "--host is ::1, which only this machine reaches"),
        (["--redis=redis://redis", "--host=localhost"], "--host is localhost, which only this machine reaches"),
        (["--host=[fd77::32]"], r"--host is '\[fd77::32\]' but must be a name or an IP address, without brackets"),
        (["--advertise-host=10.0.0.2:50052"], "--advertise-host is '10.0.0.2:50052' but must be .* without a port"),
        (["--advertise-host=worker:50052"], "--advertise-host is 'worker:50052'"),
        (["--advertise-port=50052"], "--advertise-port is 50052, but --port is 0.*give --port too"),
        (["--advertise-transfer-port=50053"], "--transfer-port is 0.*give --transfer-port too"),
        (["--port=50052", "--transfer-port=50052"], "--port and --transfer-port are both 50052"),
    ],
)
def test_what_nobody_can_dial_is_refused(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(*flags)


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ([HERE], "127.0.0.1:7"),
        (["--host=0.0.0.0"], "0.0.0.0:7"),
        (["--redis=unix:///run/redis.sock"], "127.0.0.1:7"),
        (["--redis=redis://localhost"], "127.0.0.1:7"),
        (["--redis=redis://[::1]:6379", "--host=::1"], "[::1]:7"),
        ([ELSEWHERE, "--advertise-host=127.0.0.1"], "127.0.0.1:7"),
        ([ELSEWHERE, "--host=fd77::32"], "[fd77::32]:7"),
        ([ELSEWHERE, "--host=::", "--advertise-host=fd77::32"], "[fd77::32]:7"),
        ([ELSEWHERE, "--host=0.0.0.0", "--advertise-host=worker-3.example"], "worker-3.example:7"),
        ([ELSEWHERE, "--port=7", "--advertise-host=10.0.0.2", "--advertise-port=40007"], "10.0.0.2:40007"),
    ],
)
def test_what_is_dialled(flags: list[str], address: str) -> None:
    assert load(*flags).address(7) == address


def test_an_address_is_read_as_it_is_shown() -> None:
    assert split_host_port("[::1]:80") == HostPort("::1", 80)
    assert [str(split_host_port(text)) for text in ("[::1]:80", "h:0")] == ["[::1]:80", "h:0"]


@pytest.mark.parametrize(
    "value", ["", ":1", "h:", "h:x", "a:b:1", "[::1]", "::1:5", "h:-1", "h :1", "h:99999", "h/x:1"]
)
def test_bad_addresses(value: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_host_port(value)
