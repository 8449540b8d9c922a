"""The kinds of values that settings have: how each one's text is read, and the rule that it keeps."""

import dataclasses
import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from services.runtime.addresses import RAW_DELIMITER_RULE, has_raw_delimiter, is_ipv6

MAX_COUNT = 4096
MAX_DISTANCE_S = 60.0
_PLACE = r"[A-Za-z0-9_.-]{1,64}"

_NAME = r"(?:\*\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*"
_ORIGIN = r"[a-z][a-z0-9+.-]*://[^/,\s]+"
HOSTS = rf"\*|{_NAME}(?:,{_NAME})*"
"""Patterns, and the rules in words, of settings that name hosts and the origins of web pages."""
HOSTS_RULE = "names of hosts with commas between them, *.NAME for all below a name, or *"
ORIGINS = rf"\*|{_ORIGIN}(?:,{_ORIGIN})*"
ORIGINS_RULE = "origins such as https://chat.example with commas between them, or *"

T = TypeVar("T")

_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value: how its text is read and which rule it keeps. `parse` raises ValueError."""

    parse: Callable[[str], T]
    rule: str
    metavar: str = "TEXT"
    """The value's placeholder in `--help`, unless the setting's name ends in a unit."""
    choices: tuple[str, ...] = ()
    is_flag: bool = False
    """The flag takes no value: `--name` and `--no-name`."""
    short: str = ""
    """A second, short name of the flag, such as -v."""
    is_list: bool = False
    """The flag may be given several times."""
    is_positional: bool = False
    """The value is an argument without a flag's name."""
    may_hold_secret: bool = False
    """The value is left out of the `repr` of its settings, as part of it may be a password."""
    is_secret: bool = False
    """The value has no flag, as everybody on the machine can read command lines."""
    written: Callable[[T], str] = str
    """Writes a value as a text that `parse` takes."""


def text(*, pattern: str | None = None, rule: str = "a text that is not empty") -> Kind[str]:
    """A text that is not empty and, where given, matches the whole pattern."""

    def parse(value: str) -> str:
        _require(bool(value) and (pattern is None or re.fullmatch(pattern, value) is not None))
        return value

    return Kind(parse, rule)


def integer(minimum: int, maximum: int | None = None) -> Kind[int]:
    """A whole number in [minimum, maximum]."""

    def parse(value: str) -> int:
        number = int(value)
        _require(number >= minimum and (maximum is None or number <= maximum))
        return number

    upper = "" if maximum is None else f" and at most {maximum}"
    return Kind(parse, f"a whole number of at least {minimum}{upper}", metavar="N")


def number(minimum: float, maximum: float = math.inf) -> Kind[float]:
    """A finite number in [minimum, maximum]."""

    def parse(value: str) -> float:
        parsed = float(value)
        _require(math.isfinite(parsed) and minimum <= parsed <= maximum)
        return parsed

    upper = "" if maximum == math.inf else f" and at most {maximum:g}"
    return Kind(parse, f"a number of at least {minimum:g}{upper}", metavar="NUMBER")


def flag(*, short: str = "") -> Kind[bool]:
    """True or false; as a flag `--name` or `--no-name`."""
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }

    def parse(value: str) -> bool:
        _require(value.lower() in words)
        return words[value.lower()]

    return Kind(parse, "true or false", is_flag=True, short=short)


def choice(*names: str) -> Kind[str]:
    """One of several names."""

    def parse(value: str) -> str:
        _require(value in names)
        return value

    return Kind(parse, "one of " + ", ".join(names), metavar="NAME", choices=names)


def size_bytes(minimum: int = 1) -> Kind[int]:
    """A number of bytes, such as 4096, 64MiB or 2GiB."""

    def parse(value: str) -> int:
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?) ?([a-z]*)", value.strip().lower())
        _require(match is not None and match[2] in _SIZE_UNITS)
        assert match is not None
        size = (
            int(float(match[1]) * _SIZE_UNITS[match[2]]) if "." in match[1] else int(match[1]) * _SIZE_UNITS[match[2]]
        )
        _require(size >= minimum)
        return size

    def written(size: int) -> str:
        unit = next(unit for unit in ("TiB", "GiB", "MiB", "KiB", "") if size % _SIZE_UNITS[unit.lower()] == 0)
        return f"{size // _SIZE_UNITS[unit.lower()]}{unit}" if size else "0"

    return Kind(parse, f"a size of at least {minimum} bytes, such as 512MiB or 2GiB", metavar="BYTES", written=written)


def number_set() -> Kind[tuple[int, ...]]:
    """Whole numbers in order, from a text such as 0-3,8."""

    def parse(value: str) -> tuple[int, ...]:
        found: set[int] = set()
        for part in value.split(","):
            match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
            _require(match is not None)
            assert match is not None
            first, last = int(match[1]), int(match[2] or match[1])
            _require(first <= last)
            found.update(range(first, last + 1))
        return tuple(sorted(found))

    return Kind(parse, "numbers and ranges separated by commas, such as 0-3,8", metavar="NUMBERS")


