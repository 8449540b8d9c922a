"""The program of every rank except the first in a worker with vLLM. Runs vLLM's worker on calls from rank 0.

`python -m worker.vllm.rank RANK PARENT_PID COMMANDS_FD LIFE_FD`, started only by `worker.vllm.ranks`. Calls and replies
are pickled, like vLLM's own. Pickle is safe here because only a parent and its child hold the ends of the socket.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from services.engine.parallel.rank import run_rank
from services.runtime.errors import WorkerLost

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first message to a rank: the model, the rendezvous file, and the number of threads per rank."""

    config: "VllmConfig"
    meeting: str
    threads: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method of vLLM's worker by its name, or of a function with the worker as its first argument."""

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_answered: bool


def connection(peer: socket.socket) -> Connection:
    """Returns a connection over a duplicate of the socket's file descriptor, for sending objects."""
    return Connection(os.dup(peer.fileno()))


def _serve(rank: int, commands: socket.socket) -> None:
    peer = connection(commands)
    from torch import set_num_threads  # imported by name, because vLLM replaces the module's function with a no-op
    from vllm.platforms import current_platform
    from vllm.v1.serial_utils import run_method
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    try:
        peer.send(None)  # signals that all slow imports are done
        beginning: Beginning = peer.recv()
        set_num_threads(beginning.threads)
        worker = WorkerWrapperBase(rpc_rank=rank)
        asked = {
            "vllm_config": beginning.config,
            "local_rank": rank,
            "rank": rank,
            "distributed_init_method": beginning.meeting,
            "is_driver_worker": False,
            "shared_worker_lock": multiprocessing.Lock(),
        }
        worker.init_worker([{}] * rank + [asked])
        worker.init_device()
        worker.load_model()
        current_platform.update_block_size_for_backend(beginning.config)
        while True:
            call: Call = peer.recv()
            answer = run_method(worker, call.method, call.args, call.kwargs)
            peer.send(answer if call.is_answered else None)
    except (EOFError, ConnectionError) as error:
        raise WorkerLost("rank 0 of the worker has ended") from error


if __name__ == "__main__":
    run_rank(sys.argv[1:], _serve)
