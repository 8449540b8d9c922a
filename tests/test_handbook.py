"""What docs/api.md, docs/troubleshooting.md and docs/glossary.md say exists: codes, messages, flags, metrics, files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.http import protocol as http_protocol
from gateway.openai.vocabulary import WORDS
from services.runtime.status import TABLE

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = (
    "gateway",
    "services",
    "kv_transfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "dual_worker",
    "planning",
    "cli",
    "client",
)
API, TROUBLE, GLOSSARY = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("api", "troubleshooting", "glossary"))
CODE = "\n".join(path.read_text() for name in PROGRAMS for path in sorted((ROOT / name).rglob("*.py")))
SETTINGS = (ROOT / "docs" / "configuration.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()
OTHERS = {"SSL_CERT_FILE", "nvidia-smi", "nvidia-ml-py", "pip install tandem-serving[local]", "this type"}
"""What is not ours."""


def codes_of_the_code() -> set[str]:
    """Every public code of an error: of the table, given by hand, of the server of HTTP, and of its router."""
    by_hand = set(re.findall(r'\bcode="([a-z_]+)"', CODE))
    of_http = {refusal.code for refusal in vars(http_protocol).values() if isinstance(refusal, http_protocol.Refusal)}
    assert len(by_hand) > 15
    assert len(of_http) > 2
    return by_hand | of_http | {row.openai_code for row in TABLE.values()} | {"not_found", "method_not_allowed"}


def test_the_tables_of_the_api_reference_are_what_the_code_says(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "api_reference.py"), "--check"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0, "run tools/api_reference.py"


def test_every_code_is_explained_and_exists() -> None:
    table = API.partition("## Errors")[2]
    named = {
        code for row in table.splitlines() if row.startswith("| `") for code in re.findall(r"`(\w+)`", cell(row, 1))
    }
    assert named == codes_of_the_code()
    statuses = {str(row.http) for row in TABLE.values()} - {"499"}
    assert statuses <= set(re.findall(r"\| (\d{3}) \|", table))


def cell(row: str, number: int) -> str:
    return re.split(r"(?<!\\)\|", row)[number]


def quoted(page: str) -> list[str]:
    """What stands between backquotes."""
    return [text.replace("\\|", "|") for text in re.findall(r"`([^`\n]+)`", page)]


def exists(text: str) -> bool:
    """Whether a quoted text is a flag, a metric, a field, a file, a command, or in the code word for word."""
    if text in OTHERS or text.startswith(("tandem ", "/tmp/", "<|")):
        return True
    if text.startswith("--") and text.count(" ") < 2:
        return f"`{text.partition(' ')[0]}`<br>" in SETTINGS
    if text.startswith("tandem_"):
        return f"`{text}`" in METRICS
    return all(part in CODE for part in text.split("…") if part.strip())


def test_what_troubleshooting_quotes_is_in_the_code() -> None:
    texts = quoted(TROUBLE)
    assert len(texts) > 100
    assert [text for text in texts if not exists(text)] == []
    assert not exists("no such message of ours")
    assert not exists("--no-such-flag")


@pytest.mark.parametrize("code", sorted(codes_of_the_code()))
def test_every_code_that_an_operator_can_change_something_about_is_in_troubleshooting(code: str) -> None:
    clients_own = {
        *(
            "invalid_json",
            "invalid_type",
            "invalid_value",
            "invalid_encoding",
            "duplicate_key",
            "http_version_not_supported",
            "invalid_http",
        ),
        *("missing_required_parameter", "unsupported_endpoint", "not_found", "method_not_allowed", "cancelled"),
        *("response_not_found", "response_not_background", "invalid_form", "empty_file"),
        *("previous_response_not_found", "previous_response_not_complete"),
        *("conversation_not_found", "item_not_found", "completion_not_found"),
        *("request_timeout", "request_too_large", "url_too_long", "request_head_too_large"),
        *("unsupported_media_type", "unsupported_encoding"),
    }
    assert (f"`{code}`" in TROUBLE) != (code in clients_own)


def test_every_place_of_the_glossary_exists_and_has_the_word() -> None:
    rows = [row for row in GLOSSARY.splitlines() if row.startswith("|")][2:]
    assert len(rows) > 40
    strangers = []
    for row in rows:
        (place,) = quoted(cell(row, 3))
        assert (ROOT / place).is_file(), place
        text = (ROOT / place).read_text().lower()
        words = [word.strip(" `").lower() for word in cell(row, 1).split(",")]
        if not any(word.replace(" ", gap) in text for word in words for gap in (" ", "_", "")):
            strangers.append((place, words))
    assert strangers == []
    names = [cell(row, 1).lower() for row in rows]
    assert len(names) == len(set(names))


def test_every_link_leads_somewhere() -> None:
    for name in ("api", "troubleshooting", "glossary"):
        text = (ROOT / "docs" / f"{name}.md").read_text()
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            page = ROOT / "docs" / (target or f"{name}.md")
            assert page.exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, anchor


def test_the_refused_fields_are_named() -> None:
    assert {f"{place}.{name}" if place else name for place, words in WORDS.items() for name in words} <= set(
        quoted(API)
    )
