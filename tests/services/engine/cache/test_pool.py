"""The memory of pages: its shape, and how it is taken from the system."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from services.engine.cache.pool import PageLayout, PagePool, host_zeros, num_pages_for

LAYOUT = PageLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)


class TestLayoutAndPool:
    def test_a_page_is_heads_layers_kv_slots_dim(self) -> None:
        assert LAYOUT.shape == (2, 3, 2, 4, 8)
        assert LAYOUT.page_bytes == 2 * 3 * 2 * 4 * 8 * 2

    @pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
    def test_number_of_pages(self, num_tokens: int, expected: int) -> None:
        assert LAYOUT.num_pages_for(num_tokens) == num_pages_for(num_tokens, 4) == expected

    def test_pool_is_zero_contiguous_and_of_the_dtype(self) -> None:
        pool = PagePool(LAYOUT, 5)
        assert pool.data.shape == (5, 2, 3, 2, 4, 8)
        assert pool.data.is_contiguous()
        assert pool.data.dtype == torch.bfloat16
        assert not pool.data.any()

    def test_bytes_are_the_same_memory_one_row_per_page(self) -> None:
        pool = PagePool(LAYOUT, 5)
        pool.data[3] = 1.0
        assert pool.bytes.shape == (5, LAYOUT.page_bytes)
        assert pool.bytes.any(dim=1).tolist() == [False, False, False, True, False]
        pool.bytes[3] = 0
        assert not pool.data.any()

    def test_memory_outlives_the_pool(self) -> None:
        data = PagePool(LAYOUT, 5).data
        data.fill_(2.0)
        assert data.sum().item() == 2.0 * data.numel()

    @pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
    def test_nonsense_is_refused(self, field: str) -> None:
        arguments = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 1, field: 0}
        with pytest.raises(ValueError, match=field):
            PageLayout(**arguments, dtype=torch.float32)

    def test_an_empty_pool_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1 page"):
            PagePool(LAYOUT, 0)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no such advice")
def test_a_pool_is_given_its_memory_in_large_pieces() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has no huge pages")
    pool = host_zeros((4 << 20,), torch.float32)
    flags = ""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, end = (int(bound, 16) for bound in mapping.split(None, 1)[0].split("-"))
        if start <= pool.data_ptr() < end:
            flags = mapping[mapping.index("VmFlags:") :]
    assert " hg" in flags
    assert not pool.any()
