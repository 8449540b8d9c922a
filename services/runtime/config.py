"""Settings: frozen dataclasses filled once from flags and TANDEM_* variables. Knows no service's settings.

A class of settings looks like this, and nothing but `load` and `read` reads the environment:

    @dataclass(frozen=True)
    class Config:
        port: int = option(integer(0, 65535), default=8000, help="Port of the HTTP API; 0 picks a free one.")
"""

import argparse
import dataclasses
import difflib
import itertools
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never, TypeVar, overload

from services.runtime.errors import ConfigError
from services.runtime.kinds import BrokenRule, Kind

ENV_PREFIX = "TANDEM_"
MAX_SHOWN_CHARACTERS = 200
SIMILAR, SIMILAR_VARIABLE = 0.8, 0.85
"""How alike two names are, from 0 to 1, of which one is taken for a misspelling of the other: flags and variables."""
MIN_JUDGED = 5
"""Characters of a variable's name, without TANDEM_, up to which no other name is suggested for it."""

logger = logging.getLogger(__name__)

T = TypeVar("T")
C = TypeVar("C")

_OPTION, _FORWARDED = "tandem.option", "tandem.forwarded"
_PROG, _FLAGS = " prog", " flags"
"""Names that no setting has, under which a parser keeps what its errors name."""
_UNITS = {"s": "SECONDS", "timeout": "SECONDS", "grace": "SECONDS", "tokens": "TOKENS", "port": "PORT"}


@overload
def option(kind: Kind[T], *, help: str) -> T: ...
@overload
def option(kind: Kind[T], *, help: str, default: T) -> T: ...
@overload
def option(kind: Kind[T], *, help: str, default: None) -> T | None: ...
def option(kind: Kind[Any], *, help: str, default: Any = dataclasses.MISSING) -> Any:
    """Returns a field of a settings class. Without `default` it must be given. None as default means "not given"."""
    metadata = {_OPTION: (kind, help)}
    return dataclasses.field(default=default, metadata=metadata, repr=not (kind.may_hold_secret or kind.is_secret))


def forwarded(programs: Mapping[str, type[Any]], *, without: Collection[str]) -> Mapping[str, str]:
    """Returns a field for the settings of other programs: the texts of those that are given, by name, each one checked.

    `programs` has the settings classes by what help calls the programs. A setting of several programs is declared by
    the first; those that the class has itself, and those in `without`, are not forwarded.
    """
    return dataclasses.field(default_factory=dict, repr=False, metadata={_FORWARDED: (programs, frozenset(without))})


def load(config_class: type[C], argv: Sequence[str], *, prog: str, environ: Mapping[str, str] | None = None) -> C:
    """Builds the settings from flags, then TANDEM_* variables, then defaults.

    Raises ConfigError naming key, value and rule. `--help` prints all settings and ends the process with 0.
    """
    parser = Parser(prog=prog, description=(config_class.__doc__ or "").strip(), allow_abbrev=False)
    add_settings(parser, config_class)
    return read(config_class, parse(parser, argv), environ=environ)


