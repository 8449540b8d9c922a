"""Memory goes back to the system when it is free."""

import subprocess
import sys

from tests.waiting import HANG_LIMIT_S

PROGRAM = """
import ctypes
from pathlib import Path
from services.runtime import heap

def resident_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024

if {is_on}:
    assert heap.give_back_free_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.free(libc.malloc(30 * 2**20))  # has the library's own threshold grow
before = resident_mib()
pieces = []
for n in range(1000):
    piece = libc.malloc(2**17)
    ctypes.memset(piece, 1, 2**17)
    pieces.append(piece)
assert resident_mib() - before > 100
for n, piece in enumerate(pieces):
    if n % 10 != 9:
        libc.free(ctypes.c_void_p(piece))
print(resident_mib() - before)
"""


def grown_mib(*, is_on: bool) -> float:
    """What stays after nine of ten pieces are free."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(is_on=is_on)], capture_output=True, check=True, timeout=HANG_LIMIT_S
    )
    return float(done.stdout)


def test_free_memory_between_used_pieces_goes_back() -> None:
    assert grown_mib(is_on=True) < 20
    assert grown_mib(is_on=False) > 100
