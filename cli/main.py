"""The `tandem` command: picks a subcommand, reads its settings and turns what goes wrong into an exit code."""

import os
import sys
from collections.abc import Callable, Sequence

from services.runtime.config import load
from services.runtime.errors import ConfigError, ModelError, TandemError
from services.runtime.version import version

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

HELP = """\
usage: tandem COMMAND [flags]

Serves large language models with prefill and decode on different processes.

commands:
  up        start Redis, a gateway, prefill and decode workers here, and keep them running
  status    show the workers of a running cluster
  top       watch a gateway: its workers, figures and requests, each second
  chat      talk to a running cluster
  doctor    check this machine and a deployment, and say what to do
  replay    run a recorded workload through a simulated cluster
  keys      make an API key (keys new) or a tenant's table (keys tenant), check a file of them (keys check)
  version   print the version
  help      print this

`tandem COMMAND --help` explains a command's flags. Every flag is also an environment variable: --http-port is
TANDEM_HTTP_PORT. Exit codes: 0 clean, 2 bad arguments or model, 1 otherwise.

examples:
  tandem up                                     the demo model, one prefill and one decode worker
  tandem up --model DIR --prefill 2 --decode 2  a Hugging Face checkpoint folder on four workers
  tandem chat --message "Write a function that returns the length of a list."
  tandem status --json
  tandem replay TRACE --prefill 8 --decode 8 --policy all
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except (ConfigError, ModelError) as error:
        return _complain(error, EXIT_BAD_INPUT)
    except TandemError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_FAILED
    except BrokenPipeError:
        # Whoever read our output has gone; what Python would still flush has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(argv: list[str]) -> int:
    command, flags = (argv[0], argv[1:]) if argv else ("help", [])
    if command in ("help", "--help", "-h"):
        print(HELP, end="")
        return 0 if argv else EXIT_BAD_INPUT
    if command in ("version", "--version", "-V"):
        print(f"tandem {version()}")
        return 0
    if command not in COMMANDS:
        names = ", ".join((*COMMANDS, "version", "help"))
        raise ConfigError(f"there is no command {command!r}; it must be one of {names}")
    return COMMANDS[command](flags)


def _up(flags: list[str]) -> int:
    from cli import up  # the only command that needs Redis and the model checks; the others start faster
    from cli.up_settings import UpSettings

    flags = ["--verbose" if flag == "-v" else flag for flag in flags]
    return up.run(load(UpSettings, flags, prog="tandem up"))


def _status(flags: list[str]) -> int:
    from cli import status

    return status.run(load(status.StatusSettings, flags, prog="tandem status"), sys.stdout)


def _top(flags: list[str]) -> int:
    from cli import top

    return top.run(load(top.TopSettings, flags, prog="tandem top"), sys.stdin, sys.stdout)


def _chat(flags: list[str]) -> int:
    from cli import chat

    settings = load(chat.ChatSettings, flags, prog="tandem chat")
    return chat.run(settings, sys.stdin, sys.stdout, sys.stderr)


def _doctor(flags: list[str]) -> int:
    from cli import doctor

    return doctor.run(load(doctor.DoctorSettings, flags, prog="tandem doctor"), sys.stdout)


def _replay(flags: list[str]) -> int:
    from cli import replay

    return replay.main(flags, sys.stdout, sys.stderr)


def _keys(flags: list[str]) -> int:
    from cli import keys

    return keys.run(flags, sys.stdout, sys.stderr)


def _complain(error: TandemError, exit_code: int) -> int:
    print(f"error: {error.message}", file=sys.stderr)
    return exit_code


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "up": _up,
    "status": _status,
    "top": _top,
    "chat": _chat,
    "doctor": _doctor,
    "replay": _replay,
    "keys": _keys,
}

if __name__ == "__main__":
    sys.exit(main())
