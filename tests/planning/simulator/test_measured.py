"""Files of measured step times: the law is found again, and what is no such file is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planning.simulator.laws import LinearLaw
from planning.simulator.measured import Measured, PromptTime, StepTime, read_measured
from services.runtime.errors import ConfigError
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed

PROMPT, STEP, LINK = PrefillSpeed(0.002, 1e-4, 1e-8), DecodeSpeed(0.01, 2e-4, 1e-7), LinkSpeed(0.003, 1e9)
KV_BYTES = 1000


def measured() -> Measured:
    """What exactly these speeds would be measured as."""
    sizes = (32, 128, 512, 2048)
    return Measured(
        name="demo",
        prompts=[PromptTime(n, PROMPT.time_s(n), STEP.step_s(1, n) + LINK.time_s(n * KV_BYTES)) for n in sizes],
        steps=[StepTime(b, b * c, STEP.step_s(b, b * c)) for b in (1, 4, 16) for c in (50, 600)],
        kv_bytes_per_token=KV_BYTES,
        kv_tokens=10_000,
        max_batch=16,
    )


def test_the_speeds_that_were_measured_are_found_again(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    file.write_text(json.dumps(measured().document()))
    profile = read_measured(file).profile
    law = profile.law
    assert isinstance(law, LinearLaw)
    assert law.prefill.time_s(1000) == pytest.approx(PROMPT.time_s(1000), rel=1e-6)
    assert law.small.step_s(8, 4000) == pytest.approx(STEP.step_s(8, 4000), rel=1e-6)
    assert profile.link is not None
    assert profile.link.time_s(10**6) == pytest.approx(LINK.time_s(10**6), rel=1e-6)
    assert profile.errors[0].startswith("prompts: error mean 0.0%")


def test_each_way_of_a_prompt_has_its_own_line_and_what_no_step_takes_is_outside_of_workers() -> None:
    local, remote = PrefillSpeed(0.025, 5e-5, 1e-8), PrefillSpeed(0.035, 1e-4, 1e-8)
    whole, sizes = measured(), (32, 128, 512, 2048)
    prompts = [PromptTime(n, local.time_s(n), STEP.step_s(1, n), "local") for n in sizes]
    prompts += [PromptTime(n, remote.time_s(n), STEP.step_s(1, n) + LINK.time_s(n * KV_BYTES), "remote") for n in sizes]
    profile = replace(whole, prompts=prompts).profile
    step_s = STEP.step_s(1, 0)
    assert isinstance(profile.law, LinearLaw)
    assert isinstance(profile.decode_law, LinearLaw)
    assert profile.law.prefill.time_s(1000) == pytest.approx(remote.time_s(1000) - 0.035 + step_s)
    assert profile.decode_law.prefill.time_s(1000) == pytest.approx(local.time_s(1000) - 0.025 + step_s)
    assert profile.outside_s == pytest.approx((0.035 - step_s, 0.025 - step_s))
    assert profile.link is not None
    assert profile.link.time_s(10**6) == pytest.approx(LINK.time_s(10**6)), "a local prompt goes over no link"
    assert [error.split(":")[0] for error in profile.errors] == ["prompts", "prompts at decode workers", "decode steps"]


def test_without_a_link_that_can_be_told_transfers_take_what_second_tokens_waited_for() -> None:
    whole = measured()
    quick = Measured(
        name="demo",
        prompts=[PromptTime(one.tokens, one.first_s, 0.0) for one in whole.prompts],
        steps=whole.steps,
        kv_bytes_per_token=0,
        kv_tokens=0,
        max_batch=0,
    )
    assert quick.profile.link == LinkSpeed(0.0, float("inf"))


PROMPTS = measured().document()["prompts"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "has the format 'other'"),
        ({"prompts": []}, "fewer than 3"),
        ({"steps": [{"sequences": 1, "context_tokens": 5, "step_s": float("nan")}] * 3}, "no time"),
        ({"prompts": None}, "is not a file of step times"),
        ({"prompts": [*PROMPTS, {**PROMPTS[0], "way": "local"}]}, "fewer than 3"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**measured().document(), **change}))
    with pytest.raises(ConfigError, match=said):
        read_measured(file)
    document = measured().document()
    del document["kv_tokens"]
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="'kv_tokens' is missing"):
        read_measured(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measured(tmp_path / "none")
