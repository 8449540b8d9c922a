"""How much memory KV pages get. Free memory of a GPU is only what we say it is: no GPU is needed for the rule."""

import pytest
import torch

from services.engine.cache.memory import num_pool_pages, num_tier_bytes
from services.engine.cache.pool import PageLayout
from services.runtime.errors import ConfigError

GIB = 1 << 30
LAYOUT = PageLayout(1, 1, 64, 16, torch.bfloat16)
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def pool_bytes(device: torch.device = GPU, *, weights_gib: int = 1, share: float = 1.0) -> int:
    num_pages = num_pool_pages(
        LAYOUT,
        device,
        weight_bytes=weights_gib * GIB,
        num_pages=None,
        kv_memory_bytes=None,
        gpu_memory_share=share,
    )
    return num_pages * LAYOUT.page_bytes


@pytest.mark.parametrize(
    ("free_gib", "share", "pool_gib"),
    [
        (79, 1, 39.5),  # nobody else: half of what the weights leave
        (79, 0.5, 19.75),  # one of two that load at once
        (20, 0.5, 10),  # others have taken the rest
        (20, 1, 10),
        (79, 1 / 3, 79 / 6),
    ],
)
def test_engines_that_load_at_once_do_not_take_the_same_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, share: float, pool_gib: float
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib * GIB, 80 * GIB))
    assert pool_bytes(share=share) == pytest.approx(pool_gib * GIB, rel=1e-5)


def test_weights_that_fill_the_gpu_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, 80 * GIB))
    with pytest.raises(ConfigError, match="0 bytes of KV memory do not hold one page"):
        pool_bytes(weights_gib=81)


def test_a_share_is_for_gpus_only() -> None:
    assert pool_bytes(CPU, share=0.5) == pool_bytes(CPU, share=1.0) <= GIB


@pytest.mark.parametrize("share", [0, -1, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_share is"):
        pool_bytes(CPU, share=share)


def test_the_host_tier_is_as_large_as_a_gpu_s_pool_and_none_on_a_cpu() -> None:
    asked = {"num_pages": 10, "asked": None}
    assert num_tier_bytes(LAYOUT, GPU, **asked) == 10 * LAYOUT.page_bytes
    assert num_tier_bytes(LAYOUT, CPU, **asked) == 0
    assert num_tier_bytes(LAYOUT, GPU, num_pages=1 << 40, asked=None) <= 8 * GIB
    assert num_tier_bytes(LAYOUT, GPU, num_pages=10, asked=0) == 0