def read(
    config_class: type[C],
    given: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    filed: Mapping[str, "Filed"] | None = None,
) -> C:
    """Builds the settings from the flags' texts by field name, from TANDEM_* variables, from a file, from defaults.

    The first one that gives a setting counts. Raises ConfigError naming key, value and rule. What is secret is taken
    out of the process's environment, so that no child and no crash dump has it; a password on the command line, where
    it can no longer be hidden, and a variable that is probably misspelt are warned about.
    """
    own_environ, environ = environ is None, os.environ if environ is None else environ
    settings, everything = settings_of(config_class), all_settings_of(config_class)
    _warn(everything, given, environ)
    sources = _Sources(given, environ, filed or {})
    sources.check({setting.name: setting for setting in everything})
    values = {setting.name: _value(setting, sources) for setting in settings}
    if (field := _forwarding(config_class)) is not None:
        values[field.name] = {
            setting.name: text
            for setting in everything[len(settings) :]
            if (text := _checked_text(setting, sources)) is not None
        }
    if own_environ:
        for setting in everything:
            if setting.kind.is_secret:
                os.environ.pop(setting.variable, None)
    return config_class(**values)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a class: its field's name and what `option` was told."""

    name: str
    kind: Kind[Any]
    help: str
    default: Any = dataclasses.MISSING

    @property
    def is_required(self) -> bool:
        """Whether the setting has no default."""
        return self.default is dataclasses.MISSING

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The flag; empty for a secret, which only its variable may hold, and a capital name for an argument."""
        if self.kind.is_secret:
            return ""
        return self.name.upper() if self.kind.is_positional else "--" + self.name.replace("_", "-")

    @property
    def negative(self) -> str:
        """The flag that turns off what is on by default; empty for other settings."""
        return self.flag.replace("--", "--no-", 1) if self.kind.is_flag and self.default is True else ""

    @property
    def default_text(self) -> str:
        """The default as it would be given; empty where help names no default."""
        if self.is_required or self.default in (None, ()):
            return ""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        return str(self.default).lower() if self.kind.is_flag else self.kind.written(self.default)

    @property
    def default_words(self) -> str:
        """What help says of the default; empty where it names none."""
        if self.kind.is_flag:
            return f"Default: on; {self.negative} turns it off." if self.default else "Default: off."
        return f"Default: {self.default_text}." if self.default_text else ""

    @property
    def metavar(self) -> str:
        """The placeholder of the value in `--help`: its unit, where the name ends in one."""
        return _UNITS.get(self.name.rsplit("_", 1)[-1], self.kind.metavar)

    def parse(self, text: str, key: str) -> Any:
        """Returns the value of a text that was given under the name `key`. Raises ConfigError."""
        try:
            return self.kind.parse(text)
        except ValueError as error:
            value = "***" if self.kind.is_secret else shown(text)
            rule = str(error) if isinstance(error, BrokenRule) else f"must be {self.kind.rule}"
            raise ConfigError(f"{key} is {value} but {rule}") from None


def settings_of(config_class: type[Any]) -> list[Setting]:
    """Returns all settings of a class, in its order."""
    return [
        Setting(field.name, kind=field.metadata[_OPTION][0], help=field.metadata[_OPTION][1], default=field.default)
        for field in dataclasses.fields(config_class)
        if _OPTION in field.metadata
    ]


def forwarded_of(config_class: type[Any]) -> dict[str, list[Setting]]:
    """Returns the settings that a class forwards to other programs, by program; each is listed once."""
    if (field := _forwarding(config_class)) is None:
        return {}
    programs, without = field.metadata[_FORWARDED]
    known = {setting.name for setting in settings_of(config_class)} | without
    found: dict[str, list[Setting]] = {}
    for name, program in programs.items():
        found[name] = [setting for setting in settings_of(program) if setting.name not in known]
        known |= {setting.name for setting in found[name]}
    return found


def _forwarding(config_class: type[Any]) -> "dataclasses.Field[Any] | None":
    return next((field for field in dataclasses.fields(config_class) if _FORWARDED in field.metadata), None)


def all_settings_of(config_class: type[Any]) -> list[Setting]:
    """Returns the settings of a class, and behind them those that it forwards."""
    return [*settings_of(config_class), *itertools.chain.from_iterable(forwarded_of(config_class).values())]


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> Never:
        """Raises ConfigError."""
        raise ConfigError(f"{redacted(message)} (see {self.prog} --help)")


def add_settings(parser: argparse.ArgumentParser, config_class: type[Any]) -> None:
    """Gives the parser a flag for each setting of a class."""
    for setting in settings_of(config_class):
        _add_flag(parser, setting)
    for name, taken in forwarded_of(config_class).items():
        group = parser.add_argument_group(f"settings of {name}")
        for setting in taken:
            _add_flag(group, setting)
    flags = [setting.flag for setting in all_settings_of(config_class) if setting.flag]
    parser.set_defaults(**{_PROG: parser.prog, _FLAGS: flags})


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Returns what the arguments say, by field name; None for what they do not say. Raises ConfigError."""
    found, unknown = parser.parse_known_args(list(argv))
    given = vars(found)
    if unknown:
        name = redacted(unknown[0].partition("=")[0])
        prog, flags = given.get(_PROG, parser.prog), given.get(_FLAGS, ())
        what = "flag" if name.startswith("-") else "argument"
        raise ConfigError(f"{prog} has no {what} {name}{did_you_mean(name, flags)} (see {prog} --help)")
    return given


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Returns a question that names the most similar name, to be added to an error; empty where none is similar."""
    similar = difflib.get_close_matches(word, list(names), 1, SIMILAR)
    return f"; did you mean {similar[0]}?" if similar else ""


def redacted(value: str) -> str:
    """Returns a URL without its user, its password, and those in its query, as redis-py takes them too.

    Everything before the last @ counts as user and password: with a / in one that was not encoded, the text is no URL,
    and has to stay out of logs all the same.
    """
    hidden = re.sub(r"://\S*@", "://***@", value)
    return re.sub(r"(?i)([?&](?:sentinel_)?(?:password|username)=)[^&\s]*", r"\1***", hidden)


def shown(value: str) -> str:
    """Returns a value as it may be printed: without the password of a URL, and not endless."""
    hidden = redacted(value)
    return repr(hidden if len(hidden) <= MAX_SHOWN_CHARACTERS else hidden[:MAX_SHOWN_CHARACTERS] + "…")


def _add_flag(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", setting: Setting) -> None:
    kind = setting.kind
    if kind.is_secret:
        return
    rule = "" if kind.is_flag else f"Rule: {kind.rule}."
    needed = "Required." if setting.is_required else setting.default_words
    variable = "" if kind.is_positional else f"[{setting.variable}]"
    words = " ".join(filter(None, (setting.help, rule, needed, variable))).replace("%", "%%")
    if kind.is_positional:
        parser.add_argument(setting.name, metavar=setting.flag, help=words)
    elif kind.is_flag:
        names = [setting.flag, kind.short] if kind.short else [setting.flag]
        parser.add_argument(*names, dest=setting.name, action="store_const", const="true", help=words)
        negative = setting.flag.replace("--", "--no-", 1)
        parser.add_argument(negative, dest=setting.name, action="store_const", const="false", help=argparse.SUPPRESS)
    else:
        action = "append" if kind.is_list else "store"
        parser.add_argument(setting.flag, dest=setting.name, action=action, metavar=setting.metavar, help=words)


def _warn(settings: Collection[Setting], given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    for setting in settings:
        text = given.get(setting.name) or ""
        if setting.kind.may_hold_secret and redacted(text) != text:
            logger.warning(
                "%s has a password on the command line, which every user of this machine can read: give it as %s",
                setting.flag,
                setting.variable,
            )
    for variable, meant in misspelt(environ, [setting.variable for setting in settings]):
        logger.warning("%s is not a setting of this program; did you mean %s?", variable, meant)


def misspelt(environ: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """TANDEM_ variables that are probably misspelt, and what is meant; `known` are those of the program.

    Other programs' variables may be set too. None of them is as similar, but for plurals.
    """
    found = []
    names = {name.removeprefix(ENV_PREFIX) for name in known}
    for variable in sorted(set(environ) - set(known)):
        name = variable.removeprefix(ENV_PREFIX)
        if name != variable and len(name) > MIN_JUDGED:
            similar = difflib.get_close_matches(name, names, 1, SIMILAR_VARIABLE)
            found += [(variable, ENV_PREFIX + one) for one in similar if one.rstrip("S") != name.rstrip("S")]
    return found


@dataclass(frozen=True, slots=True)
class Filed:
    """A setting's text as a file gives it, and the words that name the place in errors."""

    text: str
    place: str


