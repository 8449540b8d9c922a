"""Computes the memory for KV pages: defaults for unset sizes, and checks of configured sizes.

Only considers the memory that is free now. It cannot account for other processes that are about to allocate memory, so
engines that share a GPU are configured with their fraction of it.
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
    """Returns the number of pages in the pool. The weights are already loaded.

    The result is `num_pages`, or the number of pages that fit into `kv_memory_bytes`. If neither is set, the default on
    a CPU is 1 GiB or a quarter of the available memory, whichever is less. On a GPU, the default is half of the free
    memory, and at most half of `gpu_memory_share` of the memory that the weights leave of the GPU's total. Raises
    ConfigError if the settings contradict each other or exceed the available memory.
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
    """Returns the size of the host tier below a pool of `num_pages` pages, in bytes. 0 disables the tier.

    If `asked` is None, a CPU gets no host tier, because it would use the same memory as the pool. A GPU gets a tier of
    the size of the pool, limited to 8 GiB and to a quarter of the available memory. Raises ConfigError if `asked` bytes
    are unavailable or less than a page.
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
    # Processes that load at the same time see the same free memory, so each is limited to its own fraction.
    left_bytes = max(0, _gpu_memory_bytes(device)[1] - weight_bytes)
    return int(min(available_bytes, left_bytes * gpu_memory_share) * _DEFAULT_KV_GPU_SHARE)


def _gpu_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Returns the free and total memory of a GPU, in bytes."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(free_bytes), int(total_bytes)


def _available_memory_bytes(device: torch.device) -> int:
    """Returns the bytes that can be allocated without swapping: on the GPU, or on the host and in its container."""
    if device.type == "cuda":
        return _gpu_memory_bytes(device)[0]
    available_bytes, limit = _host_available_bytes(), memory_limit()
    return available_bytes if limit is None else min(available_bytes, limit.free_bytes)


def _host_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available: give num_pages or kv_memory_bytes")
