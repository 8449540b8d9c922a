"""docs/configuration.md says what the code reads."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from services.runtime.config import all_settings_of, misspelt

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


def test_no_program_takes_the_variables_of_another_for_misspelt_ones_of_its_own() -> None:
    spec = importlib.util.spec_from_file_location("config_reference", TOOL)
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    programs = [[setting.variable for setting in all_settings_of(one)] for one in reference.PROGRAMS.values()]
    everything = {variable for variables in programs for variable in variables}
    assert len(everything) > 150
    assert [misspelt(everything, variables) for variables in programs if misspelt(everything, variables)] == []
