"""What a worker is made from: a loaded model, whatever computes it.

A worker package says how each engine is loaded, by name (`worker.role.Role`); nothing else names an engine.
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
    """The weights of a model without its pages, from which its role loads it again."""

    def close(self) -> None:
        """Stops handing them out to other processes. May be called again."""
        ...


class LoadedModel(Protocol):
    """A model in memory, with the pages that handoffs read and write."""

    @property
    def pool(self) -> PageMemory:
        """The pages, under the numbers that the engine's reports have."""
        ...

    @property
    def allocator(self) -> PageGenerations:
        """Says whether a page is still in the use in which it was sent."""
        ...

    @property
    def tier(self) -> HostTier | None:
        """Host memory below the pool, where it has any."""
        ...

    @property
    def fingerprint(self) -> str:
        """Two workers exchange pages only if theirs agree; part of the names of pages."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether a token is bitwise the same whatever shares its step, and computed alone or with others before it."""
        ...

    @property
    def limits(self) -> SequenceLimits:
        """What a sequence may be at most."""
        ...

    @property
    def parallelism(self) -> Parallelism:
        """The processes that share the model."""
        ...

    @property
    def gpu_uuid(self) -> str | None:
        """The name by which NVML knows the model's GPU; None: it is on none."""
        ...

    @property
    def kernels_error(self) -> str:
        """Why torch computes instead of this engine's compiled kernels. Empty if it does not."""
        ...

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters that it can be computed with."""
        ...

    @property
    def embeds(self) -> bool:
        """Whether it gives the hidden states of prompts."""
        ...

    @property
    def weights(self) -> KeptWeights | None:
        """What may stay in memory while another model is served; None: nothing."""
        ...

    @property
    def loss(self) -> TandemError | None:
        """What has made the engine useless while nobody used it, from any thread."""
        ...

    def identity(self, *, vocabulary: str, grammars: str) -> AnswerIdentity:
        """Returns all that decides its tokens beside the request."""
        ...

    def check(self, sampling: Sampling) -> None:
        """Raises NotOffered for what its engine cannot give."""
        ...

    def close(self) -> None:
        """Ends the other processes that compute it. May be called again."""
        ...
