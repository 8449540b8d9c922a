"""Gateways see the last decisions of an autoscaler, whatever else stands in their place."""

import pytest

from services.cluster.decision_board import MAX_CHARS, NUM_KEPT, DecisionBoard, ShownDecision
from services.cluster.redis_store import Script, Store
from services.runtime.errors import StoreUnavailable


async def test_the_last_decisions_are_kept_latest_first(patient_store: Store) -> None:
    board = DecisionBoard(patient_store)
    assert await board.read() == []
    for number in range(NUM_KEPT + 3):
        await board.put(ShownDecision(float(number), f"ordered {number}:1", "more came"))
    assert [one.at_unix_s for one in await board.read()] == [float(n) for n in range(NUM_KEPT + 2, 2, -1)]
    assert (await board.read())[0] == ShownDecision(12.0, "ordered 12:1", "more came")


async def test_anything_else_in_its_place_is_an_empty_list_and_long_texts_are_cut(patient_store: Store) -> None:
    board, key = DecisionBoard(patient_store), patient_store.keys.decisions
    for wrong in (b"\xff", b"{}", b'[{"at_unix_s": "now", "done": 1}]'):
        await patient_store.run(Script("return redis.call('SET', KEYS[1], ARGV[1])"), (key,), (wrong,))
        assert await board.read() == []
    await board.put(ShownDecision(1.0, "x" * 5000, "y" * 5000))
    (found,) = await board.read()
    assert (len(found.done), len(found.reason)) == (MAX_CHARS, MAX_CHARS)


async def test_without_redis_it_says_so() -> None:
    store = Store("redis://127.0.0.1:1/0", cluster="test")
    board = DecisionBoard(store)
    with pytest.raises(StoreUnavailable):
        await board.put(ShownDecision(1.0, "ordered 1:1", "more came"))
    with pytest.raises(StoreUnavailable):
        await board.read()
    await store.close()
