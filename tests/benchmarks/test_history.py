"""What a run leaves behind, and what is made of many."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import history
from benchmarks.history import compare, read, table
from benchmarks.report import Ratio, add_arguments, leave


def run(date: str, value: float, *, cpu: str = "fast", **fields: Any) -> dict[str, Any]:
    ratios = {"speed": {"value": value, "aim": None, "lower_is_better": False} | fields}
    return {"benchmark": "x", "date": date, "machine": {"cpu": cpu, "cores": 2}, "ratios": ratios}


def test_the_last_run_is_compared_with_the_median_of_the_earlier_ones() -> None:
    (change,) = compare([run("1", 1.0), run("2", 1.2), run("3", 5.0), run("4", 1.02)], 5)
    assert (change.before, change.num_before) == (1.2, 3)
    assert change.better_by == pytest.approx(-0.15)
    assert change.is_regression(0.1)
    assert not change.is_regression(0.2)


def test_only_so_many_earlier_runs_count() -> None:
    (change,) = compare([run("1", 9.0), run("2", 1.0), run("3", 1.0), run("4", 1.0)], 2)
    assert (change.before, change.num_before) == (1.0, 2)


def test_lower_may_be_better() -> None:
    (change,) = compare([run("1", 1.0, lower_is_better=True), run("2", 1.3, lower_is_better=True)], 5)
    assert change.better_by == pytest.approx(-0.3)
    assert change.is_regression(0.1)


def test_missing_an_aim_that_was_reached_is_worse_however_little_it_is() -> None:
    (change,) = compare([run("1", 1.46, aim=1.45), run("2", 1.44, aim=1.45)], 5)
    assert change.is_regression(0.1)
    (never,) = compare([run("1", 1.40, aim=1.45), run("2", 1.39, aim=1.45)], 5)
    assert not never.is_regression(0.1)


def test_other_machines_and_first_runs_are_not_compared() -> None:
    changes = compare([run("1", 9.0, cpu="other"), run("2", 1.0)], 5)
    assert [change.before for change in changes] == [None, None]
    assert not any(change.is_regression(0.0) for change in changes)
    assert "new" in table(changes, 0.1)[1]


def test_a_past_of_zero_says_nothing() -> None:
    (change,) = compare([run("1", 0.0), run("2", 1.0)], 5)
    assert change.better_by == 0.0


def test_runs_are_ordered_by_their_dates() -> None:
    lines = [json.dumps(run("2", 1.0)), "", json.dumps(run("1", 2.0))]
    assert [one["date"] for one in read(lines)] == ["1", "2"]


@pytest.mark.parametrize("line", ["{", "[]", '{"benchmark": "x"}', "7"])
def test_a_line_that_is_no_run_is_named(line: str) -> None:
    with pytest.raises(SystemExit, match="line 2 "):
        read([json.dumps(run("1", 1.0)), line])


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


def test_a_run_leaves_figures_and_a_line(tmp_path: Path) -> None:
    ratios = {"speed": Ratio(2.0, 1.5), "nothing": Ratio(math.nan)}
    asked = arguments("--json", str(tmp_path / "x.json"), "--history", str(tmp_path / "h.jsonl"))
    for _ in range(2):
        leave(asked, "x", {"seconds": [1, 2]}, ratios)
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["figures"] == {"seconds": [1, 2]}
    assert written["ratios"] == {"speed": {"value": 2.0, "aim": 1.5, "lower_is_better": False}}
    assert written["machine"]["cores"] >= 1
    runs = read((tmp_path / "h.jsonl").read_text().splitlines())
    assert len(runs) == 2
    assert "figures" not in runs[0]
    (change,) = compare(runs, 5)
    assert (change.before, change.num_before) == (2.0, 1)


def test_nothing_is_left_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    leave(arguments(), "x", {}, {"speed": Ratio(2.0)})
    assert list(tmp_path.iterdir()) == []
    assert arguments("--history").history == history.HISTORY


@pytest.mark.parametrize(("now", "code"), [(1.0, 0), (0.5, 1)])
def test_the_exit_code_says_whether_something_became_worse(
    now: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "h.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (run("1", 1.0), run("2", now))))
    monkeypatch.setattr("sys.argv", ["history", str(file)])
    with pytest.raises(SystemExit) as ended:
        history.main()
    assert ended.value.code == code
    assert ("WORSE" in capsys.readouterr().out) == bool(code)


def test_no_history_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["history", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="does not exist"):
        history.main()
