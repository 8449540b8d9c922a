"""When the stronger model of a tier answers."""

import re
import threading

import pytest

from gateway.models import tiers
from gateway.models.tiers import Tier, load_classifier
from services.runtime.errors import ConfigError
from tests.waiting import HANG_LIMIT_S


def is_hard(text: str) -> bool:
    """A classifier."""
    if "fail" in text:
        raise OSError("the classifier's model is away")
    return "prove" in text


async def test_long_prompts_and_what_the_classifier_says_begin_with_the_stronger_model() -> None:
    tier = Tier("auto", "large", long_prompt_chars=10, classifier=is_hard)
    assert await tier.why_stronger(["12345", "6789"]) == ""
    assert await tier.why_stronger(["12345", "67890"]) == "long_prompt"
    assert await tier.why_stronger(["prove it"]) == "classifier"
    assert await Tier("auto", "large", checks=("json",)).why_stronger(["prove it" * 100]) == ""


async def test_a_classifier_that_fails_or_takes_too_long_leaves_the_cheap_model(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await Tier("auto", "large", classifier=is_hard).why_stronger(["fail"]) == ""
    monkeypatch.setattr(tiers, "CLASSIFIER_S", 0.05)
    end = threading.Event()
    assert await Tier("auto", "large", classifier=lambda text: end.wait(HANG_LIMIT_S)).why_stronger(["x"]) == ""
    end.set()
    assert [record.__dict__["error"].partition(":")[0] for record in caplog.records] == ["OSError", "TimeoutError"]


@pytest.mark.parametrize(
    ("text", "finish_reason", "failed"),
    [
        ('{"a": 1}', "stop", ""),
        ('{"a": 1}', "length", "finished"),
        ('{"a": 1', "stop", "json"),
        ("[" * 100_000, "stop", "json"),
        ('{"b": 1}', "stop", "pattern"),
    ],
)
def test_a_complete_answer_passes_all_checks_or_fails_the_first(text: str, finish_reason: str, failed: str) -> None:
    tier = Tier("auto", "large", checks=("finished", "json"), pattern=re.compile('"a"'))
    assert tier.has_check
    assert tier.failed_check(text, finish_reason) == failed
    assert Tier("auto", "large", long_prompt_chars=1).failed_check("", "length") == ""


def test_a_classifier_is_imported_by_its_place() -> None:
    assert load_classifier("json:loads")("true") is True
    for place, rule in (("json:nothing", "nothing"), ("no_such_module:f", "no_such_module"), ("json:__name__", "no f")):
        with pytest.raises(ConfigError, match=rule):
            load_classifier(place)
