"""The handbook against the settings: what it names exists, and what exists is named."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from cli.bench import BenchSettings
from cli.chat import ChatSettings
from cli.doctor import DoctorSettings
from cli.status import StatusSettings
from cli.up_settings import UpSettings
from decode_worker.config import DecodeWorkerConfig
from dual_worker.config import DualWorkerConfig
from gateway.config import GatewayConfig
from prefill_worker.config import PrefillWorkerConfig

ROOT = Path(__file__).resolve().parents[2]
HANDBOOK = (ROOT / "docs" / "operations.md").read_text()
SETTINGS = [UpSettings, GatewayConfig, PrefillWorkerConfig, DecodeWorkerConfig]


def flags(settings: Any) -> set[str]:
    return {"--" + field.name.replace("_", "-") for field in dataclasses.fields(settings)}


def test_no_flag_is_named_that_does_not_exist() -> None:
    known = set().union(
        *map(flags, [*SETTINGS, DualWorkerConfig, BenchSettings, ChatSettings, DoctorSettings, StatusSettings])
    )
    assert set(re.findall(r"`(--[a-z][a-z-]*)", HANDBOOK)) - known - {"--help"} == set()


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "client/README.md", "demo/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def anchors(page: Path) -> set[str]:
    """As a page on a forge has them: of each heading its words in small letters, joined by hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_file_name_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    files = re.findall(r"`((?:gateway|kv_transfer|services|protos|prefill_worker|decode_worker)/[\w/]+\.\w+)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
