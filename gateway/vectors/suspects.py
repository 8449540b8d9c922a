"""Texts that kill the workers which compute them: each takes a few with it, and none is found guilty by chance.

A strike is the death of a worker that had the text. One proves nothing, because many texts were beside it: from then on
the text is computed while no other one with a strike is. It is guilty after as many strikes as an answer, and is kept
in the same list (`gateway.requests.quarantine`). A process that is back was not dead, and takes its strike back.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway.requests.call import AnswerSpec
from gateway.requests.quarantine import MAX_STRIKES, QUARANTINED, Quarantine
from gateway.topology.members import Topology
from services.runtime.errors import Quarantined, TandemError, WorkerLost


class Suspects:
    """The judge of one gateway's texts. A text's strikes are the incarnations of the workers that it lost."""

    def __init__(self, topology: Topology, quarantine: Quarantine) -> None:
        self._topology = topology
        self._quarantine = quarantine
        self._trial = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def trial(self, strikes: set[str]) -> AsyncIterator[None]:
        """Keeps texts with strikes apart from each other; others do not wait."""
        if not strikes:
            yield
            return
        async with self._trial:
            yield

    def judge(self, failure: TandemError, spec: AnswerSpec, *, strikes: set[str], incarnation: str) -> int:
        """Adds a strike where the worker was lost; returns how many failures cost the text one of its attempts.

        Raises Quarantined for a text that is guilty.
        """
        if not isinstance(failure, WorkerLost):
            return 1
        strikes.add(incarnation)
        living = {member.session.peer.incarnation for member in self._topology.members() if member.session.is_up}
        back = strikes & living
        strikes -= back
        if len(strikes) >= MAX_STRIKES:
            self._quarantine.condemn(spec, num_deaths=len(strikes))
            raise Quarantined(QUARANTINED)
        return len(back)
