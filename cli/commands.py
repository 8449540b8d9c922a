"""The `tandem` command line: its subcommands, their help and their flags. Runs nothing.

A subcommand is a module `cli.NAME` with a function `add_to(parser)`, and its line in COMMANDS. Only the module of the
subcommand that is asked for is imported, as some of them take long.
"""

import argparse
import importlib
import os
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from services.runtime.addresses import connectable, join_host_port
from services.runtime.config import Filed, Parser, add_settings, did_you_mean, parse, read, settings_of
from services.runtime.errors import ConfigError
from services.runtime.settings_file import DEFAULT, VARIABLE, read_settings_file
from services.runtime.version import version

SERVE, WATCH, USE, PREPARE = "serve", "watch", "use", "prepare"
COMMANDS = {
    "serve": (SERVE, "serve a model by its name or folder: as up, with the model first"),
    "up": (SERVE, "start Redis, a gateway, prefill and decode workers here, and keep them running"),
    "join": (SERVE, "run workers on this machine for a cluster that runs elsewhere"),
    "scale": (SERVE, "change the number of workers of a running up"),
    "role": (SERVE, "have a worker of a running up become a prefill or a decode worker"),
    "drain": (SERVE, "have a worker of a running up finish what it runs, and end"),
    "status": (WATCH, "show the workers of a running cluster"),
    "top": (WATCH, "watch a gateway: its workers, figures and requests, each second"),
    "where": (WATCH, "show which workers have a request"),
    "logs": (WATCH, "show the logs of a running up, in the order of time"),
    "doctor": (WATCH, "check this machine and a deployment, and say what to do"),
    "probe": (WATCH, "ask a process whether it lives or is ready, for a container's health"),
    "chat": (USE, "talk to a running cluster"),
    "bench": (USE, "measure any OpenAI-compatible endpoint: time to first token, between tokens, goodput"),
    "models": (PREPARE, "list the models that were brought to this machine by name"),
    "keys": (PREPARE, "make an API key or a tenant's table, or check a file of them"),
    "autoscaler": (WATCH, "read an autoscaler's log of decisions, and decide all of it again"),
    "profile": (PREPARE, "measure the step times of a running cluster, for plan and replay"),
    "plan": (PREPARE, "find the workers that a workload needs, and what they cost"),
    "replay": (PREPARE, "run a recorded workload through a simulated cluster"),
    "completion": (PREPARE, "print the completion of commands and flags for bash, zsh or fish"),
    "man": (PREPARE, "print the manual page"),
}
HTTP_PORT = "8000"
"""The port of the HTTP API where none is given."""
WORDS = {"help": "--help", "version": "--version"}
"""Flags that may be given as if they were commands."""
EXAMPLES = """\
`tandem COMMAND --help` explains a command's flags. Every flag is also an environment variable, and a line of a settings
file: --http-port is TANDEM_HTTP_PORT, and `http-port = 8000` below [up] in tandem.toml. Exit codes: 0 clean, 2 bad
arguments or model, 1 otherwise.

examples:
  tandem up                                     the demo model, one prefill and one decode worker
  tandem up --model DIR --prefill 2 --decode 2  a Hugging Face checkpoint folder on four workers
  tandem serve Qwen/Qwen3-0.6B --kv-memory 4GiB  a model of the Hugging Face hub, downloaded first
  tandem chat --message "Write a function that returns the length of a list."
  tandem status --json
  tandem bench --rate 4 --prompt-tokens 200 --report bench.html
  tandem replay TRACE --prefill 8 --decode 8 --policy all
  source <(tandem completion bash)
"""

S = TypeVar("S")

_RUN, _CONFIG = " run", " config"
"""Names that no setting has, under which a parser keeps what its command does, and the file of its settings."""


