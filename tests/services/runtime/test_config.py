"""Settings from flags, environment and defaults; every error names key, value and rule."""

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest

from services.runtime.config import load, option
from services.runtime.errors import ConfigError
from services.runtime.kinds import (
    argument,
    choice,
    comma_separated,
    flag,
    integer,
    number,
    path,
    size_bytes,
    text,
    url,
)


@dataclass(frozen=True)
class Settings:
    """Settings of a test."""

    model: str = option(text(), help="What to serve.")
    kv_pages: int | None = option(integer(1, 1000), default=None, help="Pages of the pool, 100 % of it.")
    kv_memory: int = option(size_bytes(), default=2**30, help="Size of the pool.")
    ratio: float = option(number(0, 1), default=0.5, help="A share.")
    transport: str = option(choice("auto", "shm", "tcp"), default="auto", help="How to send.")
    verbose: bool = option(flag(), default=False, help="Says more.")
    redis: str | None = option(url("redis", "unix"), default=None, help="Which Redis.")
    tags: tuple[str, ...] = option(comma_separated(text()), default=(), help="Some.")
    derived: int = 7


def loaded(*argv: str, **environ: str) -> Settings:
    return load(Settings, argv, prog="test", environ=environ)


def test_defaults_flags_and_environment() -> None:
    settings = loaded("--model", "m")
    assert settings == Settings(model="m")
    assert settings.kv_memory == 2**30
    settings = loaded("--kv-pages=5", "--ratio", "1", TANDEM_MODEL="env", TANDEM_KV_PAGES="9", TANDEM_RATIO="")
    assert (settings.model, settings.kv_pages, settings.ratio) == ("env", 5, 1.0)
    with pytest.raises(FrozenInstanceError):
        settings.model = "other"  # type: ignore[misc]


def test_every_kind_is_read() -> None:
    settings = loaded(
        *("--model", "m", "--kv-memory", "2GiB", "--transport", "tcp"),
        *("--verbose", "--redis", "unix:///tmp/x.sock", "--tags", "a, b"),
    )
    assert settings.kv_memory == 2 * 2**30
    assert settings.verbose
    assert settings.tags == ("a", "b")
    assert not loaded("--model", "m", "--no-verbose", TANDEM_VERBOSE="1").verbose
    assert loaded("--model", "m", TANDEM_VERBOSE="Yes").verbose


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        ((), {}, ["--model", "TANDEM_MODEL", "required"]),
        (("--model", ""), {}, ["--model", "''", "not empty"]),
        (("--kv-pages", "0"), {}, ["--kv-pages", "'0'", "at least 1 and at most 1000"]),
        (("--kv-pages", "1001"), {}, ["'1001'", "1000"]),
        (("--kv-pages", "x"), {}, ["--kv-pages", "'x'", "whole number"]),
        (("--kv-pages", "1.5"), {}, ["whole number"]),
        (("--kv-pages", "9" * 5000), {}, ["--kv-pages", "…"]),
        ((), {"TANDEM_MODEL": "m", "TANDEM_KV_PAGES": "-3"}, ["TANDEM_KV_PAGES", "'-3'", "at least 1"]),
        (("--ratio", "nan"), {}, ["--ratio", "'nan'"]),
        (("--ratio", "inf"), {}, ["--ratio", "'inf'"]),
        (("--ratio", "1.01"), {}, ["at most 1"]),
        (("--kv-memory", "2XB"), {}, ["--kv-memory", "'2XB'", "512MiB"]),
        (("--kv-memory", "0"), {}, ["at least 1 bytes"]),
        (("--transport", "pigeon"), {}, ["'pigeon'", "auto, shm, tcp"]),
        (("--redis", "http://x"), {}, ["'http://x'", "redis:// or unix://"]),
        (("--redis", "redis://u:secret@x:port"), {}, ["redis://***@x:port"]),
        (("--tags", "a,,b"), {}, ["--tags"]),
        ((), {"TANDEM_MODEL": "m", "TANDEM_VERBOSE": "maybe"}, ["TANDEM_VERBOSE", "'maybe'", "true or false"]),
        (("--nonsense", "1"), {}, ["--nonsense"]),
        (("--mod", "m"), {}, ["--mod"]),
        (("--model",), {}, ["--model", "expected one argument"]),
        (("--model", "m", "stray"), {}, ["stray"]),
    ],
)
def test_errors_name_key_value_and_rule(argv: tuple[str, ...], environ: dict[str, str], parts: list[str]) -> None:
    if "--model" not in argv and argv and argv[0] != "--mod":
        argv = ("--model", "m", *argv)
    with pytest.raises(ConfigError) as caught:
        loaded(*argv, **environ)
    for part in parts:
        assert part in caught.value.message
    assert "secret" not in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600


def test_a_negative_number_is_a_value_and_not_a_flag() -> None:
    @dataclass(frozen=True)
    class Negative:
        """Settings."""

        seed: int = option(integer(-(2**63), 2**63 - 1), default=0, help="Seed.")

    assert load(Negative, ["--seed", "-5"], prog="test", environ={}).seed == -5


def test_help_names_flags_variables_rules_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        loaded("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("Settings of a test.", "--kv-pages", "[TANDEM_KV_PAGES]", "at most 1000", "100 %", "Default: auto"):
        assert part in shown
    assert "derived" not in shown


def test_what_prints_settings_shows_no_password() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        redis: str = option(url("redis"), help="Where.")
        collector: str | None = option(url("https"), default=None, help="Where.")
        name: str = option(text(), default="n", help="Who.")

    read = load(Settings, ["--redis=redis://:s3cret@host", "--collector=https://u:t0ken@host"], prog="p")
    assert "s3cret" not in repr(read)
    assert "t0ken" not in repr(read)
    assert "name='n'" in repr(read)


def test_a_misspelt_variable_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    loaded("--model", "m", TANDEM_KV_PAEGS="1", TANDEM_QUITE_DIFFERENT="1", KV_PAGE="1", TANDEM_TAGS="a")
    (record,) = caplog.records
    assert record.getMessage() == "TANDEM_KV_PAEGS is not a setting of this program; did you mean TANDEM_KV_PAGES?"


def test_a_misspelt_flag_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"test has no flag --kv-page; did you mean --kv-pages\? \(see test --help\)"):
        loaded("--model", "m", "--kv-page=3")


def test_a_list_may_be_given_in_several_flags_and_an_argument_has_no_variable() -> None:
    @dataclass(frozen=True)
    class Listed:
        """Settings."""

        file: Path = option(argument(path()), help="What to read.")
        names: tuple[str, ...] = option(comma_separated(choice("a", "b", "c")), default=(), help="Some.")
        loud: bool = option(flag(short="-l"), default=False, help="More.")

    read = load(Listed, ["--names=a,b", "f", "--names", "c", "-l"], prog="test", environ={"TANDEM_NAMES": "x"})
    assert read == Listed(Path("f"), ("a", "b", "c"), loud=True)
    with pytest.raises(ConfigError, match="FILE"):
        load(Listed, [], prog="test", environ={"TANDEM_FILE": "f"})


def test_help_says_how_what_is_on_is_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Switches:
        """Settings."""

        pin: bool = option(flag(), default=True, help="Pins.")
        loud: bool = option(flag(), default=False, help="More.")

    with pytest.raises(SystemExit):
        load(Switches, ["--help"], prog="test")
    shown = " ".join(capsys.readouterr().out.split())
    assert "Pins. Default: on; --no-pin turns it off. [TANDEM_PIN]" in shown
    assert "More. Default: off. [TANDEM_LOUD]" in shown
