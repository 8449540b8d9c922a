"""What has the last word instead of the price."""

import pytest

from services.scheduling.disaggregation import DisaggregationSettings


def test_without_a_rule_the_price_decides():
    how = DisaggregationSettings()
    assert how.rule(10**9) is None
    assert how.for_choice("auto") is how


@pytest.mark.parametrize(
    ("lacking", "threshold", "is_remote"),
    [(4000, 0, True), (1, 0, True), (4000, 4000, False), (4000, 3999, True), (1000, 1000, False), (1001, 1000, True)],
)
def test_a_fixed_threshold(lacking, threshold, is_remote):
    how = DisaggregationSettings(local_prefill_tokens=threshold)
    assert how.rule(lacking) == ("long_prompt" if is_remote else "short_prompt", is_remote)


def test_a_choice_is_for_every_prompt_whatever_the_threshold():
    how = DisaggregationSettings(local_prefill_tokens=100)
    for lacking in (1, 100, 10**9):
        assert how.for_choice("local").rule(lacking) == ("asked_local", False)
        assert how.for_choice("remote").rule(lacking) == ("asked_remote", True)
