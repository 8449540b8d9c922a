"""Where a request's data may be."""

import pytest

from services.runtime.errors import PermissionDenied
from services.scheduling.regions import check_residency, named, narrows, permits, residency_of


def test_a_rule_is_the_same_whatever_its_order() -> None:
    assert residency_of(["us", "eu", "us"]) == ("eu", "us")
    assert named(("eu",)) == "the region eu"
    assert named(("a", "eu", "us")) == "the regions a, eu and us"


def test_what_has_no_region_is_in_none_of_a_rule() -> None:
    assert [permits(("eu", "us"), region) for region in ("eu", "ap", "")] == [True, False, False]
    assert [permits((), region) for region in ("eu", "")] == [True, True]


def test_what_is_asked_for_may_only_narrow() -> None:
    rule = ("eu", "us")
    assert [narrows(asked, rule) for asked in (("eu",), rule, ("ap", "eu"), ("ap",), ())] == [True, True, *[False] * 3]
    assert narrows(("ap",), ()), "a tenant without a rule may be held anywhere"


@pytest.mark.parametrize(("region", "where"), [("us", "in the region us"), ("", r"in no region \(--region\)")])
def test_a_gateway_elsewhere_names_the_rule_and_both_regions(region: str, where: str) -> None:
    check_residency(("eu",), "eu", held="residency of tenant acme")
    words = rf"held to the region eu \(residency of tenant acme\), and this gateway is {where}"
    with pytest.raises(PermissionDenied, match=words) as caught:
        check_residency(("eu",), region, held="residency of tenant acme")
    assert caught.value.code == "wrong_region"
