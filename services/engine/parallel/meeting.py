"""Exchanges rows of a step between the ranks of a worker, with torch.distributed collectives over loopback.

Collectives only move data and compare bytes. They do not round, so results do not depend on the number of ranks.

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

# Rank 0 detects a dead rank by its connection and a hung rank by its silence. This timeout is the last resort.
STEP_TIMEOUT_S = 3600.0
_STEP_TIMEOUT = timedelta(seconds=STEP_TIMEOUT_S)  # without it, send and recv time out after CONNECT_TIMEOUT_S


class Meeting:
    """This rank's connections to the other ranks. Every rank must call the same methods in the same order."""

    def __init__(self, shard: Shard, store_path: Path) -> None:
        """Connects to the other ranks through `store_path`, a file in a directory of this worker.

        Raises RuntimeError.
        """
        self._shard = shard
        parallelism = shard.parallelism
        store = FileStore(str(store_path), parallelism.num_ranks)
        self._all = _group(PrefixStore("all", store), shard.rank, parallelism.num_ranks)
        self._stage = self._all
        if parallelism.pipeline > 1:
            stage_store = PrefixStore(f"stage-{shard.stage}", store)
            self._stage = _group(stage_store, shard.tensor_rank, parallelism.tensor)

    def gather(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Concatenates the columns of all ranks of the stage: [T, N] from this rank's [T, n]."""
        num_parts = self._shard.parallelism.tensor
        if num_parts == 1:
            return part
        width = len(part_of(num_columns, num_parts, 0))
        padded = F.pad(part, (0, width - part.shape[1])) if part.shape[1] < width else part.contiguous()
        gathered = torch.empty(num_parts, *padded.shape, dtype=part.dtype, device=part.device)
        self._stage._allgather_base(gathered.view(-1), padded.view(-1)).wait()
        return gathered.transpose(0, 1).reshape(part.shape[0], -1)[:, :num_columns].contiguous()

    def choose(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows [T, N] with the exact bits of the one rank of the stage whose row is not zero."""
        if self._shard.parallelism.tensor == 1:
            return rows
        content = rows.contiguous().view(torch.uint8)
        self._stage.allreduce([content], ReduceOp.MAX).wait()
        return content.view(rows.dtype)

    def pass_on(self, rows: torch.Tensor) -> None:
        """Sends rows [T, N] to the same tensor rank of the next stage."""
        self._all.send([rows.contiguous()], self._shard.rank + self._shard.parallelism.tensor, 0).wait(_STEP_TIMEOUT)

    def take_over(self, rows: torch.Tensor) -> torch.Tensor:
        """Receives rows [T, N] from the previous stage into `rows`."""
        self._all.recv([rows], self._shard.rank - self._shard.parallelism.tensor, 0).wait(_STEP_TIMEOUT)
        return rows

    def bring_to_first(self, part: torch.Tensor | None, num_rows: int, num_columns: int) -> torch.Tensor:
        """Returns, on rank 0, the columns of all ranks of the last stage, [num_rows, N] float32. Empty on other ranks.

        `part` is [num_rows, n] in the last stage, and None in other stages.
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
    """The methods in use of a process group. torch's type stubs are incomplete."""

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor) -> Work: ...
    def allreduce(self, tensors: list[torch.Tensor], op: ReduceOp.RedOpType) -> Work: ...
    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work: ...


def _group(store: Store, rank: int, size: int) -> _Group:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    # Listen on the loopback interface only, even if the host name resolves to another address.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    made = gloo(store, rank, size, options)
    made._set_default_timeout(_STEP_TIMEOUT)
    group: _Group = made
    return group
