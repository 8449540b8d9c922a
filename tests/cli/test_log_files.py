"""Nobody but their owner reads logs, and nobody else says which file is written to."""

import os
import stat
from pathlib import Path

import pytest

from cli.log_files import make_private_folder, open_private
from services.runtime.errors import ConfigError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_new_folder_and_its_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "logs"
    make_private_folder(folder)
    with open_private(folder / "gateway.log") as log:
        log.write(b"one\n")
    assert (mode(folder), mode(folder / "gateway.log")) == (0o700, 0o600)
    assert mode(folder.parent) == 0o755


def test_logs_of_an_earlier_version_are_closed_to_others_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir(mode=0o755)
    (folder / "gateway.log").write_text("old\n")
    make_private_folder(folder)
    with open_private(folder / "gateway.log") as log:
        log.write(b"new\n")
    assert (mode(folder), mode(folder / "gateway.log")) == (0o700, 0o600)
    assert (folder / "gateway.log").read_text() == "old\nnew\n"


def test_a_folder_with_other_things_in_it_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "var"
    (folder / "others").mkdir(parents=True)
    make_private_folder(folder)
    with open_private(folder / "gateway.log"):
        pass
    assert (mode(folder), mode(folder / "gateway.log")) == (0o755, 0o600)


@pytest.mark.parametrize("given", [0o777, 0o1777, 0o770])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, given: int) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(given)
    with pytest.raises(ConfigError, match="can be written to by others"):
        make_private_folder(folder)


def test_a_file_in_its_place_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        make_private_folder(tmp_path / "logs")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "gateway.log").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"symbolic|link"):
        open_private(tmp_path / "gateway.log")
