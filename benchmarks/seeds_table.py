"""The table of the plans' numbers in docs/benchmarks.md: written, and read again. Measures nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- seeds: written by make bench-seeds -->\n", "<!-- seeds: end -->\n"


@dataclass(frozen=True)
class Row:
    """A line of the table. `is_met`: None where nothing was asked for, or it could not be measured here."""

    part: str
    what: str
    aim: str
    reached: str
    is_met: bool | None = None


MARKS = {True: "yes", False: "**missed**", None: ""}


def table(rows: Iterable[Row]) -> str:
    """Returns the rows as a table in Markdown, and the missed ones by name below it."""
    lines = ["| part | number | wanted | reached | met |", "|---|---|---|---|---|"]
    rows = list(rows)
    lines += [f"| {one.part} | {one.what} | {one.aim} | {one.reached} | {MARKS[one.is_met]} |" for one in rows]
    missed = [f"{one.part}: {one.what}" for one in rows if one.is_met is False]
    lines += ["", "Missed: " + ("; ".join(missed) if missed else "none") + "."]
    return "\n".join(lines) + "\n"


def rows_of(document: str) -> list[Row]:
    """Returns the rows of the document's table."""
    section = document.partition(BEGIN)[2].partition(END)[0]
    cells = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    marks = {shown: is_met for is_met, shown in MARKS.items()}
    return [Row(part, what, aim, reached, marks[met]) for part, what, aim, reached, met in cells]


def with_others(rows: Sequence[Row], known: Iterable[Row], *, order: Sequence[str]) -> list[Row]:
    """Returns new rows among those that are known of other parts, in the parts' order."""
    measured = {row.part for row in rows}
    return sorted(
        [*rows, *(row for row in known if row.part not in measured)],
        key=lambda row: order.index(row.part.partition(" ")[0]),
    )


def with_table(document: str, section: str) -> str:
    """Returns the document with another table. Raises ValueError where it has no place for one."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("the document has no place for the table")
    return before + BEGIN + "\n" + section + "\n" + END + after
