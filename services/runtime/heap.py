"""The process's heap: that memory which is free again goes back to the system. Knows nothing of what is in it."""

import ctypes
import logging

MMAP_THRESHOLD_BYTES = 64 * 1024
"""Larger pieces have memory of their own, which is gone when they are. The library's own threshold grows to 32 MiB with
what is freed, and then one small piece that is in use keeps all that lies below it."""
TRIM_THRESHOLD_BYTES = 256 * 1024
"""Free memory at the end of a heap that stays with the process."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>

logger = logging.getLogger(__name__)


def give_back_free_memory() -> bool:
    """Has the C library give free memory back early, from now on. Returns whether it can be told so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    is_set = mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    if not is_set:
        logger.warning("free memory stays with the process: the C library takes no threshold")
    return bool(is_set)
