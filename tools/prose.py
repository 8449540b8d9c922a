"""Finds constructions that a native reader of English stumbles over: `tools/prose.py [PATH…]`; part of `make lint`.

It reads docstrings, comments and texts of more than two words in Python files, and prose in Markdown files. A line that
is right as it stands says so with `prose: ok` and a reason. Exit status: 0 where nothing was found, 1 otherwise.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [
    "protos",
    "services",
    "kv_transfer",
    "worker",
    "gateway",
    "prefill_worker",
    "decode_worker",
    "dual_worker",
    "planning",
    "cli",
]
FOLDERS += ["client", "benchmarks", "demo", "examples", "tools", "tests", "docs"]
EXCEPTED = {
    "docs/log.md",
    "docs/api.md",
    "docs/configuration.md",
    "CHANGELOG.md",
    "tools/prose.py",
    "tests/test_prose.py",
}
"""The record of what was, what is generated from sources that are read themselves, and the files about this check."""

_PEOPLE = "people|person|somebody|someone|anybody|anyone|everybody|everyone|nobody|those|users?|operators?|attackers?"


class Rule(NamedTuple):
    """A construction: what finds it, and what to write instead."""

    pattern: re.Pattern[str]
    advice: str


def _rule(pattern: str, advice: str) -> Rule:
    return Rule(re.compile(pattern, re.MULTILINE), advice)


RULES = (
    _rule(r"\b(?!Who (?:may|are)\b)(?<!against )[Ww]ho(?:ever|m|mever)?\b", "name it: caller, worker, reader, …"),
    _rule(r"(?:\A|[.!?:;] |\n\s*\n\s*)Of (?!course\b)", "give the sentence its subject"),
    _rule(r"\b[Ss]o (?:many|long|late|few)\b(?! (?:that|as|\w+ that)\b)", "up to N; for this long; until then"),
    _rule(r"(?<!\w)(?:[Ii]s|[Aa]re|[Ww]as|[Ww]ere) there\b", "exists, has arrived, is free, is ready"),
    _rule(r"\b(?:go|goes|going|went|gone) on\b", "continues, resumes"),
    _rule(r"\b[Aa]ny more\b(?! \w+s\b)", "no longer"),
    _rule(r"\b(?:is|are|was|were) none\b", "does not exist; returns None when …; is not one"),
    _rule(r"\b(?:give|gives|gave|given|giving) way\b", "is evicted, is preempted, yields"),
    _rule(r"\AThe same\b", "say what it does: an editor shows it alone"),
)
_AFTER_PEOPLE = re.compile(rf"\b(?:{_PEOPLE}),? \Z", re.IGNORECASE)


class Finding(NamedTuple):
    """A place, what stands there, and what to write instead."""

    path: str
    line: int
    words: str
    advice: str


def found(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields each construction in `text`: its offset, its words, and what to write instead."""
    for rule in RULES:
        for match in rule.pattern.finditer(text):
            if match[0].lower() == "who" and _AFTER_PEOPLE.search(text[: match.start()].replace("\n", " ")):
                continue
            yield match.end() - 1, match[0].strip(" .!?:;\n"), rule.advice


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yields docstrings, texts and blocks of comments, each with the line it begins at."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield node.lineno, re.sub(r"`[^`]*`", "`x`", node.value)
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if line != last + 1:
                if block:
                    yield begin, "\n".join(block)
                block, begin = [], line
            block.append(token.string.lstrip("#: "))
            last = line
    if block:
        yield begin, "\n".join(block)


def texts_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yields the text without code and addresses, as one piece whose lines are those of the file."""
    text = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), source, flags=re.MULTILINE | re.DOTALL)
    yield 1, re.sub(r"\]\([^)\n]*\)", "]()", re.sub(r"`[^`\n]*`", "`x`", text))


def findings(path: Path) -> Iterator[Finding]:
    """Yields what stands in one file."""
    source = path.read_text()
    lines = source.splitlines()
    texts = texts_of_python(source) if path.suffix == ".py" else texts_of_markdown(source)
    for begin, text in texts:
        for offset, words, advice in found(text):
            line = begin + text.count("\n", 0, offset)
            if "prose: ok" not in lines[min(line, len(lines)) - 1]:
                yield Finding(str(path.relative_to(ROOT)), line, words, advice)


def files(names: list[str]) -> Iterator[Path]:
    """Yields the Python and Markdown files at and below `names`, without generated ones."""
    for name in names:
        top = ROOT / name
        paths = [top] if top.is_file() else sorted([*top.rglob("*.py"), *top.rglob("*.md")])
        for path in paths:
            relative = str(path.relative_to(ROOT))
            if relative not in EXCEPTED and "_pb2" not in path.name and "node_modules" not in relative:
                yield path


def main() -> int:
    """Prints what was found below the paths of the command line, or everywhere."""
    names = sys.argv[1:] or [*FOLDERS, *(path.name for path in ROOT.glob("*.md"))]
    everything = [finding for path in files(names) for finding in findings(path)]
    for finding in everything:
        sys.stdout.write(f"{finding.path}:{finding.line}: {finding.words!r}: {finding.advice}\n")
    if everything:
        sys.stdout.write(f"{len(everything)} found\n")
    return 1 if everything else 0


if __name__ == "__main__":
    sys.exit(main())
