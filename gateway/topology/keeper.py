"""Tasks that keep sessions: they connect again where one has ended, and end those of silent workers."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable

from gateway.topology.member import Member
from gateway.topology.session import Unreachable, WorkerSession
from services.runtime.errors import NotProven, WorkerUnavailable
from services.runtime.reach import NETWORK, OTHER_CLUSTER, Obstacle

FIRST_RECONNECT_S = 0.1
MAX_RECONNECT_S = 2.0
SILENCE_CHECK_S = 0.25
RENEWED_S = 2.5
"""A lease that was renewed within this time shows that its worker lives: workers renew every second, and the gateway
looks as often. Less than `session.SILENCE_LIMIT_S`: a process that stopped renewed nothing since its last word."""
CHECKS_AT_A_TIME = 256
OWN_PAUSE_S = 1.0
"""If our own check comes this late, this process slept, and no worker is blamed for silence."""

FAILED = Obstacle(
    "the gateway itself failed while it used the session",
    "see `background task failed` in the gateway's log",
)

logger = logging.getLogger(__name__)


async def keep_connected(member: Member, new_session: Callable[[], WorkerSession]) -> None:
    """Makes a new session each time one breaks; returns when the worker is no longer listed."""
    delay_s, last_reason = FIRST_RECONNECT_S, ""
    if member.session.has_ended:  # An unexpected error ended this loop before. A session cannot run twice.
        member.obstacle, member.session = FAILED, new_session()
    while True:
        started_at_s = asyncio.get_running_loop().time()
        try:
            await member.session.run()
        except WorkerUnavailable as error:
            is_news = member.obstacle is None or error.message != last_reason
            member.obstacle, last_reason = _obstacle(error), error.message
            facts = {"worker": member.record.id, "address": member.record.address, "reason": error.message}
            if not is_news:
                pass  # every try fails alike until an operator helps
            elif isinstance(error, NotProven):
                logger.warning("a worker is not used: it and this gateway are not of one cluster", extra=facts)
            else:
                logger.info("session ended", extra=facts)
        if not member.is_listed:
            return
        if asyncio.get_running_loop().time() - started_at_s > MAX_RECONNECT_S:
            delay_s = FIRST_RECONNECT_S
        await asyncio.sleep(delay_s * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
        delay_s = min(delay_s * 2, MAX_RECONNECT_S)
        member.session = new_session()


async def break_silent(members: Callable[[], Iterable[Member]], renewed_at_s: Callable[[str], float]) -> None:
    """Breaks the sessions of silent workers, until it is cancelled.

    `renewed_at_s`: when a worker's lease was renewed, by its id, on the event loop's clock; -inf: unknown.
    """
    loop = asyncio.get_running_loop()
    checked_at_s = loop.time()
    while True:
        await asyncio.sleep(SILENCE_CHECK_S)
        slept_s = loop.time() - checked_at_s - SILENCE_CHECK_S
        checked_at_s = loop.time()
        for number, member in enumerate(members(), start=1):
            if number % CHECKS_AT_A_TIME == 0:
                await asyncio.sleep(0)  # thousands of workers must not hold up the event loop
            if slept_s > OWN_PAUSE_S:
                member.session.forgive_silence(slept_s)
            is_renewed = checked_at_s - renewed_at_s(member.record.id) < RENEWED_S
            member.session.check_silence(checked_at_s, is_lease_renewed=is_renewed)


def _obstacle(error: WorkerUnavailable) -> Obstacle:
    if isinstance(error, Unreachable):
        return error.obstacle
    return Obstacle(error.message, OTHER_CLUSTER if isinstance(error, NotProven) else NETWORK)
