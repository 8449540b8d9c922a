"""The register of troubles: each is told when it begins and when it is over, and never in between."""

import logging

import pytest

from gateway.topology.troubles import _SAID, KINDS, Found, TroubleReport, Troubles


class Wall:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.unix_s = 1000.0

    def monotonic(self) -> float:
        return self.unix_s

    def unix_ns(self) -> int:
        return round(self.unix_s * 1e9)


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def told() -> list[tuple[TroubleReport, bool]]:
    return []


@pytest.fixture
def troubles(wall: Wall, told: list[tuple[TroubleReport, bool]]) -> Troubles:
    troubles = Troubles(clock=wall)
    troubles.listeners.append(lambda trouble, has_begun: told.append((trouble, has_begun)))
    return troubles


def test_each_is_told_once_when_it_begins_and_once_when_it_is_over(
    troubles: Troubles, wall: Wall, told: list[tuple[TroubleReport, bool]]
) -> None:
    troubles.begin("unreachable", "decode-0", "refused", "start it")
    wall.unix_s += 5
    troubles.begin("unreachable", "decode-0", "no route", "look at the network")
    assert troubles.all() == [TroubleReport("unreachable", "decode-0", "no route", "look at the network", 1000.0)]
    assert [(trouble.cause, has_begun) for trouble, has_begun in told] == [("refused", True)]
    troubles.end("unreachable", "decode-0")
    troubles.end("unreachable", "decode-0")
    assert troubles.all() == []
    assert [has_begun for _, has_begun in told] == [True, False]


def test_the_log_has_a_line_for_the_beginning_and_one_for_the_end(
    troubles: Troubles, wall: Wall, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        troubles.begin("redis", "redis", "timed out", "look at it")
        troubles.begin("redis", "redis", "refused", "look at it")
        wall.unix_s += 2.5
        troubles.end("redis", "redis")
    began, ended = caplog.records
    assert (began.levelname, began.getMessage()) == (
        "WARNING",
        "Redis does not answer or denies commands; no worker can join",
    )
    assert (began.__dict__["cause"], began.__dict__["remedy"]) == ("timed out", "look at it")
    assert (ended.getMessage(), ended.__dict__["lasted_s"]) == ("Redis answers again", 2.5)


def test_what_is_not_found_again_is_over(troubles: Troubles, told: list[tuple[TroubleReport, bool]]) -> None:
    troubles.begin("gone", "decode-1", "another kind", "stays")
    troubles.settle("clock", {"a": Found("fast", "set it"), "b": Found("slow", "set it")})
    troubles.settle("clock", {"b": Found("slow", "set it"), "c": Found("slow", "set it")})
    assert [(trouble.kind, trouble.subject) for trouble in troubles.all()] == [
        ("clock", "b"),
        ("clock", "c"),
        ("gone", "decode-1"),
    ]
    assert [(trouble.subject, has_begun) for trouble, has_begun in told] == [
        ("decode-1", True),
        ("a", True),
        ("b", True),
        ("a", False),
        ("c", True),
    ]
    assert troubles.counts()["clock"] == 2
    assert troubles.counts()["link"] == 0


def test_every_kind_has_its_words() -> None:
    assert set(_SAID) == set(KINDS) - {"circuit"}  # the part that opens circuits has lines of its own
