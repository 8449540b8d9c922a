"""Retains the pages of a computed prompt after its attempt ends, so that the next attempt can hand them over again.

Belongs to the event loop. The engine thread owns the pages (`worker.engine.PrefillEngine.take_kept`). This module
records which prompt they belong to and how long they are retained.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.engine.steps.sequence import Sampling
from services.engine.steps.step import SampledToken
from services.structured.form import AnswerForm
from worker.attempts import AttemptKey, AttemptSpec

KEPT_S = 10.0
"""How long pages are retained after their attempt. A gateway detects a crash and retries well within this time."""
KEPT_WAIT_S = 0.5
"""How long the next attempt waits for the previous one to release the pages before it recomputes them."""


@dataclass(eq=False, slots=True)
class Kept:
    """A computed prompt, and the properties that another attempt must match to reuse its pages."""

    key: AttemptKey
    """The attempt under whose key the engine thread stores the pages."""
    prompt_token_ids: list[int]
    cache_salt: str
    sampling: Sampling
    first_token_id: int
    outcome: SampledToken | None
    """The sampled first token. None if the command already contained the token."""
    form: AnswerForm | None = None
    is_let_go: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the attempt has ended and nothing reads the pages."""
    expiry: asyncio.TimerHandle | None = None

    def fits(self, spec: AttemptSpec[Sampling]) -> bool:
        """Returns whether computing the prompt of `spec` would yield the same pages and the same token."""
        if spec.prompt_token_ids != self.prompt_token_ids or spec.cache_salt != self.cache_salt:
            return False
        if spec.sampling != self.sampling or spec.form != self.form:
            return False
        if spec.emitted_token_ids:
            return spec.emitted_token_ids[0] == self.first_token_id
        return self.outcome is not None

    async def let_go(self) -> bool:
        """Waits until nothing reads the pages. Returns False on timeout."""
        try:
            async with asyncio.timeout(KEPT_WAIT_S):
                await self.is_let_go.wait()
        except TimeoutError:
            return False
        return True


class KeptPrompts:
    """The latest computed attempt of each request. `drop` makes the engine discard the pages of an attempt."""

    def __init__(self, drop: Callable[[AttemptKey], None]) -> None:
        self._drop = drop
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, spec: AttemptSpec[Sampling]) -> Kept | None:
        """Returns the retained pages that match `spec`, or None. Discards pages of the request that do not match."""
        former = self._kept.get(spec.key.request_id)
        if former is not None and not former.fits(spec):
            self.forget(former)
            return None
        return former

    def add(self, spec: AttemptSpec[Sampling], outcome: SampledToken | None) -> Kept:
        """Retains the pages of an attempt. They replace the pages of an earlier attempt."""
        former = self._kept.get(spec.key.request_id)
        if former is not None:
            self.forget(former)
        first_token_id = spec.emitted_token_ids[0] if outcome is None else outcome.token_id
        kept = self._kept[spec.key.request_id] = Kept(
            spec.key,
            spec.prompt_token_ids,
            spec.cache_salt,
            spec.sampling,
            first_token_id,
            outcome,
            form=spec.form,
        )
        return kept

    def __contains__(self, kept: Kept) -> bool:
        """Returns whether these pages are still retained."""
        return self._kept.get(kept.key.request_id) is kept

    def let_go(self, kept: Kept) -> None:
        """Records that the attempt released the pages, and starts the retention timer."""
        kept.is_let_go.set()
        kept.expiry = asyncio.get_running_loop().call_later(KEPT_S, self.forget, kept)

    def forget(self, kept: Kept) -> None:
        """Discards retained pages."""
        if kept in self:
            del self._kept[kept.key.request_id]
        if kept.expiry is not None:
            kept.expiry.cancel()
        self._drop(kept.key)

    def clear(self) -> None:
        """Discards all retained pages."""
        for kept in list(self._kept.values()):
            self.forget(kept)
