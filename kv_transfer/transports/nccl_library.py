"""The few NCCL functions that a channel calls, through ctypes on torch's own library. Contains no logic.

If NVIDIA's package is installed, a test compares types, constants, and symbols with its header and library. Only the
version and the unique ID work without a GPU. Nothing else has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

UNIQUE_ID_BYTES = 128
SUCCESS = 0
IN_PROGRESS = 7
MAGIC = 0xCAFEBEEF
CONFIG_VERSION = 22800
UNDEFINED = -(2**31)
UINT8 = 1
# Use few CTAs, so that the rest of the GPU can compute. Each CTA uses about 9 MiB of the receiver's memory.
MAX_CTAS = 4


class UniqueId(ctypes.Structure):
    """The C struct ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """The C struct ncclConfig_t as of CONFIG_VERSION. A newer library uses its defaults for newer fields."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_char_p),
        ("collnetEnable", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("shrinkShare", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
        ("nChannelsPerNetPeer", ctypes.c_int),
        ("nvlinkCentricSched", ctypes.c_int),
    )


_P = ctypes.POINTER
_transfer = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (_P(ctypes.c_int),),
    "ncclGetUniqueId": (_P(UniqueId),),
    "ncclCommInitRankConfig": (_P(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int, _P(Config)),
    "ncclCommGetAsyncError": (ctypes.c_void_p, _P(ctypes.c_int)),
    "ncclCommAbort": (ctypes.c_void_p,),
    "ncclSend": _transfer,
    "ncclRecv": _transfer,
    "ncclGetErrorString": (ctypes.c_int,),
}


class NcclFailed(OSError):
    """NCCL is missing, or failed before a communicator existed."""


class NcclLibrary:
    """Implements `nccl_pair.Nccl`. A communicator is identified by its address."""

    def __init__(self, path: str = "libnccl.so.2") -> None:
        """Raises NcclFailed if the library is missing."""
        try:
            self._library = ctypes.CDLL(path)
            for name, types in SIGNATURES.items():
                getattr(self._library, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise NcclFailed(f"no NCCL: {error}") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> int:
        """Version number in NCCL's format: 22907 is 2.29.7."""
        version = ctypes.c_int()
        self._check(self._library.ncclGetVersion(ctypes.byref(version)))
        return version.value

    def unique_id(self) -> bytes:
        """See Nccl."""
        unique_id = UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(unique_id)))
        return ctypes.string_at(ctypes.byref(unique_id), UNIQUE_ID_BYTES)

    def start(self, unique_id: bytes, rank: int) -> int:
        """See Nccl."""
        comm, config = ctypes.c_void_p(), make_config()
        code = self._library.ncclCommInitRankConfig(
            ctypes.byref(comm), 2, UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(config)
        )
        if code != IN_PROGRESS:
            self._check(code)
        if not comm.value:
            raise NcclFailed("NCCL made no communicator")
        return comm.value

    def state(self, comm: int) -> int:
        """See Nccl."""
        state = ctypes.c_int()
        code = int(self._library.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        return code or state.value

    def send(self, comm: int, address: int, num_bytes: int, stream: int) -> int:
        """See Nccl. Rank 0 is the sender."""
        return int(self._library.ncclSend(address, num_bytes, UINT8, 1, comm, stream))

    def receive(self, comm: int, address: int, num_bytes: int, stream: int) -> int:
        """See Nccl."""
        return int(self._library.ncclRecv(address, num_bytes, UINT8, 0, comm, stream))

    def abort(self, comm: int) -> None:
        """See Nccl."""
        self._library.ncclCommAbort(comm)

    def explain(self, code: int) -> str:
        """See Nccl."""
        text: bytes = self._library.ncclGetErrorString(code) or b"unknown"
        return text.decode()

    def _check(self, code: int) -> None:
        if code != SUCCESS:
            raise NcclFailed(f"NCCL: {self.explain(code)} ({code})")


def make_config() -> Config:
    """Returns the configuration of a channel's communicator: nonblocking, few CTAs, and defaults for the rest."""
    config = Config(
        size=ctypes.sizeof(Config), magic=MAGIC, version=CONFIG_VERSION, blocking=0, minCTAs=1, maxCTAs=MAX_CTAS
    )
    for name, kind in Config._fields_:
        if kind is ctypes.c_int and name not in ("blocking", "minCTAs", "maxCTAs"):
            setattr(config, name, UNDEFINED)
    return config


@functools.cache
def load_library() -> NcclLibrary:
    """Returns the NCCL library that torch loaded, or that is installed next to it. Raises NcclFailed."""
    # Otherwise every process listens on a port, on all interfaces, for a diagnostic tool (NCCL RAS) that is not used
    # here.
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")
    try:
        return NcclLibrary()
    except NcclFailed:
        # Torch loads the library by its full path. Depending on the torch build, the loader may not find it by name.
        found = importlib.util.find_spec("nvidia")
        folders = found.submodule_search_locations if found is not None else None
        for folder in folders or ():
            path = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
            if path.exists():
                return NcclLibrary(str(path))
        raise


@functools.cache
def library_version() -> int:
    """Returns the version of the installed NCCL, or 0 if it is not installed."""
    try:
        return load_library().version
    except NcclFailed:
        return 0
