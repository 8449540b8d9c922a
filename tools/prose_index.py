"""Counts constructions of translated English per 1,000 words: `python -m tools.prose_index [--worst N] [SCOPE…]`.

Prints the index of each scope, and fails if it exceeds the scope's limit in `prose_index.toml`. `--worst` prints the
texts with the most constructions instead. `make lint` runs it.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tools import prose

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = Path(__file__).with_suffix(".toml")
SCOPES = {
    "README": ["README.md", "CONTRIBUTING.md"],
    "docs": ["docs"],
    "gateway/requests, edge, topology": ["gateway/requests", "gateway/edge", "gateway/topology"],
    "gateway": ["gateway"],
    "services/cluster": ["services/cluster"],
    "services/engine": ["services/engine"],
    "services/runtime": ["services/runtime"],
    "services/scheduling": ["services/scheduling"],
    "services": ["services"],
    "workers": ["worker", "prefill_worker", "decode_worker", "dual_worker"],
    "kv_transfer": ["kv_transfer"],
    "cli, planning": ["cli", "planning", "tandem"],
    "client": ["client"],
    "tests": ["tests"],
    "protos": ["protos"],
    "tools": ["tools", "benchmarks", "demo", "examples"],
}
"""Folders by scope. A file belongs to the first scope that contains it."""
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")


class Text(NamedTuple):
    """A docstring, a string of several words, a block of comments, or a Markdown file."""

    path: str
    line: int
    text: str


class Index(NamedTuple):
    """The figures of one scope."""

    num_words: int
    num_found: int

    @property
    def per_1000(self) -> float:
        """Constructions per 1,000 words."""
        return 1000 * self.num_found / max(1, self.num_words)


def patterns() -> list[re.Pattern[str]]:
    """Returns the constructions that count."""
    return [re.compile(pattern) for pattern in tomllib.loads(SETTINGS.read_text())["patterns"].values()]


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of one file, each with its first line."""
    source = path.read_text()
    if path.suffix == ".py":
        yield from prose.texts_of_python(source)
    elif path.suffix == ".md":
        yield from prose.texts_of_markdown(source)
    else:  # .proto
        yield 1, "\n".join(line.partition("//")[2].strip() for line in source.splitlines())


def texts() -> Iterator[tuple[str, Text]]:
    """Yields every text of the project with its scope."""
    seen: set[Path] = set()
    for scope, names in SCOPES.items():
        protos = [path for name in names for path in (ROOT / name).glob("*.proto")]
        for path in (*prose.files([name for name in names if (ROOT / name).exists()]), *protos):
            if path not in seen:
                seen.add(path)
                for line, text in texts_of(path):
                    yield scope, Text(str(path.relative_to(ROOT)), line, text)


def count(text: str, constructions: Iterable[re.Pattern[str]]) -> int:
    """Returns the number of constructions in a text."""
    return sum(1 for pattern in constructions for _ in pattern.finditer(text))


def indexes() -> dict[str, Index]:
    """Returns the figures of each scope."""
    constructions = patterns()
    found = {scope: Index(0, 0) for scope in SCOPES}
    for scope, text in texts():
        so_far, num_words = found[scope], len(_WORD.findall(text.text))
        found[scope] = Index(so_far.num_words + num_words, so_far.num_found + count(text.text, constructions))
    return found


def print_worst(num: int, scopes: Iterable[str]) -> None:
    """Prints the `num` texts of the given scopes, or of all, that have the most constructions."""
    constructions, chosen = patterns(), set(scopes) or set(SCOPES)
    counted = [(count(text.text, constructions), text) for scope, text in texts() if scope in chosen]
    for number, text in sorted(counted, key=lambda pair: -pair[0])[:num]:
        sys.stdout.write(f"{text.path}:{text.line}: {number} constructions: {' '.join(text.text.split())[:300]}\n")


def main() -> int:
    """Prints the table, or the worst texts. Returns 1 if a scope exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scopes", nargs="*", metavar="SCOPE", help=f"one of {', '.join(SCOPES)}; default: all")
    parser.add_argument("--worst", type=int, metavar="N", help="print the N texts with the most constructions")
    arguments = parser.parse_args()
    if unknown := set(arguments.scopes) - set(SCOPES):
        parser.error(f"unknown scope {sorted(unknown)[0]!r}; the scopes are {', '.join(SCOPES)}")
    if arguments.worst:
        print_worst(arguments.worst, arguments.scopes)
        return 0
    limits = tomllib.loads(SETTINGS.read_text())["limits"]
    is_over = False
    for scope, index in indexes().items():
        if arguments.scopes and scope not in arguments.scopes:
            continue
        over = index.per_1000 > limits[scope]
        is_over = is_over or over
        verdict = "  EXCEEDED: python -m tools.prose_index --worst 20 shows where" if over else ""
        sys.stdout.write(
            f"{scope:<34}{index.num_words:>8} words{index.per_1000:>7.1f} per 1,000, limit {limits[scope]:g}{verdict}\n"
        )
    return 1 if is_over else 0


if __name__ == "__main__":
    sys.exit(main())
