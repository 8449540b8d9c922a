"""The kinds of values: which texts are read, and which break the rule."""

from pathlib import Path

import pytest

from services.runtime.kinds import distances, number_set, path, redis_url, size_bytes


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", (3,)), ("0-3,8", (0, 1, 2, 3, 8)), ("8, 1-2,2", (1, 2, 8)), ("5-5", (5,))]
)
def test_sets_of_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert number_set().parse(text) == numbers


@pytest.mark.parametrize("text", ["", ",", "1,", "3-1", "-1", "0-99999999", "a", "1-2-3"])
def test_no_sets_of_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="rule"):
        number_set().parse(text)


def test_distances_are_the_same_both_ways() -> None:
    assert distances().parse("eu:us=0.08, eu:ap=1") == {
        ("eu", "us"): 0.08,
        ("us", "eu"): 0.08,
        ("eu", "ap"): 1.0,
        ("ap", "eu"): 1.0,
    }


@pytest.mark.parametrize(
    "text", ["", "eu:us", "eu:us=", "eu=1", "eu:eu=1", "eu:us=-1", "eu:us=nan", "eu:us=1e3", "eu:us=61", "a:b=1,b:a=1"]
)
def test_no_distances(text: str) -> None:
    with pytest.raises(ValueError, match="rule"):
        distances().parse(text)


def test_paths_may_have_to_exist(tmp_path: Path) -> None:
    assert path(must_exist=True).parse(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="rule"):
        path(must_exist=True).parse(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("size", "expected"),
    [("1", 1), ("1b", 1), ("4096", 4096), ("64MiB", 64 * 2**20), ("1.5 gib", 3 * 2**29), ("2GB", 2 * 10**9)],
)
def test_sizes(size: str, expected: int) -> None:
    assert size_bytes().parse(size) == expected


def test_a_redis_url_is_of_one_server_or_of_sentinels() -> None:
    kind = redis_url()
    for good in ("redis://h", "rediss://u:p@h:1/2", "unix:///s", "redis+sentinel://u:p@a,b:1,[::1]:2/service?x=y"):
        assert kind.parse(good) == good
    for bad in (
        "http://h",
        "redis://",
        "redis://h:port",
        "redis+sentinel://a,b",
        "redis+sentinel:///s",
        "sentinel://a/s",
    ):
        with pytest.raises(ValueError, match=r"rule|Port"):
            kind.parse(bad)
