"""`tandem replay`: what it prints and writes, and what it says of wrong input."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from planning.simulator import html_report
from tests.waiting import HANG_LIMIT_S

TRACES = Path(__file__).resolve().parents[2] / "benchmarks" / "traces"
MOONCAKE = str(TRACES / "mooncake_fast25_conversation.jsonl.gz")
AZURE = str(TRACES / "azure2023_conv_first40min.csv.gz")
PAPER_LIKE = [
    *("--prefill=8", "--decode=8", "--profile=a100-llama-3.1-70b-bf16-tp8", "--local-prefill-tokens=0"),
    *("--prefill-kv-tokens=3000000", "--decode-kv-tokens=1300000", "--link-bytes-per-s=50GB", "--slo-ttft=30"),
]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["replay", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def numbers(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    file = folder / "numbers.json"
    code, _, err = run(capsys, *words, "--json", str(file))
    assert code == 0, err
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_same_words_write_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [AZURE, "--limit=400", "--speed=4", "--prefill=2", "--decode=2", "--policy=random", "--policy", "hybrid"]
    files = []
    for number, seed in enumerate(("1", "1", "2")):
        json_file, html_file = tmp_path / f"{number}.json", tmp_path / f"{number}.html"
        assert main(["replay", *words, "--seed", seed, "--json", str(json_file), "--report", str(html_file)]) == 0
        files.append((json_file.read_bytes(), html_file.read_bytes()))
    assert files[0] == files[1]
    assert files[0][0] != files[2][0]
    assert b"NaN" not in files[0][0]
    out = capsys.readouterr().out
    assert re.search(r"^random .*\nhybrid ", out, re.MULTILINE)


def test_the_numbers_hold_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(capsys, tmp_path, AZURE, "--limit=300", "--slo-ttft=0.05", "--slo-tpot=0.0075")
    (one,) = found["runs"]
    assert one["requests"]["answered"] + sum(one["requests"]["refused"].values()) == one["requests"]["all"] == 300
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert 0 < one[name]["p50"] <= one[name]["p90"] <= one[name]["p99"]
    assert one["slo"]["met_both"] <= min(one["slo"]["met_ttft"], one["slo"]["met_tpot"]) < 1
    assert one["goodput_per_s"] == pytest.approx(one["slo"]["met_both"] * 300 / one["end_s"], rel=1e-3)
    assert set(one["utilisation"]) == {"p0", "d0"}
    series = found["series"]["hybrid"]
    mean = sum(series["utilisation"]["prefill"]) / len(series["utilisation"]["prefill"])
    assert mean == pytest.approx(one["utilisation"]["p0"], rel=0.1)


def test_a_linear_model_and_poisson_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("input_tokens,output_tokens\n" + "1000,1\n" * 20)
    words = ["--rate=0.001", "--prefill-tokens-per-s=10000", "--prefill-overhead-s=0.5", "--local-prefill-tokens=0"]
    found = numbers(capsys, tmp_path, str(trace), *words)
    assert found["runs"][0]["ttft_s"] == {"mean": 0.6, "p50": 0.6, "p90": 0.6, "p99": 0.6}


def test_capacity_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "sweep.html"
    code, out, _ = run(capsys, MOONCAKE, "--capacity-sweep", "1953,0", "--report", str(report))
    assert code == 0
    assert "1953      0.0532          0.0533" in out
    assert "no bound  0.3664          0.3664" in out
    assert "TTFT" not in out  # nothing was run
    assert "Hit rate by capacity" in report.read_text()
    code, _, err = run(capsys, AZURE, "--capacity-sweep", "5")
    assert (code, "needs a trace with hash_ids" in err) == (2, True)


class _Page(HTMLParser):
    """Open elements, and whatever would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.polylines = 0
        self.points: list[tuple[float, float]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        self.loads += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "onload")]
        self.polylines += tag == "polyline"
        if tag not in ("meta", "rect", "line", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.polylines += tag == "polyline"
        points = dict(attrs).get("points") or ""
        self.points += [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_file_that_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "<b>&.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{n},{50 + n},{n + 1}\n" for n in range(30)))
    report = tmp_path / "report.html"
    assert run(capsys, str(trace), "--policy=random,hybrid", "--report", str(report))[0] == 0
    text = report.read_text()
    page = _Page()
    page.feed(text)
    assert (page.open, page.loads) == ([], [])
    assert page.polylines == 6 * 2
    assert all(0 <= x <= html_report.WIDTH and 0 <= y <= html_report.HEIGHT for x, y in page.points)
    assert len({y for _, y in page.points}) > 20  # the lines are not flat
    assert "prefers-color-scheme: dark" in text
    assert "<b>&" not in text
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text.lower())
    assert "url(" not in text
    assert "http" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: TRACE"),
        (["--policy=hybrid"], "required: TRACE"),
        (["nowhere.csv"], "nowhere.csv cannot be read"),
        ([AZURE, "--policy=best"], "--policy is 'best' but must be"),
        ([AZURE, "--policy"], "--policy: expected one argument"),
        ([AZURE, "--profile=gpt-9"], "there is no profile 'gpt-9'"),
        ([AZURE, "--speed=0"], "--speed is '0' but must be"),
        ([AZURE, "--nothing"], "tandem replay has no flag --nothing"),
        ([AZURE, "--limit=5", "--json=/nowhere/a.json"], "/nowhere/a.json cannot be written"),
        ([AZURE, "--prefill-tokens-per-s=5", "--decode-step-s=0"], "a decode step must take some time"),
    ],
)
def test_wrong_input_is_exit_code_2_and_says_what(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_the_command_loads_neither_torch_nor_grpc() -> None:
    program = "import sys, cli.replay; sys.exit(int('torch' in sys.modules or 'grpc' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=HANG_LIMIT_S).returncode == 0


def test_help_explains_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["replay", "--help"])
    assert ending.value.code == 0
    out = capsys.readouterr().out
    assert "TRACE " in out
    assert "--capacity-sweep" in out


