"""Fixtures of the engine's tests beside the checkpoints of the root conftest: threads, variants, a paged pool."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from services.engine.reference.attention import AttentionBatch
from tests.conftest import VARIANTS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests share few cores: torch and the kernels use one thread unless a test says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=sorted(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    """The name of each architecture variant in turn."""
    return str(request.param)


class PagedRun:
    """A model, a pool full of NaN and sequences whose pages lie in it in random order."""

    def __init__(self, model: Any, *, page_size: int = 16, num_pages: int = 64, seed: int = 0) -> None:
        config = model.config
        self.model = model
        self.page_size = page_size
        shape = (num_pages, config.num_kv_heads, config.num_layers, 2, page_size, config.head_dim)
        self.pool_data = torch.full(shape, float("nan"), dtype=model.dtype)
        self.free_pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self.page_tables: dict[Any, list[int]] = {}
        self.num_computed: dict[Any, int] = {}

    def step(self, parts: Mapping[Any, list[int]]) -> dict[Any, torch.Tensor]:
        """Computes the next tokens of each named sequence in one step; the logits of all of them, [tokens, V]."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, ids in parts.items():
            first = self.num_computed.get(name, 0)
            self.num_computed[name] = first + len(ids)
            table = self.page_tables.setdefault(name, [])
            while len(table) * self.page_size < first + len(ids):
                table.append(self.free_pages.pop())
            token_ids += ids
            positions += range(first, first + len(ids))
            slots += [
                table[p // self.page_size] * self.page_size + p % self.page_size for p in range(first, first + len(ids))
            ]
            starts.append(len(token_ids))
        widest = max(len(self.page_tables[name]) for name in parts)
        # What lies beyond a sequence's own pages must never be looked at.
        tables = [self.page_tables[name] + [-7] * (widest - len(self.page_tables[name])) for name in parts]
        batch = AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([self.num_computed[name] for name in parts], dtype=torch.int32),
            page_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
        )
        wanted = torch.arange(len(token_ids))
        logits = self.model.forward(torch.tensor(token_ids), torch.tensor(positions), batch, self.pool_data, wanted)
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(parts)}


@pytest.fixture
def paged_run() -> type[PagedRun]:
    """The class PagedRun."""
    return PagedRun
