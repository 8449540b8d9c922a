"""The `tandem` command: runs a subcommand and turns what goes wrong into an exit code."""

import os
import sys
from collections.abc import Sequence

from cli.commands import command_line, run_command
from services.runtime.errors import ConfigError, ModelError, TandemError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words:
            command_line(()).print_help()
            return EXIT_BAD_INPUT
        return run_command(words)
    except (ConfigError, ModelError) as error:
        return _complain(error, EXIT_BAD_INPUT)
    except TandemError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output has gone; what Python would still flush has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _complain(error: TandemError, exit_code: int) -> int:
    print(f"error: {error.message}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
