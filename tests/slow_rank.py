"""A rank that writes its part of each step later than others: `services.engine.parallel.rank` with a delay."""

import socket
import sys
import time
from typing import Any

from services.engine.parallel.rank import _serve, run_rank

DELAY_S = 0.05
"""Delay of each step, in seconds: enough for rank 0 to send the pages of a chunk if it did not wait for this rank."""
USE_SLOW_RANKS = """
import functools
from services.engine.parallel import group
group.RankProcesses = functools.partial(group.RankProcesses, program="tests.slow_rank")
"""
"""Python code for a worker to run before it starts, so that its ranks are slow."""


def _serve_slowly(rank: int, commands: socket.socket) -> None:
    from services.engine.parallel.decoder import ShardedDecoder

    begin = ShardedDecoder._begin

    def begin_late(decoder: ShardedDecoder, step: Any) -> Any:
        first_input = begin(decoder, step)
        time.sleep(DELAY_S)
        return first_input

    ShardedDecoder._begin = begin_late  # type: ignore[method-assign]
    _serve(rank, commands)


if __name__ == "__main__":
    run_rank(sys.argv[1:], _serve_slowly)
