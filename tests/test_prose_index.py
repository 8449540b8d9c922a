"""The language index counts each construction once, and fails above a scope's limit."""

import tomllib
from pathlib import Path

import pytest

from tools import prose, prose_index

PLANTED = {
    "what": "Returns what is left.",
    "tell": "The caller is told.",
    "say": "The header says so.",
    "ask": "Asks, and a worker is asked again.",
    "come": "The event comes later.",
    "go": "The request goes to a worker.",
    "where": "Raises an error, and where nothing is left.",
    "value colon": "None: the page is free.",
    "those that": "Drops those that are old.",
    "is no": "It is no error.",
    "nobody": "Nobody reads it.",
    "knows no": "Knows no key.",
    "has X do": "Has the device compute a step.",
    "of its own": "A thread of its own.",
    "the other one": "Moves to another one.",
    "meanwhile, also when": "Also when it fails.",
    "beside": "A file beside the model.",
    "old adverbs": "Begins anew.",
    "is to": "The limit is to be kept.",
    "room": "There is no more room.",
    "with a name": "A request without a name.",
}
NATIVE = "Returns the number of free pages, or None if the pool is closed. Raises NotFound if no worker has the page."


def test_each_construction_is_found_in_a_planted_sentence() -> None:
    constructions = tomllib.loads(prose_index.SETTINGS.read_text())["patterns"]
    assert set(constructions) == set(PLANTED)
    for name, pattern in zip(constructions, prose_index.patterns(), strict=True):
        assert prose_index.count(PLANTED[name], [pattern]) >= 1, name


def test_a_native_sentence_has_none() -> None:
    assert prose_index.count(NATIVE, prose_index.patterns()) == 0


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one package, whose 10 words contain one construction."""
    monkeypatch.setattr(prose_index, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose_index, "SCOPES", {"package": ["package"]})
    monkeypatch.setattr(prose_index, "SETTINGS", tmp_path / "index.toml")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text('"""Returns the page. Nobody reads it before its lease ends."""\n')
    monkeypatch.setattr("sys.argv", ["prose_index.py"])
    return tmp_path


@pytest.mark.parametrize(("limit", "status"), [(100, 0), (99, 1)])
def test_the_check_fails_above_the_limit_of_a_scope(project: Path, limit: int, status: int) -> None:
    (project / "index.toml").write_text(f"[patterns]\nnobody = '[Nn]obody'\n[limits]\npackage = {limit}\n")
    assert prose_index.indexes()["package"] == prose_index.Index(10, 1)
    assert prose_index.main() == status
