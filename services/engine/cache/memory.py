"""How much memory KV pages get where nobody said a number, and what is refused where somebody did.

Knows what is free now, and nothing of others that are about to take it: engines that share a GPU are told which part of
it they may have.
"""

from pathlib import Path

import torch

from services.engine.cache.pool import PageLayout
from services.runtime.errors import ConfigError
from services.runtime.memory_limit import memory_limit

_DEFAULT_KV_MEMORY_BYTES = 1 << 30
_DEFAULT_KV_MEMORY_SHARE = 0.25
_DEFAULT_KV_GPU_SHARE = 0.5
_DEFAULT_HOST_TIER_BYTES = 8 << 30
_DEFAULT_HOST_TIER_SHARE = 0.25


def num_pool_pages(
    layout: PageLayout,
    device: torch.device,
    *,
    weight_bytes: int,
    num_pages: int | None,
    kv_memory_bytes: int | None,
    gpu_memory_share: float,
) -> int:
    """Returns how many pages the pool gets, beside weights that are loaded already.

    That is `num_pages`, or what fits into `kv_memory_bytes`. With neither, 1 GiB or a quarter of the available memory
    on a CPU, whichever is less; on a GPU half of the free memory, and at most half of `gpu_memory_share` of what the
    weights leave of all. Raises ConfigError where the settings contradict each other or memory.
    """
    if num_pages is not None and kv_memory_bytes is not None:
        raise ConfigError("num_pages and kv_memory_bytes are both set: give one of them")
    if not 0 < gpu_memory_share <= 1:
        raise ConfigError(f"gpu_memory_share is {gpu_memory_share}, it must be above 0 and at most 1")
    available_bytes = _available_memory_bytes(device)
    if num_pages is None:
        num_bytes = kv_memory_bytes
        if num_bytes is None:
            num_bytes = _default_kv_bytes(device, available_bytes, weight_bytes, gpu_memory_share)
        num_pages = num_bytes // layout.page_bytes
        if num_pages < 1:
            raise ConfigError(f"{num_bytes} bytes of KV memory do not hold one page of {layout.page_bytes} bytes")
    if num_pages < 1:
        raise ConfigError(f"num_pages is {num_pages}, it must be at least 1")
    if num_pages * layout.page_bytes > available_bytes:
        raise ConfigError(
            f"{num_pages} KV pages take {num_pages * layout.page_bytes >> 20} MiB, "
            f"but {available_bytes >> 20} MiB of memory are available on {device}"
        )
    return num_pages


def num_tier_bytes(layout: PageLayout, device: torch.device, *, num_pages: int, asked: int | None) -> int:
    """Returns the bytes of the host's memory below a pool of `num_pages` pages; 0: none.

    Where nothing was asked for: none on a CPU, where it would be a second piece of the same memory, and for a GPU as
    much as the pool, at most 8 GiB or a quarter of what is available. Raises ConfigError for what cannot be had.
    """
    available_bytes = _available_memory_bytes(torch.device("cpu"))
    if asked is None:
        if device.type == "cpu":
            return 0
        pool_bytes = num_pages * layout.page_bytes
        num_bytes = min(pool_bytes, _DEFAULT_HOST_TIER_BYTES, int(available_bytes * _DEFAULT_HOST_TIER_SHARE))
        return num_bytes if num_bytes >= layout.page_bytes else 0
    if 0 < asked < layout.page_bytes:
        raise ConfigError(f"{asked} bytes of host tier do not hold one page of {layout.page_bytes} bytes")
    if asked > available_bytes:
        raise ConfigError(
            f"the host tier takes {asked >> 20} MiB, but {available_bytes >> 20} MiB of memory are available"
        )
    return asked


def _default_kv_bytes(device: torch.device, available_bytes: int, weight_bytes: int, gpu_memory_share: float) -> int:
    if device.type == "cpu":
        return min(_DEFAULT_KV_MEMORY_BYTES, int(available_bytes * _DEFAULT_KV_MEMORY_SHARE))
    # Others that load now see the same free memory, so each keeps to its part of what all of them share.
    left_bytes = max(0, _gpu_memory_bytes(device)[1] - weight_bytes)
    return int(min(available_bytes, left_bytes * gpu_memory_share) * _DEFAULT_KV_GPU_SHARE)


def _gpu_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Returns what is free on a GPU, and what it has."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(free_bytes), int(total_bytes)


def _available_memory_bytes(device: torch.device) -> int:
    """Returns what can be allocated now without swapping: free memory of the GPU, or of the host and its container."""
    if device.type == "cuda":
        return _gpu_memory_bytes(device)[0]
    available_bytes, limit = _host_available_bytes(), memory_limit()
    return available_bytes if limit is None else min(available_bytes, limit.free_bytes)


def _host_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available: give num_pages or kv_memory_bytes")
