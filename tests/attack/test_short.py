"""A selection of the attacks on one cluster, and that the page on security lists them all."""

import re
from pathlib import Path

from tests.attack.run import load, run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
SHORT = (
    *("trailers_as_headers", "pipelines", "large_heads", "odd_requests"),
    *("a_path_that_is_no_text", "reflection_without_a_key", "unary_calls_without_their_one_message"),
    *("names_of_another_tenant", "other_users", "mistakes_in_schemas"),
)


async def test_a_selection_holds() -> None:
    attacks = load()
    rows = await run([attacks[name] for name in SHORT])
    assert rows.keys() == set(SHORT)
    assert [(name, row) for name, found in rows.items() for row in found if row.held is False] == []
    assert all(any(row.held for row in found) for name, found in rows.items() if name != "other_users")


def test_the_page_on_security_lists_the_attacks() -> None:
    table = PAGE.partition("| number | attack |")[2].partition("\n\n")[0]
    listed = {int(number) for line in table.splitlines()[2:] for number in re.findall(r"\d+", line.split("|")[1])}
    assert listed == {number for one in load().values() for number in one.findings}
