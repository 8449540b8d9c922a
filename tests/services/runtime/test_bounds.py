import math

import pytest

from services.runtime.bounds import SMALLEST_FLOAT, Bounds, invalid_value
from services.runtime.errors import InvalidRequest

COUNT = Bounds(int, -1, 20)
SHARE = Bounds(float, SMALLEST_FLOAT, 1)


@pytest.mark.parametrize("value", [-1, 0, 20])
def test_integers_within_the_bounds_are_admitted(value):
    assert COUNT.admits(value)
    COUNT.check(value, "n")


@pytest.mark.parametrize("value", [-2, 21, 10**40, 1.0, True, "1", None, math.nan])
def test_other_values_are_no_such_integers(value):
    assert not COUNT.admits(value)


@pytest.mark.parametrize("value", [SMALLEST_FLOAT, 1e-38, 0.5, 1, 1.0])
def test_numbers_within_the_bounds_are_admitted(value):
    assert SHARE.admits(value)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 5e-324, 1e-46, 1.0000001, 10**400])
def test_numbers_outside_the_bounds_are_not_admitted(value):
    assert not SHARE.admits(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, False, "0.5"])
def test_other_values_are_no_such_numbers(value):
    assert not SHARE.admits(value)


def test_the_error_names_field_value_and_rule():
    with pytest.raises(InvalidRequest) as caught:
        SHARE.check(1.5, "top_p")
    assert caught.value.message == "top_p is 1.5 but must be a number in [1.4013e-45, 1]"
    assert (caught.value.field, caught.value.code) == ("top_p", "invalid_value")
    assert COUNT.rule == "an integer in [-1, 20]"


def test_a_long_value_is_cut_in_the_error():
    message = invalid_value("n", "x" * 100, "short").message
    assert message == f"n is '{'x' * 63}… but must be short"
    assert invalid_value("n", 10**5000, "short").message == "n is a huge integer but must be short"


def test_the_schema_has_the_same_bounds():
    assert COUNT.schema == {"minimum": -1, "maximum": 20}
    assert SHARE.schema == {"minimum": SMALLEST_FLOAT, "maximum": 1}


@pytest.mark.parametrize("bounds", [(0.1, 1), (0, 1e-46), (0, 1e39)])
def test_a_bound_that_the_wire_rounds_is_a_mistake(bounds):
    with pytest.raises((AssertionError, OverflowError)):
        Bounds(float, *bounds)
