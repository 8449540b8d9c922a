"""docs/configuration.md says what the code reads."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.config import Setting, all_settings_of, misspelt

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "config_reference.py"


def test_the_page_is_what_the_code_says(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--check"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0, "run tools/config_reference.py"


def test_every_setting_is_there_and_no_place_of_this_machine() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    for flag in ("--max-queued-requests", "--local-prefill-tokens", "--swap-memory", "--kv-pages", "--slo-ttft"):
        assert f"`{flag}`" in page
    assert "`TANDEM_REDIS`" in page
    assert str(ROOT) not in page


@pytest.fixture(scope="module")
def programs() -> list[list[Setting]]:
    """The settings of each program."""
    spec = importlib.util.spec_from_file_location("config_reference", TOOL)
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    return [all_settings_of(one) for one in reference.PROGRAMS.values()]


def test_a_default_is_shown_as_it_would_be_given(programs: list[list[Setting]]) -> None:
    shown = [one for settings in programs for one in settings if one.default_text]
    assert {"128MiB", "32,512", "true", "8000"} <= {one.default_text for one in shown}
    assert [one.name for one in shown if one.parse(one.default_text, one.flag) != one.default] == []


def test_no_program_takes_the_variables_of_another_for_misspelt_ones_of_its_own(programs: list[list[Setting]]) -> None:
    named = [[setting.variable for setting in settings] for settings in programs]
    everything = {variable for variables in named for variable in variables}
    assert len(everything) > 150
    assert [misspelt(everything, variables) for variables in named if misspelt(everything, variables)] == []
