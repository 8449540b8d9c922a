"""A model on several ranks, as seen by rank 0, which starts the other ranks, loads with them, and runs every step.

Users of the model see no difference: one pool contains the pages of all heads and layers, in memory that all ranks map,
and the logits cover the whole vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from services.engine.cache.pool import PageLayout, PagePool
from services.engine.model import Model
from services.engine.parallel.decoder import check_step
from services.engine.parallel.messages import (
    StepMessage,
    await_acknowledgement,
    receive_object,
    send_object,
    send_step,
)
from services.engine.parallel.part import RankPart
from services.engine.parallel.processes import RankProcesses
from services.engine.reference.decoder import DecoderStep
from services.engine.weights.shard import Parallelism
from services.runtime.errors import ConfigError, TandemError, WorkerLost


class RankGroup:
    """The ranks of one worker.

    Call `load`, then `make_pool`, then use the model, then `close`. The caller is rank 0.
    """

    def __init__(self, parallelism: Parallelism) -> None:
        """Starts the other ranks. Raises ConfigError on an unsupported system, and WorkerLost if they cannot start."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--tensor-parallel and --pipeline-parallel need Linux: use 1")
        self.parallelism = parallelism
        self._processes = RankProcesses(parallelism.num_ranks)
        self._part: RankPart | None = None
        self._processes.start()

    @property
    def pids(self) -> list[int]:
        """Process IDs of the ranks, from rank 1."""
        return self._processes.pids

    @property
    def loss(self) -> TandemError | None:
        """Reason why the ranks ended, after which the worker cannot continue. None while they run."""
        return self._processes.loss

    def load(self, model_dir: str | Path, *, dtype: str, device: str, threads: int | None) -> Model:
        """Loads each rank's part of a checkpoint, on all ranks in parallel. Divides `threads` among the ranks.

        Raises ModelError, ConfigError, and WorkerLost if a rank ends while loading.
        """
        threads_each = max(1, (threads or torch.get_num_threads()) // self.parallelism.num_ranks)
        with tempfile.TemporaryDirectory(prefix="tandem-ranks-") as folder, self._explained():
            store_path = Path(folder) / "store"
            settings = {
                "model_dir": str(model_dir),
                "dtype": dtype,
                "device": device,
                "threads": threads_each,
                "tensor_parallel": self.parallelism.tensor,
                "pipeline_parallel": self.parallelism.pipeline,
                "store": str(store_path),
            }
            self._tell_all(settings)
            part = RankPart.load(settings, 0)
            facts = self._hear_all()
            self._tell_all({})
            part.connect(store_path)
            self._hear_all()
        self._part = part
        self._processes.begin_serving()
        return self._model(part, facts)

    def make_pool(self, layout: PageLayout, num_pages: int) -> PagePool:
        """Returns pages in memory that only the ranks can map. The memory is freed when the last rank ends."""
        assert self._part is not None, "the model is loaded first"
        num_bytes = num_pages * math.prod(layout.shape) * layout.dtype.itemsize
        fd = os.memfd_create("tandem-pages")
        try:
            os.truncate(fd, num_bytes)
            wire = {"num_bytes": num_bytes, "num_pages": num_pages, "page_size": layout.page_size}
            with self._explained():
                for peer in self._processes.commands:
                    send_object(peer, wire, fds=(fd,))
            data = self._part.use_pool(mmap.mmap(fd, num_bytes), wire)
        finally:
            os.close(fd)
        return PagePool(layout, num_pages, data=data)

    def forward(self, step: DecoderStep) -> torch.Tensor:
        """Runs a step on all ranks.

        Returns the logits, float32 [rows, V]. Raises the errors of `forward_with_states`.
        """
        return self.forward_with_states(step)[0]

    def forward_with_states(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a step on all ranks. Returns its logits [rows, V] and states [num_states, hidden], both float32.

        Returns after the last write of every rank. Rank 0 may finish its own part earlier: in a step without logits, it
        receives no rows from the other ranks, and later stages still write. Raises InvariantViolated for an invalid
        step, before any rank starts it, and WorkerLost if a rank has ended.
        """
        assert self._part is not None, "the model is loaded first"
        check_step(step, self._part.source.config)
        message = StepMessage(step.token_ids, step.positions, step.batch, step.logits_indices, step.num_states).encode()
        with self._explained():
            for peer in self._processes.commands:
                send_step(peer, message)
            outputs = self._part.forward_with_states(step)
            for peer in self._processes.commands:
                await_acknowledgement(peer)
            return outputs

    def close(self) -> None:
        """Stops the other ranks. Idempotent."""
        self._processes.close()

    def _model(self, part: RankPart, facts: list[dict[str, Any]]) -> Model:
        row_sums = [{name: int(value, 16) for name, value in fact["row_sums"].items()} for fact in facts]
        arithmetics = {fact["arithmetic"] for fact in facts} | {part.facts()["arithmetic"]}
        if len(arithmetics) > 1:
            raise ConfigError(f"the ranks of the worker compute differently: {', '.join(sorted(arithmetics))}")
        return Model(part.source, self, fingerprint=part.fingerprint(row_sums))

    def _tell_all(self, value: dict[str, Any]) -> None:
        for peer in self._processes.commands:
            send_object(peer, value)

    def _hear_all(self) -> list[dict[str, Any]]:
        return [receive_object(peer)[0] for peer in self._processes.commands]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Replaces errors of the communication with a rank by the reason why that rank ended."""
        try:
            yield
        except (OSError, RuntimeError, WorkerLost) as error:
            raise self._processes.explain(error) from error
