import contextlib
import random

import pytest
import torch

from services.engine.cache.pool import PageLayout, PagePool
from services.engine.cache.swap import SwapSpace
from services.runtime.errors import InvariantViolated

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUT = PageLayout(num_layers=2, num_kv_heads=3, head_dim=5, page_size=7, dtype=torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_come_back_bit_by_bit_wherever_they_go(device: str) -> None:
    pool = PagePool(LAYOUT, 20, device=device)
    pool.data.normal_()
    before = pool.data.clone()
    space = SwapSpace(pool, 12 * LAYOUT.page_bytes + 1)
    assert space.num_slots == space.num_free_slots == 12
    source = random.Random(3)
    ids = source.sample(range(20), 12)
    first, second = space.store(ids[:7]), space.store(ids[7:])
    assert space.num_free_slots == 0
    pool.data.zero_()
    others = source.sample(range(20), 12)
    space.load(second, others[7:])
    space.load(first[3:], others[3:7])
    assert torch.equal(pool.data[others[3:]], before[ids[3:]])
    assert not pool.data[[page for page in range(20) if page not in others[3:]]].any()
    space.free(first)
    assert space.num_free_slots == 7
    assert not set(space.store(ids[:7])) & set(second)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    pool = PagePool(LAYOUT, 20, device="cpu")
    pool.data.normal_()
    space = SwapSpace(pool, 12 * LAYOUT.page_bytes)
    assert space._memory is not None
    space._pin(space._memory)
    assert "cannot be pinned (error 2)" in caplog.text
    before = pool.data[3].clone()
    (slot,) = space.store([3])
    space.load([slot], [4])
    assert torch.equal(pool.data[4], before)


def test_a_space_without_room_holds_nothing() -> None:
    pool = PagePool(LAYOUT, 4)
    space = SwapSpace(pool, LAYOUT.page_bytes - 1)
    assert space.num_slots == 0
    with pytest.raises(InvariantViolated):
        space.store([1])
    space = SwapSpace(pool, 2 * LAYOUT.page_bytes)
    with pytest.raises(InvariantViolated):
        space.store([1, 2, 3])
    slots = space.store([1, 2])
    with pytest.raises(InvariantViolated):
        space.load(slots, [1])
    space.free(slots)
    with pytest.raises(InvariantViolated):
        space.free(slots)
