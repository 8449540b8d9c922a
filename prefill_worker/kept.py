"""Kept pages: those of a computed prompt outlive their attempt, so that the next attempt hands them over again.

Belongs to the event loop. The engine thread has the pages (`worker.engine.PrefillEngine.take_kept`); here is what they
are pages of, and until when.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.engine.steps.sequence import Sampling
from services.engine.steps.step import SampledToken
from services.structured.form import AnswerForm
from worker.attempts import AttemptKey, AttemptSpec

KEPT_S = 10.0
"""How long pages are kept after their attempt: a gateway notices a death and tries again well within it."""
KEPT_WAIT_S = 0.5
"""How long the next attempt waits for the former one to release the pages before it computes them again."""


@dataclass(eq=False, slots=True)
class Kept:
    """A prompt whose pages are all computed, and what another attempt must have in common with the one that did it."""

    key: AttemptKey
    """The attempt under which the engine thread knows the pages."""
    prompt_token_ids: list[int]
    cache_salt: str
    sampling: Sampling
    first_token_id: int
    outcome: SampledToken | None
    """The first token as it was sampled. None: the attempt had been told which it is."""
    form: AnswerForm | None = None
    is_let_go: asyncio.Event = field(default_factory=asyncio.Event)
    """The attempt has ended and nothing reads the pages."""
    expiry: asyncio.TimerHandle | None = None

    def fits(self, spec: AttemptSpec[Sampling]) -> bool:
        """Whether computing the prompt of `spec` would give these pages and this token."""
        if spec.prompt_token_ids != self.prompt_token_ids or spec.cache_salt != self.cache_salt:
            return False
        if spec.sampling != self.sampling or spec.form != self.form:
            return False
        if spec.emitted_token_ids:
            return spec.emitted_token_ids[0] == self.first_token_id
        return self.outcome is not None

    async def let_go(self) -> bool:
        """Waits until nothing reads the pages; returns whether that came in time."""
        try:
            async with asyncio.timeout(KEPT_WAIT_S):
                await self.is_let_go.wait()
        except TimeoutError:
            return False
        return True


class KeptPrompts:
    """The newest computed attempt of each request. `drop` has the engine forget the pages of an attempt."""

    def __init__(self, drop: Callable[[AttemptKey], None]) -> None:
        self._drop = drop
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, spec: AttemptSpec[Sampling]) -> Kept | None:
        """What an earlier attempt has computed of the same; what does not fit is forgotten."""
        former = self._kept.get(spec.key.request_id)
        if former is not None and not former.fits(spec):
            self.forget(former)
            return None
        return former

    def add(self, spec: AttemptSpec[Sampling], outcome: SampledToken | None) -> Kept:
        """Keeps the pages of an attempt from here on, in place of an earlier one's."""
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
        """Whether these pages are kept still."""
        return self._kept.get(kept.key.request_id) is kept

    def let_go(self, kept: Kept) -> None:
        """Notes that the attempt released the pages; the time for which they are kept begins."""
        kept.is_let_go.set()
        kept.expiry = asyncio.get_running_loop().call_later(KEPT_S, self.forget, kept)

    def forget(self, kept: Kept) -> None:
        """Stops keeping pages."""
        if kept in self:
            del self._kept[kept.key.request_id]
        if kept.expiry is not None:
            kept.expiry.cancel()
        self._drop(kept.key)

    def clear(self) -> None:
        """Stops keeping anything."""
        for kept in list(self._kept.values()):
            self.forget(kept)
