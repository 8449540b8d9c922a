"""Memory shared by GPUs' driver, over a driver that only keeps books: what is called in which context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.runtime import cuda_memory
from services.runtime.cuda_memory import CudaError


class Function:
    """A driver's function as ctypes has it: it is called, and told its arguments' types."""

    def __init__(self, call: Callable[..., int]) -> None:
        self.argtypes: object = None
        self._call = call

    def __call__(self, *arguments: object) -> int:
        return self._call(*arguments)


class BookkeepingDriver:
    """What a process has of a GPU: a primary context, destroyed with its last user, and mappings in it."""

    def __init__(self) -> None:
        self.num_users = 0
        self.pushed: list[int] = []
        self.mapped: set[int] = set()
        self.failing = ""
        for name in cuda_memory.SIGNATURES:
            setattr(self, name, Function(lambda *arguments, name=name: self._answer(name, *arguments)))

    def _answer(self, name: str, *arguments: Any) -> int:
        if name == self.failing:
            return 999
        handler = getattr(self, f"_on_{name}", None)
        if handler is not None:
            handler(*arguments)
        return 0

    def _on_cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        self.num_users += 1
        context._obj.value = 7

    def _on_cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        self.num_users -= 1
        if not self.num_users:
            self.mapped.clear()

    def _on_cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> None:
        assert self.num_users
        self.pushed.append(context.value or 0)

    def _on_cuCtxPopCurrent_v2(self, context: object) -> None:
        self.pushed.pop()

    def _on_cuMemGetAllocationGranularity(self, granularity: Any, prop: object, option: int) -> None:
        granularity._obj.value = 2 * 2**20

    def _on_cuMemAddressReserve(self, address: Any, *_: object) -> None:
        address._obj.value = 2**40

    def _on_cuMemMap(self, address: Any, *_: object) -> None:
        assert self.pushed == [7]
        self.mapped.add(address if isinstance(address, int) else address.value)

    def _on_cuMemUnmap(self, address: Any, *_: object) -> None:
        assert self.pushed == [7]
        self.mapped.discard(address if isinstance(address, int) else address.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[BookkeepingDriver]:
    """The driver of GPU 0 in this process."""
    made = BookkeepingDriver()
    cuda_memory._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    yield made
    cuda_memory._driver.cache_clear()


def test_what_is_mapped_before_anybody_else_has_a_context_stays_mapped(driver: BookkeepingDriver) -> None:
    memory = cuda_memory.map_shared(5, 100, 0)
    assert driver.num_users == 1
    assert driver.mapped == {memory.address}
    assert not driver.pushed
    del memory
    assert not driver.mapped
    assert not driver.pushed


def test_a_call_that_fails_leaves_no_context_behind(driver: BookkeepingDriver) -> None:
    driver.failing = "cuMemMap"
    with pytest.raises(CudaError, match="cuMemMap"):
        cuda_memory.map_shared(5, 100, 0)
    assert not driver.pushed
    assert not driver.mapped
