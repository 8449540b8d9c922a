"""Places for messages that are being received: whose turn it is, and which message is cut off."""

import asyncio
import contextlib

import pytest

from services.runtime import places
from services.runtime.errors import InvalidRequest, Overloaded, RateLimited
from services.runtime.places import ACCOUNT_PART, STRANGERS, Places


class Holder:
    """Messages that stay on their way until they are told to arrive."""

    def __init__(self, held: Places) -> None:
        self.held, self.order = held, []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._arrived: dict[str, asyncio.Event] = {}

    async def begin(self, name: str, account: str) -> None:
        self._arrived[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._receive(name, account))
        for _ in range(3):
            await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self._arrived[name].set()
        await self._tasks[name]
        for _ in range(5):
            await asyncio.sleep(0)

    def task(self, name: str) -> asyncio.Task[None]:
        return self._tasks[name]

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _receive(self, name: str, account: str) -> None:
        async with self.held.place(account):
            self.order.append(name)
            await self._arrived[name].wait()


@pytest.fixture
async def holder():
    made = Holder(Places(2 * ACCOUNT_PART))
    yield made
    await made.close()
    assert made.held.num_taken == 0


async def test_an_account_has_its_part_and_the_nameless_one_all(holder):
    for number in range(3):
        await holder.begin(f"a{number}", "a")
    assert holder.order == ["a0", "a1"]
    for number in range(8):
        await holder.begin(f"n{number}", "")
    assert holder.held.num_taken == 8
    await holder.end("a0")  # the place goes to the account that has waited for longer
    assert holder.order[-1] == "a2"
    assert len(holder.order) == 9


async def test_accounts_take_turns(holder):
    for number in range(8):
        await holder.begin(f"n{number}", "")
    for name in ("a1", "a2", "b1", "b2"):
        await holder.begin(name, name[0])
    for number in range(4):
        await holder.end(f"n{number}")
    assert holder.order[8:] == ["a1", "b1", "a2", "b2"]


async def test_one_that_stops_waiting_leaves_nothing(holder):
    for number in range(2):
        await holder.begin(f"a{number}", "a")
    await holder.begin("a2", "a")
    holder.task("a2").cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await holder.task("a2")
    assert holder.held._waiting == {}
    await holder.end("a0")
    await holder.begin("a3", "a")
    assert holder.order == ["a0", "a1", "a3"]


async def test_too_many_waiting_calls_are_refused(holder, monkeypatch):
    monkeypatch.setattr(places, "MAX_WAITING", 1)
    for number in range(3):
        await holder.begin(f"a{number}", "a")
    with pytest.raises(RateLimited) as refused:
        async with holder.held.place("a"):
            pass
    assert (refused.value.limit, holder.held.num_refused["waiting"]) == ("message_memory", 1)


async def test_a_message_that_takes_too_long_and_a_wait_that_does(monkeypatch):
    monkeypatch.setattr(places, "RECEIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(places, "PATIENCE_S", 10.0)
    held = Places(1)
    with pytest.raises(InvalidRequest, match="did not arrive within"):
        async with held.place("a"):
            await asyncio.Event().wait()
    taken = held._take("")
    with pytest.raises(Overloaded):
        async with held.place("b"):
            pass
    held._give_back(taken)
    assert (held.num_taken, held.num_refused["time"]) == (0, 1)


async def test_a_stranger_gives_its_place_to_a_caller_that_is_known():
    held = Places(1)

    async def stranger() -> None:
        async with held.place(STRANGERS):
            await asyncio.Event().wait()

    slow = asyncio.create_task(stranger())
    await asyncio.sleep(0)
    async with held.place("a"):
        with pytest.raises(RateLimited, match="while others waited"):
            await slow
        assert (held.num_taken, held.num_refused["cut off"]) == (1, 1)
