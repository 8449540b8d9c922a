"""The `tandem` command: runs a subcommand and turns what goes wrong into an exit code."""

import os
import sys
from collections.abc import Sequence

from cli.commands import command_line, run_command
from services.runtime import last_words
from services.runtime.errors import ConfigError, ModelError, TandemError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
KEY_ADVICE = {401: "show one", 403: "show another one"}
"""What to do with keys, by the HTTP status of a refusal."""
FOR_CONTAINERS = ("up", "--preflight")
"""The words of commands that a container is started for. Others may run beside its program, whose last words count."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    has_last_words = any(word in words for word in FOR_CONTAINERS)
    if has_last_words:
        last_words.begin()
    try:
        if not words:
            command_line(()).print_help()
            return EXIT_BAD_INPUT
        return run_command(words)
    except (ConfigError, ModelError) as error:
        return _complain(error, EXIT_BAD_INPUT, has_last_words=has_last_words)
    except TandemError as error:
        return _complain(error, EXIT_FAILED, has_last_words=has_last_words)
    except KeyboardInterrupt:
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output has gone; what Python would still flush has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _advice(error: TandemError) -> str:
    """Returns the flag that a gateway's refusal asks for."""
    from services.runtime.api_client import ApiRefused  # an HTTP client, which only commands that ask a gateway load

    status = error.status if isinstance(error, ApiRefused) else 0
    return f"; {KEY_ADVICE[status]} with --api-key (TANDEM_API_KEY)" if status in KEY_ADVICE else ""


def _complain(error: TandemError, exit_code: int, *, has_last_words: bool) -> int:
    print(f"error: {error.message}{_advice(error)}", file=sys.stderr)
    if has_last_words:
        last_words.leave(last_words.words_for(error), exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
