"""Step times: the closed forms against the measurements that they were fitted to."""

import csv
import gzip
from pathlib import Path

import pytest

from planning.simulator.profiles import PROFILES_FOLDER, linear_profile, profile, profiles
from services.runtime.errors import ConfigError
from services.scheduling.prediction import DecodeSpeed


def measured(phase: str) -> list[dict[str, str]]:
    with gzip.open(PROFILES_FOLDER / "aiconfigurator" / "aic_llama31_latency.csv.gz", "rt") as file:
        return [row for row in csv.DictReader(file) if row["phase"] == phase and "8B" in row["model"]]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_closed_forms_are_close_to_what_they_were_fitted_to(phase: str) -> None:
    errors = []
    for row in measured(phase):
        one = profile(f"h100-llama-3.1-8b-{row['precision']}-tp{row['tp']}")
        batch, tokens, latency_s = int(row["batch"]), int(row["tokens"]), float(row["latency_ms"]) / 1e3
        if phase == "prefill":
            if batch > 1 or tokens < 256:
                continue
            predicted_s = one.law.prefill.time_s(tokens)
        else:
            predicted_s = one.law.decode_at(batch).step_s(batch, batch * tokens)
        errors.append(abs(predicted_s / latency_s - 1))
    assert len(errors) > 10
    assert sum(errors) / len(errors) < 0.05


def test_distserve_switches_its_law_at_a_batch_of_95() -> None:
    law = profile("opt-13b").law
    assert law.decode_at(94).step_s(94, 1000) == pytest.approx(
        (19.9347 + 0.000626936 * 1000 + 0.038507 * 94) / 1e3, rel=1e-5
    )
    assert law.decode_at(95).step_s(95, 1000) == pytest.approx(
        (7.16619 + 0.0005798 * 1000 + 0.158311 * 95) / 1e3, rel=1e-5
    )
    assert profile("opt-13b").law.prefill.time_s(512) == pytest.approx(
        (18.10255 + 0.1019123 * 512 + 7.122264e-6 * 512**2) / 1e3, rel=1e-6
    )


def test_every_profile_has_times_and_bytes_that_make_sense() -> None:
    known = profiles()
    assert len(known) == 8 + 7 + 2 + 2
    for one in known.values():
        assert 0 < one.law.prefill.time_s(1) < one.law.prefill.time_s(1000) <= one.law.prefill.time_s(1000, 5000)
        assert 0 < one.law.decode_at(1).step_s(1, 100) < one.law.decode_at(500).step_s(500, 10**6)
        assert one.kv_bytes_per_token > 10_000


def test_an_unknown_name_lists_the_known_ones_and_a_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no profile 'gpt-9'.*llama-3\.1-8b, .*h100-llama-3\.1-70b-bf16-tp4"):
        profile("gpt-9")
    with pytest.raises(ConfigError, match=r"there are: llama"):
        profile("llama-3.1-8b", tmp_path)
    folder = tmp_path / "distserve"
    folder.mkdir()
    for broken in ("{", '{"m/opt-13b": {"1": {}}}', '{"m/opt-13b": {"1": {"prefill": [1, 2, "x"]}}}', "[1]"):
        (folder / "profiler-a100-80g.distserve.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"distserve\.json"):
            profiles(tmp_path)


def test_the_linear_model_is_a_line() -> None:
    one = linear_profile(10_000, 0.02, DecodeSpeed(0.01, 1e-3), 0)
    assert one.law.prefill.time_s(500) == pytest.approx(0.02 + 0.05)
    assert one.law.decode_at(3).step_s(3, 10**6) == pytest.approx(0.013)
