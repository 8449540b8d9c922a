"""The simulated prefix cache, against implementations that share nothing with it."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.simulator.block_cache import EVICTIONS, LRU, LRU_LEAF_FIRST, BlockCache, Lease, PagePool, hit_rate
from planning.simulator.traces import read_trace
from tests.examples import examples

CONVERSATION = Path(__file__).resolve().parents[3] / "benchmarks" / "traces" / "mooncake_fast25_conversation.jsonl.gz"

PROMPTS = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=8), max_size=30)


@cache
def conversation() -> tuple[tuple[int, ...], ...]:
    return tuple(request.block_ids for request in read_trace(CONVERSATION).requests)


def hits_by_stack_distance(prompts: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Stack distance of every repeated reference (Mattson et al., 1970): one pass that answers for every capacity.

    An LRU cache of n blocks finds a block exactly when fewer than n other blocks were touched since it was last. A
    binary indexed tree over the times of references counts them; there is no cache in it at all.
    """
    references = [block for prompt in prompts for block in prompt]
    tree, last, distances = [0] * (len(references) + 1), {}, []

    def add(position: int, amount: int) -> None:
        while position <= len(references):
            tree[position] += amount
            position += position & -position

    def total(position: int) -> int:
        amount = 0
        while position:
            amount += tree[position]
            position &= position - 1
        return amount

    for time, block in enumerate(references, 1):
        before = last.get(block)
        if before is not None:
            distances.append(total(time - 1) - total(before))
            add(before, -1)
        add(time, 1)
        last[block] = time
    return distances, len(references)


@cache
def distances() -> tuple[list[int], int]:
    return hits_by_stack_distance(conversation())


@pytest.mark.parametrize(
    ("capacity", "published"),
    [(19, "0.0253"), (1_953, "0.0532"), (19_531, "0.2852"), (97_656, "0.3635"), (None, "0.3664")],
)
def test_hit_rate_of_the_conversation_trace_is_that_of_an_independent_reference(
    capacity: int | None, published: str
) -> None:
    stack_distances, num_references = distances()
    expected = sum(capacity is None or distance < capacity for distance in stack_distances) / num_references
    measured = hit_rate(conversation(), capacity, LRU)
    assert measured == expected
    assert f"{measured:.4f}" == published


def test_leaves_before_parents_is_better_where_room_is_short_and_equal_where_it_is_not() -> None:
    measured = {capacity: hit_rate(conversation(), capacity, LRU_LEAF_FIRST) for capacity in (19, 1_953, 19_531, None)}
    assert {capacity: f"{rate:.4f}" for capacity, rate in measured.items()} == {
        19: "0.0417",
        1_953: "0.0533",
        19_531: "0.2852",
        None: "0.3664",
    }


@given(PROMPTS, st.integers(1, 20))
def test_plain_lru_is_stack_distance_on_any_prompts(prompts: list[list[int]], capacity: int) -> None:
    stack_distances, num_references = hits_by_stack_distance(prompts)
    expected = sum(distance < capacity for distance in stack_distances) / max(num_references, 1)
    assert hit_rate(prompts, capacity, LRU) == expected


@given(PROMPTS, st.integers(1, 20), st.integers(0, 10))
def test_more_room_never_finds_less(prompts: list[list[int]], capacity: int, more: int) -> None:
    assert hit_rate(prompts, capacity + more, LRU) >= hit_rate(prompts, capacity, LRU)


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=30), st.integers(1, 8))
def test_leaf_first_keeps_every_parent_of_what_it_keeps(turns: list[list[int]], capacity: int) -> None:
    ids: dict[tuple[int, ...], int] = {}
    blocks = BlockCache(capacity, LRU_LEAF_FIRST)
    for turn in turns:
        chain = [ids.setdefault(tuple(turn[: end + 1]), len(ids)) for end in range(len(turn))]
        blocks.access(chain)
        for key, block_id in ids.items():
            if block_id in blocks and len(key) > 1:
                assert ids[key[:-1]] in blocks


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32), st.integers(1, 24), st.sampled_from(EVICTIONS))
def test_pages_are_conserved_and_all_come_back(seed: int, num_pages: int, eviction: str) -> None:
    """What is taken is never more than there is, equals what the leases hold, and is nothing in the end."""
    source, pool, leases, ids = random.Random(seed), PagePool(num_pages, eviction), list[Lease](), dict[object, int]()
    for _ in range(60):
        if leases and source.random() < 0.45:
            pool.release(leases.pop(source.randrange(len(leases))))
        else:
            turn = tuple(source.randrange(2) for _ in range(source.randrange(6)))
            chain = tuple(ids.setdefault(turn[: end + 1], len(ids)) for end in range(len(turn)))
            num_cached, num_before = pool.num_cached(chain), pool.num_available
            lease = pool.reserve(chain, len(chain) + source.randrange(3) or 1)
            if lease is None:
                assert pool.num_available == num_before
                continue
            assert lease.num_cached == num_cached
            if source.random() < 0.8:
                pool.publish(lease)
                assert pool.num_cached(chain) == len(chain)
            leases.append(lease)
        in_use = sum(lease.num_private for lease in leases) + len({block for lease in leases for block in lease.shared})
        assert pool.num_available == num_pages - in_use >= 0
        assert len(pool._idle) <= pool.num_available
    for lease in leases:
        pool.release(lease)
    assert pool.num_available == num_pages
