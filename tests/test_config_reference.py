"""docs/configuration.md says what the code reads."""

import subprocess
import sys
from pathlib import Path

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
