"""`tandem completion`: a script that completes commands and flags in a shell, made from the parsers.

The script holds all names, so that completing starts no Python. Libraries for this were left out: argcomplete starts
the program at each press of the key, and shtab would be one more dependency of serving in place of these lines.
"""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from cli.commands import COMMANDS, CommandParser, command_line
from services.runtime.config import Setting, all_settings_of, option
from services.runtime.kinds import argument, choice

BASH = """\
_tandem() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} path="" word names=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$word" in -*) break ;; *) path="$path $word" ;; esac
    done
    case "$path|$before" in
{values}
    *) case "$path" in
{names}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$names" -- "$current"))
}}
complete -o default -F _tandem tandem
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True, kw_only=True)
class CompletionSettings:
    """Prints a script that completes commands and flags: source <(tandem completion bash), in fish with | source."""

    shell: str = option(argument(choice("bash", "zsh", "fish")), help="The shell.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(CompletionSettings, lambda settings: run(settings, sys.stdout))


def run(settings: CompletionSettings, stdout: TextIO) -> int:
    """Prints the script; returns the exit code."""
    tree = dict(_walk(command_line(COMMANDS), ""))
    stdout.write(_fish(tree) if settings.shell == "fish" else (ZSH if settings.shell == "zsh" else "") + _bash(tree))
    return 0


Tree = dict[str, tuple[list[str], list[Setting]]]


def _walk(parser: CommandParser, path: str) -> Iterator[tuple[str, tuple[list[str], list[Setting]]]]:
    """Each command by its words, with its subcommands and its settings."""
    yield path, (list(parser.commands), all_settings_of(parser.settings) if parser.settings else [])
    for name, command in parser.commands.items():
        yield from _walk(command, f"{path} {name}")


def _words(subcommands: list[str], settings: list[Setting]) -> str:
    arguments = [name for setting in settings if setting.kind.is_positional for name in setting.kind.choices]
    flags = [name for setting in settings for name in (setting.flag, setting.negative) if name.startswith("--")]
    return " ".join([*subcommands, *arguments, *flags, "--help"])


def _bash(tree: Tree) -> str:
    values = [
        f'    "{path}"*"|{setting.flag}") names="{" ".join(setting.kind.choices)}" ;;'
        for path, (_, settings) in tree.items()
        for setting in settings
        if setting.kind.choices and setting.flag.startswith("--")
    ]
    # After a command that has no further ones come its arguments, whose words say nothing of its flags.
    names = [f'    "{path}"{"" if known[0] else "*"}) names="{_words(*known)}" ;;' for path, known in tree.items()]
    return BASH.format(values="\n".join(values), names="\n".join(f"    {name}" for name in names))


def _fish(tree: Tree) -> str:
    lines = ["complete -c tandem -f -n __fish_use_subcommand -l version -d 'print the version'"]
    for path, (subcommands, settings) in tree.items():
        words = path.split()
        here = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words) or "__fish_use_subcommand"
        start = f"complete -c tandem -n {shlex.quote(here)}"
        if subcommands:
            lines.append(f"{start} -f -a {shlex.quote(' '.join(subcommands))}")
        for setting in settings:
            flag = f" -l {setting.flag[2:]}" if setting.flag.startswith("--") else " -f"
            takes = "" if setting.kind.is_flag else " -r"
            choices = f" -a {shlex.quote(' '.join(setting.kind.choices))}" if setting.kind.choices else ""
            if setting.negative:
                lines.append(f"{start} -l {setting.negative[2:]}")
            if setting.flag:
                lines.append(f"{start}{flag}{takes}{choices} -d {shlex.quote(setting.help)}")
    return "\n".join(lines) + "\n"
