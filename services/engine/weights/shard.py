"""Assigns parts of a model to the ranks of a worker. Does not depend on processes, tensors, or communication.

Ranks are numbered from 0, stage by stage: rank = stage * tensor + tensor_rank. Rank 0 is the worker's main process.
"""

from dataclasses import dataclass

from services.engine.weights.config import ModelConfig
from services.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Number of processes per model: `tensor` processes share each layer, and `pipeline` stages share the layers."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of processes of the worker."""
        return self.tensor * self.pipeline

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError if the model cannot be split this way."""
        if self.tensor < 1 or self.pipeline < 1:
            raise ConfigError(f"tensor_parallel ({self.tensor}) and pipeline_parallel ({self.pipeline}) are at least 1")
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % self.tensor:
            raise ConfigError(f"--tensor-parallel is {self.tensor}, it must divide the model's {heads} attention heads")
        if kv_heads % self.tensor and self.tensor % kv_heads:
            raise ConfigError(
                f"--tensor-parallel is {self.tensor}, it must divide the model's {kv_heads} KV heads or be a multiple"
            )
        for size in (config.hidden_size, config.intermediate_size, config.vocab_size):
            if not all(len(part_of(size, self.tensor, rank)) for rank in range(self.tensor)):
                raise ConfigError(f"--tensor-parallel is {self.tensor}, too much for a matrix with {size} rows")
        if self.pipeline > config.num_layers:
            raise ConfigError(
                f"--pipeline-parallel is {self.pipeline}, it must be at most the model's {config.num_layers} layers"
            )


SINGLE = Parallelism()
"""No parallelism: a single process."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part. Every matrix is split by rows (output features), so a part is contiguous in the file."""

    parallelism: Parallelism
    rank: int

    @property
    def stage(self) -> int:
        """Index of the pipeline stage, from 0."""
        return self.rank // self.parallelism.tensor

    @property
    def tensor_rank(self) -> int:
        """Index among the ranks of the stage, from 0."""
        return self.rank % self.parallelism.tensor

    @property
    def is_first_stage(self) -> bool:
        """Whether the stage reads tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage computes logits."""
        return self.stage == self.parallelism.pipeline - 1

    def layers(self, config: ModelConfig) -> range:
        """Returns the stage's layers."""
        stages = self.parallelism.pipeline
        return range(config.num_layers * self.stage // stages, config.num_layers * (self.stage + 1) // stages)

    def rows(self, size: int) -> range:
        """Returns the rank's rows of a matrix with `size` rows."""
        return part_of(size, self.parallelism.tensor, self.tensor_rank)

    def heads(self, config: ModelConfig) -> range:
        """Returns the rank's query heads."""
        return self.rows(config.num_heads)

    def num_kv_groups(self, config: ModelConfig) -> int:
        """Returns the number of ranges of KV heads. It is less than the number of ranks if ranks share a KV head."""
        return min(self.parallelism.tensor, config.num_kv_heads)

    def kv_group(self, config: ModelConfig) -> int:
        """Returns the index of the rank's range of KV heads, to which its query heads attend."""
        return self.tensor_rank * self.num_kv_groups(config) // self.parallelism.tensor

    def kv_heads(self, config: ModelConfig) -> range:
        """Returns the rank's KV heads."""
        return part_of(config.num_kv_heads, self.num_kv_groups(config), self.kv_group(config))

    def is_first_of_kv_group(self, config: ModelConfig) -> bool:
        """Returns whether this is the first rank of the stage with these KV heads."""
        return self.tensor_rank * self.num_kv_groups(config) % self.parallelism.tensor == 0


def part_of(size: int, num_parts: int, index: int) -> range:
    """Returns part `index` of `size` rows. All parts are equally long, except that the last ones may be shorter."""
    longest = -(-size // num_parts)
    return range(min(size, longest * index), min(size, longest * (index + 1)))
