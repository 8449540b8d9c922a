"""The completion of a shell knows what the parsers know."""

import io
import subprocess

import pytest

from cli.completion import CompletionSettings, run
from tests.waiting import HANG_LIMIT_S


def script(shell: str) -> str:
    stdout = io.StringIO()
    assert run(CompletionSettings(shell=shell), stdout) == 0
    return stdout.getvalue()


@pytest.mark.parametrize(
    ("typed", "offered", "not_offered"),
    [
        ("", {"up", "status", "keys", "completion"}, {"new", "--url"}),
        ("st", {"status"}, {"up"}),
        ("keys ", {"new", "tenant", "check"}, {"up"}),
        ("keys new --", {"--tenant", "--service-class"}, {"--url"}),
        ("keys new --service-class ", {"batch", "normal"}, {"--tenant"}),
        ("up --http-port 5 --tra", {"--transport"}, {"--url"}),
        ("up --transport ", {"auto", "shm"}, {"--url"}),
        ("up --no-", {"--no-pin"}, {"--no-verbose"}),
        ("replay trace.csv --pol", {"--policy"}, {"up"}),
        ("completion ", {"bash", "fish"}, {"up"}),
    ],
)
def test_bash_offers_what_may_come_next(typed: str, offered: set[str], not_offered: set[str]) -> None:
    words = ["tandem", *typed.split(" ")]
    array = " ".join(f'"{word}"' for word in words)
    line = f'COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _tandem; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["/bin/bash", "-c", script("bash") + line], capture_output=True, text=True, check=True, timeout=HANG_LIMIT_S
    )
    found = set(done.stdout.split())
    assert offered <= found
    assert not found & not_offered
    assert done.stderr == ""


def test_zsh_takes_the_script_of_bash() -> None:
    assert script("zsh").endswith(script("bash"))
    assert script("zsh").startswith("autoload -U +X bashcompinit && bashcompinit\n")


def test_fish_has_a_line_for_each_flag_with_its_help() -> None:
    lines = script("fish").splitlines()
    assert all(line.startswith("complete -c tandem ") for line in lines)
    (line,) = [line for line in lines if "-l service-class" in line]
    assert "'__fish_seen_subcommand_from keys; and __fish_seen_subcommand_from new'" in line
    assert "-a 'critical interactive normal low batch'" in line
