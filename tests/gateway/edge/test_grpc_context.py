"""What a gRPC call says beside its message: texts only, and one key."""

from types import SimpleNamespace

import pytest

from gateway.edge.grpc_context import add_limits, authenticate, metadata
from services.runtime.errors import Unauthenticated


class Context:
    def __init__(self, *said):
        self.said = said
        self.trailing = None

    def invocation_metadata(self):
        return self.said or None

    def set_trailing_metadata(self, told):
        self.trailing = told


class Door:
    """Takes one value, as the real method does."""

    def authenticate(self, shown):
        if len(shown) != 1 or shown[0] != "Bearer good":
            raise Unauthenticated("no key")
        return "the key"


def test_a_text_beside_the_request_is_found_by_its_name():
    context = Context(("a", "1"), ("b-bin", b"2"), ("a", "3"))
    assert [metadata(context, name) for name in ("a", "b-bin", "c")] == ["1", "", None]
    assert metadata(Context(), "a") is None


def test_the_caller_shows_one_key():
    assert authenticate(Door(), Context(("x", "y"), ("authorization", "Bearer good"))) == "the key"
    good = ("authorization", "Bearer good")
    for said in ((), (good, good), (("authorization", b"Bearer good"),)):
        with pytest.raises(Unauthenticated):
            authenticate(Door(), Context(*said))


def test_what_is_left_of_limits_comes_at_the_end_where_there_are_limits():
    for ticket, trailing in (
        (None, None),
        (SimpleNamespace(headers=[]), None),
        (
            SimpleNamespace(headers=[("x-ratelimit-remaining-requests", "3")]),
            (("x-ratelimit-remaining-requests", "3"),),
        ),
    ):
        add_limits(context := Context(), ticket)
        assert context.trailing == trailing
