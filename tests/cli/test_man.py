import io
import re
import shutil
import subprocess

import pytest

from cli.commands import COMMANDS
from cli.man import ManSettings, run
from tests.waiting import HANG_LIMIT_S


@pytest.fixture(scope="module")
def page() -> str:
    stream = io.StringIO()
    assert run(ManSettings(), stream) == 0
    return stream.getvalue()


def test_every_command_and_flag_is_in_the_page(page: str) -> None:
    assert [line for line in page.splitlines() if line.startswith(".SH TANDEM")] == [
        f".SH TANDEM {name.upper()}" for name in COMMANDS
    ]
    for words in (r"\-\-http\-port", r"\-\-kv\-memory", r"\-\-prompt\-tokens", r"tandem keys new", "tandem.toml"):
        assert words in page


def test_no_line_is_a_request_by_mistake(page: str) -> None:
    known = (".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".BR", ".I", ".nf", ".fi")
    assert [line for line in page.splitlines() if line.startswith((".", "'")) and not line.startswith(known)] == []


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_nothing_to_say_of_it(page: str) -> None:
    command = ["groff", "-K", "utf8", "-man", "-Tutf8", "-ww"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=True, timeout=HANG_LIMIT_S)
    assert done.stderr == ""
    plain = re.sub(".\x08", "", done.stdout)  # without what is struck twice to be bold
    for words in ("tandem.toml", "--http-port PORT\n", "--verbose, -v\n", "Default: on; --no-pin turns it off.\n"):
        assert words in plain
