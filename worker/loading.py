"""The interface to a loaded model, independent of its engine.

A worker package defines how to load each engine by name (`worker.role.Role`). No other module names an engine.
"""

from typing import Protocol

from kv_transfer.page_bytes import PageGenerations, PageMemory
from services.engine.cache.host_tier import HostTier
from services.engine.steps.limits import SequenceLimits
from services.engine.steps.sequence import Sampling
from services.engine.weights.shard import Parallelism
from services.runtime.errors import TandemError
from services.runtime.identity import AnswerIdentity


class KeptWeights(Protocol):
    """The weights of a model without its pages. A role can reload the model from them."""

    def close(self) -> None:
        """Stops sharing the weights with other processes. May be called again."""
        ...


class LoadedModel(Protocol):
    """A model in memory, with the pages that handoffs read and write."""

    @property
    def pool(self) -> PageMemory:
        """Returns the pages. Their numbers are the ones in the engine's reports."""
        ...

    @property
    def allocator(self) -> PageGenerations:
        """Returns the check whether a page is still in the generation in which it was sent."""
        ...

    @property
    def tier(self) -> HostTier | None:
        """Returns the host memory tier below the pool, or None."""
        ...

    @property
    def fingerprint(self) -> str:
        """Workers exchange pages only if their fingerprints are equal. Part of the names of pages."""
        ...

    @property
    def is_exact(self) -> bool:
        """Returns whether tokens are bitwise identical regardless of the batch and of chunking."""
        ...

    @property
    def limits(self) -> SequenceLimits:
        """Returns the limits of a sequence."""
        ...

    @property
    def parallelism(self) -> Parallelism:
        """Returns the processes that share the model."""
        ...

    @property
    def gpu_uuid(self) -> str | None:
        """Returns the NVML UUID of the model's GPU, or None if it runs on the CPU."""
        ...

    @property
    def kernels_error(self) -> str:
        """Returns why torch computes instead of the native kernels. Empty if the native kernels are used."""
        ...

    @property
    def adapters(self) -> frozenset[str]:
        """Returns the names of the available adapters."""
        ...

    @property
    def embeds(self) -> bool:
        """Returns whether the engine can return the hidden states of prompts."""
        ...

    @property
    def weights(self) -> KeptWeights | None:
        """Returns the weights that may stay in memory while another model is served, or None."""
        ...

    @property
    def loss(self) -> TandemError | None:
        """Returns the error that broke the engine while it was idle, or None. Callable from any thread."""
        ...

    def identity(self, *, vocabulary: str, grammars: str) -> AnswerIdentity:
        """Returns everything that determines its tokens, apart from the request."""
        ...

    def check(self, sampling: Sampling) -> None:
        """Raises NotOffered for options that its engine does not support."""
        ...

    def close(self) -> None:
        """Stops the other processes of the model. May be called again."""
        ...
