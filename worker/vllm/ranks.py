"""vLLM on several ranks. The first rank is this process, which samples the tokens. Each other rank is a child process.

vLLM's own multi-rank executor runs every rank in another process. Sampling there could not use the engine's state of a
response, and its pages would be inaccessible. Here, rank 0 first sends each call to the other ranks and then calls
vLLM's worker on the engine thread, as with a single rank. It also maps the blocks of the other ranks.
"""

import mmap
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from services.engine.parallel.processes import RankProcesses
from services.runtime.errors import ConfigError, TandemError, WorkerLost
from worker.vllm.connector import TandemConnector
from worker.vllm.rank import Beginning, Call, connection

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS_EXECUTOR = "worker.vllm.ranks.RanksExecutor"
"""Value for vLLM's setting `distributed_executor_backend`."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - used only to query its free space


class RanksExecutor(UniProcExecutor):
    """Runs vLLM's worker here and in `tensor_parallel_size` - 1 other processes, call by call."""

    def _init_executor(self) -> None:
        self._processes = RankProcesses(self.parallel_config.world_size, program="worker.vllm.rank")
        self._processes.start()
        self._peers = [connection(one) for one in self._processes.commands]
        try:
            with self._explained():
                super()._init_executor()
        except BaseException:
            self._processes.close()
            raise
        self._processes.begin_serving()

    def _distributed_args(self) -> tuple[str, int, int]:
        meeting, rank, local_rank = super()._distributed_args()
        for peer in self._peers:  # detects a rank that cannot even import vLLM before anything waits for it
            peer.recv()
        self._tell(Beginning(self.vllm_config, meeting, torch.get_num_threads()))
        return meeting, rank, local_rank

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Calls a method on every rank, and returns after the last of them has finished.

        With `single_value`, as in a step, the result is the first rank's result. The other ranks only acknowledge,
        after they have written their parts of the step's pages.
        """
        with self._explained():
            self._tell(Call(method, args, kwargs or {}, is_answered=not single_value))
            answer = super().collective_rpc(method, timeout, args, kwargs, single_value=True)
            others = [peer.recv() for peer in self._peers]
            if not single_value:
                answer = [answer, *others]
        if not non_block:
            return answer
        future: Future[Any] = Future()
        future.set_result(answer)
        return future

    @property
    def loss(self) -> TandemError | None:
        """Returns why the ranks have ended, or None while they run. Callable from any thread."""
        return self._processes.loss

    @property
    def pids(self) -> list[int]:
        """Returns the process IDs of the ranks from 1 on."""
        return self._processes.pids

    def shutdown(self) -> None:
        """Stops all ranks. May be called again."""
        is_whole = self.loss is None
        self._processes.close()
        if is_whole:  # otherwise a step may still run here and wait for a rank that has ended
            super().shutdown()

    def _tell(self, said: Beginning | Call) -> None:
        message = pickle.dumps(said, protocol=pickle.HIGHEST_PROTOCOL)
        for peer in self._peers:
            peer.send_bytes(message)

    @contextmanager
    def _explained(self) -> "Iterator[None]":
        """Replaces errors of communicating or computing with a rank by the reason why the rank ended."""
        try:
            yield
        except (EOFError, OSError) as error:
            raise self._processes.explain(error) from error
        except RuntimeError as error:
            explained = self._processes.explain(error)
            if self.loss is None:  # an error of the model or of this rank
                raise
            raise explained from error


@dataclass(frozen=True, slots=True)
class _View:
    """A layer's blocks in a rank's memory, in elements."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _SharedBlocks:
    """The memory of a rank's blocks as an open file of its process."""

    path: str
    num_bytes: int
    dtype: torch.dtype
    layers: dict[str, _View]


def blocks_of_ranks(executor: RanksExecutor) -> list[Mapping[str, torch.Tensor]]:
    """Returns each layer's blocks by name, for each rank in order. Blocks of other ranks are in shared memory.

    Raises ConfigError if shared memory is too small.
    """
    own, *others = executor.collective_rpc(_share_blocks)
    return [own, *(_map_blocks(one) for one in others)]


def _share_blocks(worker: Any) -> dict[str, torch.Tensor] | _SharedBlocks:
    """Runs in each rank: returns the blocks of the first rank, or moves them to shared memory on another rank."""
    connector = get_kv_transfer_group()
    assert isinstance(connector, TandemConnector), "the settings name this connector"
    layers = connector.kv_caches
    if get_tp_group().is_first_rank:
        return layers
    first = next(iter(layers.values()))
    storage = first.untyped_storage()
    room = os.statvfs(_SHARED_MEMORY)
    if storage.nbytes() > room.f_bavail * room.f_frsize:
        raise ConfigError(
            f"{_SHARED_MEMORY} has {room.f_bavail * room.f_frsize} bytes, and the KV memory of a rank takes "
            f"{storage.nbytes()}: lower --kv-memory, or give it more"
        )
    # The views in vLLM's layers follow the storage to shared memory.
    fd, num_bytes = storage._share_fd_cpu_()  # the same call that pickling for a process uses
    views = {name: _View(int(one.storage_offset()), one.shape, one.stride()) for name, one in layers.items()}
    return _SharedBlocks(f"/proc/{os.getpid()}/fd/{fd}", num_bytes, first.dtype, views)


def _map_blocks(shared: _SharedBlocks) -> Mapping[str, torch.Tensor]:
    try:
        with Path(shared.path).open("r+b") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), shared.num_bytes), dtype=shared.dtype)
    except OSError as error:
        raise WorkerLost(f"the memory of a rank cannot be mapped: {error}") from error
    return {
        name: torch.as_strided(memory, view.shape, view.stride, view.offset) for name, view in shared.layers.items()
    }
