"""The state of each rank, including rank 0: its part of the weights, its connections, and its view of the pages.

Legend: N pages, H KV heads, L layers, S slots of a page, D head_dim.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from services.engine.model import ModelSource, arithmetic_of, layout_fingerprint, open_model
from services.engine.parallel.decoder import ShardedDecoder, layer_math
from services.engine.parallel.meeting import Meeting
from services.engine.parallel.messages import StepMessage
from services.engine.reference.decoder import DecoderStep
from services.engine.reference.rope import RopeTable
from services.engine.weights.load import ShardWeights, load_shard
from services.engine.weights.shard import Parallelism, Shard
from services.runtime.errors import ConfigError, InvariantViolated


class RankPart:
    """One rank's part of a model. Call `load`, then `connect`, then `use_pool`, then `compute`."""

    def __init__(self, source: ModelSource, shard: Shard, weights: ShardWeights, row_sums: dict[str, int]) -> None:
        self.source = source
        self.row_sums = row_sums
        self._shard = shard
        self._weights = weights
        self._rope = RopeTable(source.config, device=source.placement.device)
        self._decoder: ShardedDecoder | None = None
        self._pool_data: torch.Tensor | None = None

    @classmethod
    def load(cls, settings: Mapping[str, Any], rank: int) -> RankPart:
        """Reads the rank's part of a checkpoint. `settings` are the settings that `RankGroup` sends.

        Raises ModelError and ConfigError like load_model.
        """
        parallelism = Parallelism(settings["tensor_parallel"], settings["pipeline_parallel"])
        torch.set_num_threads(settings["threads"])
        source = open_model(settings["model_dir"], dtype=settings["dtype"], device=settings["device"])
        try:
            parallelism.check(source.config)
            if source.placement.device.type != "cpu":
                raise ConfigError("--tensor-parallel and --pipeline-parallel above 1 need --device cpu")
            shard = Shard(parallelism, rank)
            weights = load_shard(source.config, source.checkpoint, source.placement, shard)
            return cls(source, shard, weights, source.checkpoint.row_sums())
        finally:
            source.checkpoint.close()

    def facts(self) -> dict[str, Any]:
        """Returns the values that rank 0 needs from this rank."""
        return {
            "arithmetic": arithmetic_of(self.source.kernels, self.source.placement.device),
            "row_sums": {name: f"{value:x}" for name, value in self.row_sums.items()},
        }

    def fingerprint(self, others: Iterable[Mapping[str, int]]) -> str:
        """Returns the fingerprint of the model, combined from the rows read by this rank and the `others`.

        It equals the fingerprint of a model with a single rank.
        """
        return layout_fingerprint(self.source.config, weights_digest=self.source.checkpoint.digest(others))

    def connect(self, store_path: Path) -> None:
        """Connects to the other ranks. Raises RuntimeError on failure."""
        meeting = Meeting(self._shard, store_path)
        math = layer_math(self.source.config, self._shard, self.source.kernels)
        self._decoder = ShardedDecoder(self.source.config, self._shard, self._weights, math, meeting)

    def use_pool(self, memory: mmap.mmap, layout: Mapping[str, Any]) -> torch.Tensor:
        """Maps the worker's pages as a tensor: [N, H, L, 2, S, D]."""
        config = self.source.config
        shape = (layout["num_pages"], config.num_kv_heads, config.num_layers, 2, layout["page_size"], config.head_dim)
        self._pool_data = torch.frombuffer(memory, dtype=self.source.placement.dtype).view(shape)
        return self._pool_data

    @torch.inference_mode()
    def compute(self, step: StepMessage) -> None:
        """Runs this rank's part of a step that rank 0 runs too."""
        if self._pool_data is None:
            raise InvariantViolated("a rank has no pages yet")
        rope = self._rope.ensure(step.batch.longest_context)
        self.forward_with_states(
            DecoderStep(
                step.token_ids,
                step.positions,
                step.batch,
                self._pool_data,
                step.logits_indices,
                rope,
                step.num_states,
            )
        )

    def forward_with_states(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the rank's part of a step. Returns the logits [rows, V] and the requested states on rank 0."""
        if self._decoder is None:
            raise InvariantViolated("a rank computes before it has met the others")
        return self._decoder.forward_with_states(step)
