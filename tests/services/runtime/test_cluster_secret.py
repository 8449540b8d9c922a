"""Where a cluster's secret comes from: files that change, variables, and what Redis says."""

import logging
from pathlib import Path

import pytest

from services.runtime.cluster_secret import Secrets
from services.runtime.errors import ConfigError

FIRST, SECOND = "1" * 64, "2" * 64


def test_a_file_has_one_secret_in_each_line_and_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"# the cluster's\n{FIRST}\n\n")
    secrets = Secrets(file=file)
    assert secrets() == (FIRST.encode(),)
    assert not secrets.is_shared
    file.write_text(f"{FIRST}\n{SECOND}\n")
    assert secrets() == (FIRST.encode(), SECOND.encode())
    file.write_text(f"{SECOND}\n")
    assert secrets() == (SECOND.encode(),)


def test_a_file_that_becomes_unusable_changes_nothing_but_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secret"
    file.write_text(FIRST)
    secrets = Secrets(file=file)
    file.write_text("short")
    assert secrets() == secrets() == (FIRST.encode(),)
    assert [record.message for record in caplog.records] == ["the cluster's secrets stay as they were"]
    file.unlink()
    assert secrets() == (FIRST.encode(),)


@pytest.mark.parametrize("content", ["", "# only words\n", "short\n", f"{FIRST}\n" * 5, "x" * 5000, "\x00" * 40])
def test_a_file_that_breaks_the_rule_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "secret"
    file.write_text(content)
    with pytest.raises(ConfigError, match="--cluster-secret-file") as raised:
        Secrets(file=file)
    assert str(file) in raised.value.message
    assert FIRST not in raised.value.message


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Secrets(file=tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="must be text"):
        Secrets(file=tmp_path / "bytes")


def test_a_variable_holds_one_secret_and_a_file_beside_it_is_refused(tmp_path: Path) -> None:
    assert Secrets(value=f" {FIRST}\n")() == (FIRST.encode(),)
    with pytest.raises(ConfigError, match="both given"):
        Secrets(file=tmp_path / "secret", value=FIRST)
    with pytest.raises(ConfigError, match="TANDEM_CLUSTER_SECRET is too short") as raised:
        Secrets(value="hunter2")
    assert "hunter2" not in raised.value.message


def test_without_either_they_are_what_redis_says_and_what_it_said_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    secrets = Secrets()
    assert secrets.is_shared
    assert secrets() == ()
    offer = secrets.offer
    assert len(offer) == 64
    secrets.adopt(FIRST.encode())
    assert secrets() == (FIRST.encode(),)
    assert secrets.offer == FIRST.encode() != offer
    for _ in range(2):
        secrets.adopt(SECOND.encode())
    assert secrets() == (SECOND.encode(), FIRST.encode())
    assert len(caplog.records) == 1
    for number in range(3, 9):
        secrets.adopt(str(number).encode() * 64)
    assert len(secrets()) == 4


def test_each_process_offers_a_secret_of_its_own() -> None:
    assert Secrets().offer != Secrets().offer
