"""Where the ranks of a worker exchange rows of a step: collectives of torch.distributed over the loopback interface.

Only data is moved and bytes compared: nothing here rounds, so no result depends on how many ranks there are.

Legend: T tokens, n columns of this rank, N columns of all ranks of the stage.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, ReduceOp, Store, Work

from services.engine.weights.shard import Shard, part_of

CONNECT_TIMEOUT_S = 60.0

# A rank that dies is noticed by its connections and one that hangs by its silence; this only ends what both missed.
STEP_TIMEOUT_S = 3600.0
_STEP_TIMEOUT = timedelta(seconds=STEP_TIMEOUT_S)  # without it, send and recv wait only for CONNECT_TIMEOUT_S


class Meeting:
    """This rank's connections to the others. Every rank calls the same methods in the same order."""

    def __init__(self, shard: Shard, store_path: Path) -> None:
        """Waits for the other ranks; `store_path` is a file in a folder of this worker alone. Raises RuntimeError."""
        self._shard = shard
        parallelism = shard.parallelism
        store = FileStore(str(store_path), parallelism.num_ranks)
        self._all = _group(PrefixStore("all", store), shard.rank, parallelism.num_ranks)
        self._stage = self._all
        if parallelism.pipeline > 1:
            stage_store = PrefixStore(f"stage-{shard.stage}", store)
            self._stage = _group(stage_store, shard.tensor_rank, parallelism.tensor)

    def gather(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Returns the columns of all ranks of the stage: [T, N] out of this rank's [T, n]."""
        num_parts = self._shard.parallelism.tensor
        if num_parts == 1:
            return part
        width = len(part_of(num_columns, num_parts, 0))
        padded = F.pad(part, (0, width - part.shape[1])) if part.shape[1] < width else part.contiguous()
        gathered = torch.empty(num_parts, *padded.shape, dtype=part.dtype, device=part.device)
        self._stage._allgather_base(gathered.view(-1), padded.view(-1)).wait()
        return gathered.transpose(0, 1).reshape(part.shape[0], -1)[:, :num_columns].contiguous()

    def choose(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [T, N], each of which is zeros on all ranks of the stage but one: what that one has, bit by bit."""
        if self._shard.parallelism.tensor == 1:
            return rows
        content = rows.contiguous().view(torch.uint8)
        self._stage.allreduce([content], ReduceOp.MAX).wait()
        return content.view(rows.dtype)

    def pass_on(self, rows: torch.Tensor) -> None:
        """Hands rows [T, N] to the same rank of the next stage."""
        self._all.send([rows.contiguous()], self._shard.rank + self._shard.parallelism.tensor, 0).wait(_STEP_TIMEOUT)

    def take_over(self, rows: torch.Tensor) -> torch.Tensor:
        """Fills rows [T, N] with those that the stage before has passed on."""
        self._all.recv([rows], self._shard.rank - self._shard.parallelism.tensor, 0).wait(_STEP_TIMEOUT)
        return rows

    def bring_to_first(self, part: torch.Tensor | None, num_rows: int, num_columns: int) -> torch.Tensor:
        """Returns the columns [num_rows, N] of all ranks of the last stage, float32; elsewhere than on rank 0, empty.

        `part` [num_rows, n] is None in the other stages.
        """
        parallelism, rank = self._shard.parallelism, self._shard.rank
        if rank != 0:
            if part is not None and num_rows:
                self._all.send([part.contiguous()], 0, 0).wait(_STEP_TIMEOUT)
            return torch.empty(0, num_columns)
        parts = []
        for tensor_rank in range(parallelism.tensor):
            source = (parallelism.pipeline - 1) * parallelism.tensor + tensor_rank
            if source == 0 and part is not None:
                parts.append(part)
                continue
            received = torch.empty(num_rows, len(part_of(num_columns, parallelism.tensor, tensor_rank)))
            if num_rows:
                self._all.recv([received], source, 0).wait(_STEP_TIMEOUT)
            parts.append(received)
        return torch.cat(parts, dim=1)


class _Group(Protocol):
    """What is used of a process group; torch's own description of it is incomplete."""

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor) -> Work: ...
    def allreduce(self, tensors: list[torch.Tensor], op: ReduceOp.RedOpType) -> Work: ...
    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work: ...


def _group(store: Store, rank: int, size: int) -> _Group:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    # Nothing listens but on this machine's own interface, whatever its name resolves to.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    made = gloo(store, rank, size, options)
    made._set_default_timeout(_STEP_TIMEOUT)
    group: _Group = made
    return group
