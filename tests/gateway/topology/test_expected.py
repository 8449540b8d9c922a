"""The file of expected workers: its changes, and what holds while it cannot be read."""

import logging
from pathlib import Path

import pytest

from gateway.topology.expected import ExpectedFile


def test_what_the_file_says_now_is_expected(tmp_path: Path) -> None:
    file = tmp_path / "expected.txt"
    file.write_text("prefill=1,decode=2\n")
    expected = ExpectedFile(file)
    assert expected.numbers() == {"prefill": 1, "decode": 2}
    written = tmp_path / "new"
    written.write_text("decode=3")
    written.replace(file)
    assert expected.numbers() == {"decode": 3}


def test_a_file_that_cannot_be_read_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "expected.txt"
    expected = ExpectedFile(file, {"decode": 1})
    with caplog.at_level(logging.WARNING):
        assert [expected.numbers() for _ in range(3)] == [{"decode": 1}] * 3
        assert len(caplog.records) == 1
        file.write_text("decode=many")
        assert [expected.numbers() for _ in range(3)] == [{"decode": 1}] * 3
        assert len(caplog.records) == 2
        file.write_text("decode=4")
        assert expected.numbers() == {"decode": 4}
    assert len(caplog.records) == 2
