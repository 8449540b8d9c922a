"""A vLLM that computes what a test says."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from services.engine.cache.pages import PageCounts
from services.engine.steps.sequence import Sequence
from worker.vllm.core import OnBlocks, StepDone

BLOCK_SIZE = 4


@dataclass
class ScriptedCore:
    """A Core that takes its steps from `steps` and writes down what it was asked, by request id."""

    block_size: int = BLOCK_SIZE
    cached: tuple[int, ...] = ()
    """The blocks that the next held request finds cached."""
    steps: deque[StepDone] = field(default_factory=deque)
    asked: list[tuple[str, str]] = field(default_factory=list)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    waiting: dict[str, OnBlocks] = field(default_factory=dict)
    free: int = 20
    num_checks: int = 0

    def add(self, request_id: str, sequence: Sequence, *, salt: bytes, service_class: int) -> None:
        self.asked.append(("add", request_id))
        self.sequences[request_id] = sequence

    def add_held(self, request_id: str, sequence: Sequence, *, salt: bytes, service_class: int) -> tuple[int, ...]:
        self.asked.append(("add_held", request_id))
        self.sequences[request_id] = sequence
        return self.cached

    def add_awaited(
        self,
        request_id: str,
        token_ids: list[int],
        on_blocks: OnBlocks,
        *,
        salt: bytes,
        service_class: int,
        adapter: str = "",
    ) -> None:
        self.asked.append(("add_awaited", request_id))
        self.waiting[request_id] = on_blocks

    def arrived(self, request_id: str, sequence: Sequence) -> None:
        self.asked.append(("arrived", request_id))
        self.sequences[request_id] = sequence

    def abort(self, request_id: str) -> None:
        self.asked.append(("abort", request_id))

    def let_go(self, request_id: str) -> None:
        self.asked.append(("let_go", request_id))

    def step(self) -> StepDone:
        return self.steps.popleft() if self.steps else StepDone((), (), has_more=False)

    def counts(self) -> PageCounts:
        return PageCounts(20, self.free, 0, 0, 20 - self.free)

    def check_books(self) -> None:
        self.num_checks += 1


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()
