"""How many random examples a property is tried with: all of them in `make test-all`, a third in `make test`."""

import os


def examples(number: int) -> int:
    """Number of examples for this run."""
    return number if os.environ.get("TANDEM_ALL_EXAMPLES") else -(-number // 3)
