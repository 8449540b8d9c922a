"""What an end of a Link does when its machine, or a thread, contradicts itself."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from kv_transfer.link_end import LinkEnd
from kv_transfer.protocol.actions import Action
from services.runtime.errors import TandemError, TransferFailed
from tests.waiting import HANG_LIMIT_S


class End(LinkEnd):
    def __init__(self) -> None:
        super().__init__("Link to w")
        self.performed: list[Any] = []
        self.failure: TandemError | None = None
        self.has_failed = asyncio.Event()

    def fail(self, error: TandemError) -> None:
        self.failure = error
        self.has_failed.set()

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if cast(Any, action) == "broken":
                raise KeyError(action)
            self.performed.append(action)


async def test_one_transfers_trouble_does_not_keep_the_others_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    end = End()
    end._perform_last(cast(Any, ["a", "broken", "b"]))
    assert end.performed == ["a", "b"]
    assert "the Link to w contradicts itself" in caplog.text


async def test_what_a_thread_says_arrives_on_the_loop() -> None:
    end, arrived, threads = End(), asyncio.Event(), []

    def hear(word: str) -> None:
        threads.append((word, threading.get_ident()))
        arrived.set()

    await asyncio.to_thread(end._from_thread, hear, "posted")
    await asyncio.wait_for(arrived.wait(), HANG_LIMIT_S)
    assert threads == [("posted", threading.get_ident())]


async def test_a_word_of_a_thread_that_cannot_be_ends_the_link() -> None:
    end = End()

    def contradict() -> None:
        raise ValueError("no such chunk")

    await asyncio.to_thread(end._from_thread, contradict)
    await asyncio.wait_for(end.has_failed.wait(), HANG_LIMIT_S)
    assert isinstance(end.failure, TransferFailed)


async def test_a_peer_that_reads_nothing_ends_the_link_later_not_within_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = End()

    def full(message: object) -> None:
        raise TransferFailed("the peer reads nothing")

    monkeypatch.setattr(end.outbox, "put", full)
    end._send_message(cast(Any, "message"))
    assert end.failure is None, "the machine is still in its own call"
    await asyncio.wait_for(end.has_failed.wait(), HANG_LIMIT_S)
    assert isinstance(end.failure, TransferFailed)


def test_a_loop_that_is_closed_is_told_nothing() -> None:
    async def make() -> End:
        return End()

    end = asyncio.run(make())
    end._from_thread(end.performed.append, "late")
    assert end.performed == []
