"""What is found out before anything starts: ports, hosts, open addresses. Models and certificates: test_up.py."""

import socket
from pathlib import Path

import pytest

from cli.up_checks import AUTOMATIC_PORTS, PortTaken, claim_port, open_address, with_local_draft
from cli.up_settings import UpSettings
from services.runtime.config import read
from tests.free_ports import free_port


def test_a_taken_port_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port} is taken .* --http-port"):
            claim_port("127.0.0.1", port, flag="--http-port")


def test_a_host_that_is_not_ours_is_said() -> None:
    with pytest.raises(PortTaken, match="--host"):
        claim_port("203.0.113.7", 0, flag="--http-port")


def test_port_0_gives_two_different_ports_that_no_outgoing_connection_takes() -> None:
    first = claim_port("127.0.0.1", 0, flag="--http-port")
    second = claim_port("127.0.0.1", 0, flag="--grpc-port", taken=first)
    assert second != first
    assert {first, second} < set(AUTOMATIC_PORTS)


def test_port_0_passes_over_ports_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], free]
        monkeypatch.setattr("random.sample", lambda among, num: ports)
        assert claim_port("127.0.0.1", 0, flag="--http-port") == free
        with pytest.raises(PortTaken, match="is taken"):
            claim_port("127.0.0.1", 0, flag="--grpc-port", taken=free)


def test_an_address_that_is_open_to_all_without_keys_is_warned_about() -> None:
    assert open_address(read(UpSettings, {}, environ={})) is None
    said = open_address(read(UpSettings, {"host": "0.0.0.0"}, environ={}))
    assert said is not None
    assert "--api-keys" in said


def test_a_draft_model_that_is_here_stays_where_it_is(tmp_path: Path) -> None:
    assert with_local_draft({"a": "b"}, None) == {"a": "b"}
    assert with_local_draft({"a": "b"}, tmp_path) == {"a": "b", "draft_model": str(tmp_path)}