def host_name() -> Kind[str]:
    """A host by its name or by its IPv4 or IPv6 address, and nothing else: neither brackets nor a port."""

    def parse(value: str) -> str:
        _require(re.fullmatch(r"[A-Za-z0-9._-]{1,255}", value) is not None or is_ipv6(value))
        return value

    return Kind(parse, "a name or an IP address, without brackets and without a port", metavar="HOST")


def counts(*names: str) -> Kind[Mapping[str, int]]:
    """Counts by name, as NAME=COUNT separated by commas; names may be left out."""

    def parse(value: str) -> Mapping[str, int]:
        pairs = [item.partition("=")[::2] for item in value.split(",")]
        found = {name: int(count) for name, count in pairs if count.isascii() and count.isdecimal()}
        _require(len(found) == len(pairs) and found.keys() <= set(names) and max(found.values()) <= MAX_COUNT)
        return found

    rule = f"one or more of {', '.join(f'{name}=COUNT' for name in names)}, separated by commas"
    return Kind(parse, rule, metavar="NAME=COUNT,…")


def distances() -> Kind[Mapping[tuple[str, str], float]]:
    """Seconds between two places, as A:B=SECONDS, separated by commas; each pair is in the result both ways round."""

    def parse(value: str) -> Mapping[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        for item in value.split(","):
            match = re.fullmatch(rf"({_PLACE}):({_PLACE})=([0-9]+(?:\.[0-9]+)?)", item.strip(), re.ASCII)
            _require(match is not None)
            assert match is not None
            here, there, seconds = match[1], match[2], float(match[3])
            _require(here != there and (here, there) not in found and seconds <= MAX_DISTANCE_S)
            found[here, there] = found[there, here] = seconds
        return found

    rule = f"one or more of A:B=SECONDS, separated by commas, each pair once, with at most {MAX_DISTANCE_S:g} seconds"
    return Kind(parse, rule, metavar="A:B=SECONDS,…", is_list=True)


def networks() -> Kind[str]:
    """Addresses and networks of IP with commas between them."""

    def parse(value: str) -> str:
        for one in value.split(","):
            ipaddress.ip_network(one.strip(), strict=False)
        return value

    return Kind(parse, "addresses or networks such as 10.0.0.0/8 with commas between them", metavar="NETWORKS")


def span(minimum: int) -> Kind[tuple[int, int]]:
    """Two whole numbers, MIN:MAX, of at least `minimum`, the second no less than the first."""

    def parse(value: str) -> tuple[int, int]:
        low, high = (int(part) for part in value.split(":"))
        _require(minimum <= low <= high <= MAX_COUNT)
        return low, high

    return Kind(parse, f"MIN:MAX, two whole numbers of at least {minimum}", metavar="MIN:MAX")


def folder() -> Kind[Path]:
    """The path of a folder on this machine."""
    return dataclasses.replace(path(), metavar="DIR")


def path(*, must_exist: bool = False) -> Kind[Path]:
    """A path on this machine."""

    def parse(value: str) -> Path:
        _require(bool(value) and "\0" not in value)
        found = Path(value).expanduser()
        _require(found.exists() or not must_exist)
        return found

    return Kind(parse, "a path that exists" if must_exist else "a path", metavar="FILE")


def url(*schemes: str) -> Kind[str]:
    """A URL of one of the schemes."""

    def parse(value: str) -> str:
        parts = urlsplit(value)
        _require(parts.scheme in schemes and bool(parts.netloc or parts.path.strip("/")))
        _ = parts.port
        return value

    rule = "a URL beginning with " + " or ".join(f"{scheme}://" for scheme in schemes)
    return Kind(parse, rule, metavar="URL", may_hold_secret=True)


def redis_url() -> Kind[str]:
    """Where a Redis is, or the sentinels that know where it is."""
    schemes = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")

    def parse(value: str) -> str:
        if has_raw_delimiter(value):
            raise BrokenRule(RAW_DELIMITER_RULE)
        if value.partition("://")[0] in schemes[3:]:
            parts = urlsplit(value)  # its port is no number, but may be several
            _require(bool(parts.netloc.rpartition("@")[2] and parts.path.strip("/")))
            return value
        return url(*schemes[:3]).parse(value)

    return Kind(
        parse,
        "a URL beginning with " + " or ".join(f"{scheme}://" for scheme in schemes) + "; of sentinels "
        "redis+sentinel://HOST,HOST:PORT/SERVICE",
        metavar="URL",
        may_hold_secret=True,
    )


def secret() -> Kind[str]:
    """A text that only a variable may hold, and that nobody is shown."""
    return Kind(text().parse, "a text that is not empty", is_secret=True)


def comma_separated(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """Several values of one kind, at least one, separated by commas."""

    def parse(value: str) -> tuple[T, ...]:
        return tuple(kind.parse(part.strip()) for part in value.split(","))

    rule = f"one or more, separated by commas, of: {kind.rule}"
    return Kind(parse, rule, metavar=f"{kind.metavar},…", choices=kind.choices, is_list=True)


def argument(kind: Kind[T]) -> Kind[T]:
    """A value that is given as an argument, without a flag and without a variable."""
    return dataclasses.replace(kind, is_positional=True)


class BrokenRule(ValueError):
    """A value breaks a rule that its kind does not state. The text is that rule, beginning with "must"."""


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("the value does not keep its rule")
