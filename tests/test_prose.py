"""The check of English finds what it is meant to find, with its line, and nothing in sentences that are right."""

from pathlib import Path

import pytest

from tools import prose

BAD = {
    "Of a worker that left.": "Of",
    "Kept for later. Of no use now.": "Of",
    "Tells whoever asks.": "whoever",
    "Closes whom it does not know.": "whom",
    "So many are kept.": "So many",
    "So long it is not asked again.": "So long",
    "Whether a page is there.": "is there",
    "Goes on without it; the loop goes on.": "goes on",
    "It is not needed any more.": "any more",
    "None where there is none.": "is none",
    "The older one gives way.": "gives way",
    "The same, for lists.": "The same",
}
GOOD = (
    "People who run models, and users who do not.",
    "Of course it is.",
    "A prompt so long that it has no place.",
    "Needs any more pages than the pool has.",
    "There is a worker for each role.",
    "Writes the same bytes.",
)


@pytest.mark.parametrize("text", BAD)
def test_each_construction_is_found(text: str) -> None:
    assert BAD[text] in [words for _, words, _ in prose.found(text)]


@pytest.mark.parametrize("text", GOOD)
def test_right_sentences_are_left_alone(text: str) -> None:
    assert list(prose.found(text)) == []


def test_python_is_read_in_docstrings_comments_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(
        '"""Right.\n\nOf no file.\n"""\n\n'
        "# Right here,\n# whoever reads it.\nx = 1  # goes on\n"
        'message = "the worker is not there any more"\n'
        "y = 2  # who  prose: ok, a name\n"
        "any_more = '`so many` is code'\n"
    )
    lines = [(finding.line, finding.words) for finding in prose.findings(tmp_path / "module.py")]
    assert sorted(lines) == [(3, "Of"), (7, "whoever"), (8, "goes on"), (9, "any more")]


def test_markdown_is_read_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("Right.\n\n```sh\n# whoever\n```\n\nThe `is none` goes on.\n")
    assert [(finding.line, finding.words) for finding in prose.findings(tmp_path / "page.md")] == [(7, "goes on")]
