"""`tandem man`: the manual page of the command line, made from its parsers: tandem man | man -l -."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from cli.commands import COMMANDS, EXAMPLES, CommandParser, command_line
from services.runtime.config import Setting, forwarded_of, settings_of
from services.runtime.version import version


@dataclass(frozen=True, kw_only=True)
class ManSettings:
    """Prints the manual page, for man -l - or for a folder such as ~/.local/share/man/man1/tandem.1."""


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(ManSettings, lambda settings: run(settings, sys.stdout))


def run(settings: ManSettings, stdout: TextIO) -> int:
    """Prints the page; returns the exit code."""
    stdout.write("\n".join(_page(command_line(COMMANDS))) + "\n")
    return 0


def _page(parser: CommandParser) -> Iterator[str]:
    yield f'.TH TANDEM 1 "" "tandem {version()}" "User Commands"'
    yield ".SH NAME\ntandem \\- serves large language models with prefill and decode on different processes"
    yield ".SH SYNOPSIS\n.B tandem\n.I COMMAND\n[flags]"
    rules, _, examples = EXAMPLES.partition("examples:\n")
    yield f".SH DESCRIPTION\n{_text(rules)}"
    for name, (_, words) in COMMANDS.items():
        yield f".SH TANDEM {name.upper()}\n{_text(words[0].upper() + words[1:])}."
        yield from _command(parser.commands[name])
    yield f".SH EXAMPLES\n.nf\n{_text(examples.rstrip(), keeps_lines=True)}\n.fi"
    yield ".SH FILES\n.TP\n.B tandem.toml\nsettings of the commands, a table for each, in the current folder"


def _command(parser: CommandParser) -> Iterator[str]:
    """Description and flags of a command, and of those below it."""
    if parser.settings is not None:
        yield f".PP\n{_text(' '.join((parser.settings.__doc__ or '').split()))}"
        for setting in settings_of(parser.settings):
            yield from _flag(setting)
        for program, taken in forwarded_of(parser.settings).items():
            yield f".PP\nSettings of {_text(program)}:"
            for setting in taken:
                yield from _flag(setting)
    for name, below in parser.commands.items():
        yield f".SS tandem {_text(below.prog.removeprefix('tandem ') or name)}"
        yield from _command(below)


def _flag(setting: Setting) -> Iterator[str]:
    name = setting.flag or setting.variable
    value = "" if setting.kind.is_flag or setting.kind.is_positional or not setting.flag else setting.metavar
    names = ", ".join(filter(None, (name, setting.kind.short)))
    yield f".TP\n.B {_text(names)} \\fI{_text(value)}\\fR\n{_text(f'{setting.help} {setting.default_words}')}"


def _text(words: str, *, keeps_lines: bool = False) -> str:
    """Returns text as roff has it: no line of it is a request."""
    plain = words if keeps_lines else " ".join(words.split())
    return re.sub(r"(?m)^([.'])", r"\\&\1", plain.replace("\\", "\\e").replace("-", "\\-"))