def test_long_runs_say_how_far_they_are_and_short_ones_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, AZURE, "--limit=500")[2] == ""
    _, _, err = run(capsys, AZURE, "--limit=5000")
    assert len(err.splitlines()) == 10
    assert "of 5000 requests ended" in err


def mean_ttfts(found: dict[str, Any]) -> dict[str, float]:
    hits = {one["policy"]: one["hit_rate"] for one in found["runs"]}
    assert list(hits) == ["random", "least_loaded", "prefix_aware", "hybrid"]
    assert min(hits["hybrid"], hits["prefix_aware"]) > 2 * max(hits["random"], hits["least_loaded"])
    return {one["policy"]: one["ttft_s"]["mean"] for one in found["runs"]}


def test_looking_at_caches_beats_looking_at_load_beats_looking_at_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    means = mean_ttfts(numbers(capsys, tmp_path, MOONCAKE, *PAPER_LIKE, "--limit=3000", "--speed=2", "--policy=all"))
    assert means["random"] > means["least_loaded"] > 3 * max(means["prefix_aware"], means["hybrid"])


@pytest.mark.slow
@pytest.mark.parametrize("speed", ["1", "1.5", "1.8", "2"])
def test_the_ladder_is_that_of_mooncake(tmp_path: Path, capsys: pytest.CaptureFixture[str], speed: str) -> None:
    """Random, load, local prefix, hybrid: the order of figure 8 in arXiv:2407.00079v4 (FAST 2025: figure 5)."""
    words = [MOONCAKE, *PAPER_LIKE, f"--speed={speed}", "--policy=all"]
    means = mean_ttfts(numbers(capsys, tmp_path, *words))
    assert means["random"] > means["least_loaded"] > means["prefix_aware"] > means["hybrid"]


def test_the_table_has_the_papers_ratios_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, MOONCAKE, "--limit=200", "--policy=all")
    assert code == 0
    assert "PAPER ×" in out
    assert "14.71" in out
