"""The flags of simulated regions, as `tandem replay` and `tandem plan` take them."""

import json
from pathlib import Path

import pytest

from cli.main import main

WORKERS = ["--prefill", "4", "--decode", "4", "--regions", "eu,us", "--region-distance", "eu:us=0.08"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 requests a second for 30 s; half come from ap, where no worker is, and every tenth of all is held to eu."""
    rows = [f"{0.05 * n:.2f},300,50,{'ap' if n % 2 else ''},{'eu' if n % 10 == 0 else ''}" for n in range(600)]
    file = tmp_path_factory.mktemp("regions") / "trace.csv"
    file.write_text("\n".join(["arrival_s,input_tokens,output_tokens,region,residency", *rows]) + "\n")
    return file


def test_a_lost_region_refuses_what_is_held_there_until_it_is_back(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name, words in {"whole": [], "lost": ["--lose-region", "eu@10+10"], "gone": ["--lose-region", "eu@10"]}.items():
        assert main(["replay", str(trace), *WORKERS, *words, "--json", str(tmp_path / name)]) == 0
        found[name] = json.loads((tmp_path / name).read_text())["runs"][0]
    told = capsys.readouterr().out
    refused = {name: sum(one["requests"]["refused"].values()) for name, one in found.items()}
    assert refused["whole"] == 0 < refused["lost"] < refused["gone"]
    assert refused["gone"] == pytest.approx(40, abs=4), "the held ones of the last 20 s"
    assert all(set(one["requests"]["refused"]) <= {"no_worker"} for one in found.values())
    assert set(found["lost"]["regions"]) == {"ap", "eu", "us"}
    assert found["lost"]["regions"]["ap"]["requests"] == {"all": 300, "answered": 300, "refused": {}}
    assert "from ap      300, answered 300, refused none; ttft mean" in told


def test_the_ways_of_requests_count(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", str(trace), *WORKERS[:-1], "eu:us=0.5", "--json", str(tmp_path / "x")]
    assert main(words) == 0
    document = json.loads((tmp_path / "x").read_text())
    regions = document["runs"][0]["regions"]
    # From ap it is 0.1 s, as is not said otherwise, to either region.
    assert regions["ap"]["ttft_s"]["p50"] > regions["us"]["ttft_s"]["p50"] + 0.09
    assert document["parameters"]["region_distance"] == {"eu:us": 0.5, "us:eu": 0.5}
    assert main(["replay", str(trace)]) == 0, "a cluster without regions serves all that is held nowhere"
    assert "60 no_worker" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--regions", "eu,us", "--lose-region", "ap@3"], "region ap of --lose-region"),
        (["--regions", "eu,us", "--lose-region", "eu"], "REGION@SECONDS"),
        (["--regions", "eu,us", "--lose-region", "eu@1.2.3"], "REGION@SECONDS"),
        (["--region-distance", "eu:us=1"], "region eu of --region-distance"),
        (["--residency-share", "0.5"], "needs --regions"),
        (["--regions", "eu,a b"], "--regions"),
    ],
)
def test_wrong_regions_are_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["replay", str(trace), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_says_what_a_lost_region_does(tmp_path: Path) -> None:
    asked = ["plan", "--kinds", "h100-llama-3.1-70b-fp8-tp2", "--rate", "10", "--input", "500", "--output", "100"]
    asked += ["--e2e", "6"]
    plans = {}
    for name, words in {"free": [], "held": ["--residency-share", "0.2"]}.items():
        assert main([*asked, "--regions", "eu,us", *words, "--json", str(tmp_path / name)]) == 0
        plans[name] = json.loads((tmp_path / name).read_text())["one_pool"]
    assert plans["held"]["workers"]["decode"] >= 2, "each region has a worker for what is held there"
    assert plans["held"]["lost"]["region eu"][0] == "what is held there"
    if plans["free"]["workers"]["decode"] > 1:
        assert "what is held there" not in plans["free"]["lost"]["region us"]
