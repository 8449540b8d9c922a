"""`tandem plan`: what it prints and writes, and what it says of wrong input."""

import json
from pathlib import Path

import pytest

from cli.main import main

SMALL = ["--model", "llama-3.1-8b", "--kinds", "h100-llama-3.1-8b-bf16-tp1", "--input", "500", "--output", "50"]


def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rate", "20", "--ttft", "0.5", "--tpot", "0.03", "--price", "2"]
    files = ["--json", str(tmp_path / "plan.json"), "--report", str(tmp_path / "plan.html")]
    assert main(["plan", *SMALL, *words, *files]) == 0
    out = capsys.readouterr().out
    assert "1 prefill on h100-llama-3.1-8b-bf16-tp1, 1 decode" in out
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["separate"]["price_per_h"] == 4.0
    assert "<svg" in (tmp_path / "plan.html").read_text()


def test_infeasible_is_an_exit_code_and_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--rate", "1", "--tpot", "0.001"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Infeasible. TPOT: a decode step of one sequence takes")
    assert "nearest feasible" in out


def test_without_a_target_there_is_nothing_to_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL]) == 2
    assert "a plan needs a target" in capsys.readouterr().err


def test_a_plan_says_now_and_then_what_it_simulates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--rate", "20", "--ttft", "0.5", "--tpot", "0.03"]
    assert main(["plan", *SMALL, *words]) == 0
    quiet = capsys.readouterr()
    monkeypatch.setattr("cli.plan.TELL_EVERY_S", 0.0)
    assert main(["plan", *SMALL, *words]) == 0
    told = capsys.readouterr()
    assert told.out == quiet.out
    lines = told.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"simulation {number + 1}" for number in range(len(lines))]
    assert "1 prefill and 1 decode workers with " in told.err
    assert "requests at 20 a second" in told.err
    assert len(quiet.err.splitlines()) < len(lines)