@dataclass(frozen=True, slots=True)
class _Sources:
    """What flags, variables and a file say, each by the setting's name or variable."""

    given: Mapping[str, Any]
    environ: Mapping[str, str]
    filed: Mapping[str, Filed]

    def check(self, known: Mapping[str, Setting]) -> None:
        """Refuses names in the file that no setting has. Raises ConfigError, with the most similar one."""
        for name, filed in self.filed.items():
            if name not in known:
                names = [each.replace("_", "-") for each in known]
                guess = did_you_mean(name.replace("_", "-"), names)
                raise ConfigError(f"{filed.place} is not a setting{guess}")

    def text(self, setting: Setting) -> tuple[str | None, str]:
        """Returns the text from the first place that gives one, or None, and what that place calls the setting.

        An empty variable counts as not given.
        """
        given = self.given.get(setting.name)
        if given is not None:
            return (",".join(given) if isinstance(given, list) else given), setting.flag or setting.variable
        if not (text := self.environ.get(setting.variable)) and setting.name in self.filed:
            return self.filed[setting.name].text, self.filed[setting.name].place
        return text or None, setting.variable


def _value(setting: Setting, sources: _Sources) -> Any:
    text, key = sources.text(setting)
    if text is not None:
        return setting.parse(text, key)
    if setting.is_required:
        raise ConfigError(f"{setting.flag} (or {setting.variable}) is required: {setting.kind.rule}")
    return setting.default


def _checked_text(setting: Setting, sources: _Sources) -> str | None:
    text, key = sources.text(setting)
    if text is not None:
        setting.parse(text, key)
    return text
