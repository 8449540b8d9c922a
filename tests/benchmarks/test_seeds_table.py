"""How the table of the plans' numbers is written, and that it loses nothing."""

import pytest

from benchmarks.seeds import PARTS
from benchmarks.seeds_table import BEGIN, DOCUMENT, Row, rows_of, table, with_others, with_table


def test_a_table_names_what_was_missed_and_nothing_else() -> None:
    rows = [
        Row("queue", "sla", "< 1 ms", "1.20 ms", False),
        Row("queue", "fcfs", "< 1 ms", "0.80 ms", True),
        Row("utilisation", "of a GPU", "", "needs a GPU"),
    ]
    lines = table(rows).splitlines()
    assert lines[2] == "| queue | sla | < 1 ms | 1.20 ms | **missed** |"
    assert lines[3:5] == ["| queue | fcfs | < 1 ms | 0.80 ms | yes |", "| utilisation | of a GPU |  | needs a GPU |  |"]
    assert lines[-1] == "Missed: queue: sla."
    assert table(rows[1:]).splitlines()[-1] == "Missed: none."


def test_the_document_has_one_place_for_the_table_and_keeps_the_rest() -> None:
    document = DOCUMENT.read_text()
    once = with_table(document, "first\n")
    assert "first\n" in once
    again = with_table(once, "second\n")
    assert again == once.replace("first\n", "second\n")
    assert again.partition(BEGIN)[0] == document.partition(BEGIN)[0]
    with pytest.raises(ValueError, match="no place"):
        with_table("# Benchmarks\n", "first\n")


def test_rows_of_parts_that_were_not_measured_stay_in_the_document() -> None:
    document = DOCUMENT.read_text()
    known = rows_of(document)
    assert {row.part.partition(" ")[0] for row in known} == set(PARTS)
    assert table(known) in document
    new = Row("batching", "a step", "", "1 ms")
    merged = with_others([new], known, order=[*PARTS])
    assert [row for row in merged if row.part == "batching"] == [new]
    assert [row for row in merged if row is not new] == [row for row in known if row.part != "batching"]
    assert [row.part for row in merged].index("batching") == [row.part for row in known].index("batching")
