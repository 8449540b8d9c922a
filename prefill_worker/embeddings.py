"""Turns the hidden states of an embedding request into its embedding, which ends the attempt."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from protos import worker_pb2
from services.engine.steps.sequence import Pooling
from services.engine.steps.step import PooledState
from services.runtime.errors import InvalidRequest, NotOffered
from worker.engine import ComputedChunk

_POOLINGS: dict[int, Pooling] = {worker_pb2.POOLING_LAST: "last", worker_pb2.POOLING_MEAN: "mean"}


@dataclass(frozen=True, slots=True)
class EmbeddingWish:
    """Parameters of an embedding. It is truncated to `dimensions` values, or complete if that is 0."""

    pooling: Pooling
    dimensions: int
    is_normalized: bool

    @classmethod
    def read(cls, message: worker_pb2.Embed, *, is_offered: bool) -> "EmbeddingWish":
        """Parses an embedding command.

        Raises InvalidRequest, or NotOffered if the engine does not support embeddings.
        """
        if not is_offered:
            raise NotOffered("the engine of this worker gives no embeddings", field="model")
        pooling = _POOLINGS.get(message.pooling)
        if pooling is None:
            raise InvalidRequest("pooling must be that of the last token or the mean", field="pooling")
        return cls(pooling, message.dimensions, message.is_normalized)

    async def vector_of(self, next_chunk: Callable[[], Awaitable[ComputedChunk]], *, num_tokens: int) -> bytes:
        """Waits for the last chunk of a prompt of `num_tokens`. Returns its embedding in the format of `vector`.

        Raises NonFiniteLogits, and InvalidRequest as `vector` does.
        """
        while not (chunk := await next_chunk()).is_last:
            pass
        assert isinstance(chunk.outcome, PooledState), "the last chunk of such a prompt is pooled"
        return self.vector(chunk.outcome.state, num_tokens=num_tokens)

    def vector(self, pooled: np.ndarray, *, num_tokens: int) -> bytes:
        """Returns the embedding (little-endian float32) of a prompt of `num_tokens` from its pooled state, [hidden].

        Raises InvalidRequest if more dimensions are requested than the model has.
        """
        if self.dimensions > len(pooled):
            raise InvalidRequest(f"dimensions must be at most {len(pooled)}", field="dimensions")
        kept = pooled[: self.dimensions or None].astype(np.float64)
        if self.pooling == "mean":
            kept /= num_tokens
        length = float(np.sqrt(kept @ kept))
        if self.is_normalized and length > 0:
            kept /= length
        return kept.astype("<f4").tobytes()