class CommandParser(Parser):
    """A parser that knows its subcommands by name, or its settings and what it runs."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, allow_abbrev=False)
        self.commands: dict[str, CommandParser] = {}
        self.settings: type[Any] | None = None
        self._group: argparse._SubParsersAction[CommandParser] | None = None

    def add_command(self, name: str, words: str, *, is_listed: bool = True) -> "CommandParser":
        """A subcommand's parser; `words` say in the help what it is for."""
        if self._group is None:
            self._group = self.add_subparsers(
                parser_class=CommandParser, prog=self.prog, metavar="COMMAND", required=True
            )
        if is_listed:
            self.commands[name] = self._group.add_parser(name, help=words)
        else:
            self._group.help = argparse.SUPPRESS
            self.commands[name] = self._group.add_parser(name)
        return self.commands[name]

    def runs(self, settings_class: type[S], function: Callable[[S], int], *, table: str = "") -> None:
        """Has the command read these settings and call the function, which returns the exit code.

        `table`: of the settings file, where it is not called as the command.
        """
        self.settings = settings_class
        self.description = (settings_class.__doc__ or "").strip()
        add_settings(self, settings_class)
        words = f"TOML file of settings; {DEFAULT} of the current folder if not given. [{VARIABLE}]"
        self.add_argument("--config", dest=_CONFIG, metavar="FILE", help=words)
        name = table or self.prog.partition(" ")[2]
        names = [setting.name for setting in settings_of(settings_class)]
        self.set_defaults(
            **{_RUN: lambda given: function(read(settings_class, given, filed=_filed(given[_CONFIG], name, names)))}
        )


def command_line(filled: Collection[str]) -> CommandParser:
    """The parser of `tandem`, with the flags of the subcommands named in `filled` only."""
    parser = CommandParser(
        prog="tandem",
        usage="tandem COMMAND [flags]",
        description=f"Serves large language models with prefill and decode on different processes.\n\n{_groups()}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", "-V", action="version", version=f"tandem {version()}", help="print the version")
    for name, (_, words) in COMMANDS.items():
        command = parser.add_command(name, words, is_listed=False)
        if name in filled:
            importlib.import_module(f"cli.{name}").add_to(command)
    return parser


def run_command(argv: Sequence[str]) -> int:
    """Runs what the arguments ask for; returns the exit code. Raises TandemError; `--help` ends the process."""
    words = [WORDS.get(argv[0], argv[0]), *argv[1:]]
    parser = command_line(words[:1])
    _check_names(parser, words)
    given = parse(parser, words)
    function: Callable[[dict[str, Any]], int] = given[_RUN]
    return function(given)


def _check_names(parser: CommandParser, words: Sequence[str]) -> None:
    """Refuses a subcommand that does not exist. Raises ConfigError, with the most similar name."""
    for word in words:
        if not parser.commands or word.startswith("-"):
            return
        if word not in parser.commands:
            guess = did_you_mean(word, parser.commands) or f"; it must be one of {', '.join(parser.commands)}"
            raise ConfigError(f"{parser.prog} has no command {word!r:.100}{guess}")
        parser = parser.commands[word]


def _filed(given: str | None, command: str, names: Collection[str]) -> dict[str, Filed]:
    """What the settings file says of a command; nothing where no file is named and none is here.

    A command that has `url` among its settings' names asks the gateway of [up] unless its own table names another.
    """
    named = given or os.environ.get(VARIABLE)
    path = Path(named or DEFAULT)
    if named is None and not path.is_file():
        return {}
    of_up = _url_of_up(path) if "url" in names else {}
    return of_up | read_settings_file(path, command, commands=COMMANDS)


def _url_of_up(path: Path) -> dict[str, Filed]:
    """The address of the HTTP API that [up] has; nothing where it says nothing of it, or leaves the port open."""
    up = read_settings_file(path, "up", commands=COMMANDS)
    told = [up[name] for name in ("http_port", "host", "tls_cert") if name in up]
    host, port = (up[name].text if name in up else usual for name, usual in (("host", ""), ("http_port", HTTP_PORT)))
    if not told or not port.isdecimal() or int(port) == 0:
        return {}
    scheme = "https" if "tls_cert" in up else "http"
    return {"url": Filed(f"{scheme}://{join_host_port(connectable(host), int(port))}", told[0].place)}


def _groups() -> str:
    """The subcommands, group by group."""
    lines = []
    for group in dict.fromkeys(group for group, _ in COMMANDS.values()):
        rows = [f"{name:<12}{words}" for name, (of, words) in COMMANDS.items() if of == group]
        lines += [f"{group}:", textwrap.indent("\n".join(rows), "  ")]
    return "\n".join(lines)
