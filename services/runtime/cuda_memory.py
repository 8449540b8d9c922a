"""Memory of a GPU that several processes map, through CUDA's driver: made by one, passed on as a file descriptor.

The memory lives as long as any process maps it: a peer that dies takes nothing away, where the older handles of CUDA's
runtime promise no such thing. No torch here: an address and a size come out, with what CUDA array users ask for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Iterator
from typing import Any

_ALLOCATION_PINNED = 1
_HANDLE_POSIX_FD = 1
_LOCATION_DEVICE = 1
_ACCESS_READ_WRITE = 3
_GRANULARITY_MINIMUM = 0
_ATTRIBUTE_VMM = 102
_ATTRIBUTE_POSIX_FD = 103
logger = logging.getLogger(__name__)


class CudaError(OSError):
    """A call of the driver failed, or there is no driver."""


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemAllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", MemLocation),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class MemAccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemLocation), ("flags", ctypes.c_int))


_c_handle = ctypes.c_ulonglong
_c_address = ctypes.c_ulonglong
_P = ctypes.POINTER
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_P(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetAttribute": (_P(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_P(ctypes.c_void_p), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (_P(ctypes.c_void_p),),
    "cuGetErrorString": (ctypes.c_int, _P(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (_P(ctypes.c_size_t), _P(MemAllocationProp), ctypes.c_int),
    "cuMemCreate": (_P(_c_handle), ctypes.c_size_t, _P(MemAllocationProp), ctypes.c_ulonglong),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, _c_handle, ctypes.c_int, ctypes.c_ulonglong),
    "cuMemImportFromShareableHandle": (_P(_c_handle), ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (_P(_c_address), ctypes.c_size_t, ctypes.c_size_t, _c_address, ctypes.c_ulonglong),
    "cuMemMap": (_c_address, ctypes.c_size_t, ctypes.c_size_t, _c_handle, ctypes.c_ulonglong),
    "cuMemSetAccess": (_c_address, ctypes.c_size_t, _P(MemAccessDesc), ctypes.c_size_t),
    "cuMemUnmap": (_c_address, ctypes.c_size_t),
    "cuMemAddressFree": (_c_address, ctypes.c_size_t),
    "cuMemRelease": (_c_handle,),
}
"""Argument types of the functions that are called; all return a CUresult."""


class MappedMemory:
    """A piece of a GPU's memory in this process's addresses; unmapped when nothing refers to it.

    A tensor that was made of it refers to it. So nothing that is still used is unmapped under a kernel, which would be
    the end of the whole process's work on that GPU.
    """

    def __init__(self, driver: _Driver, address: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        self.address = address
        # Not at the end of the process: by then the driver itself is being taken down, and takes this with it.
        weakref.finalize(self, driver.unmap, address, num_bytes).atexit = False


def is_supported(device_index: int) -> bool:
    """Returns whether a driver is installed and the GPU can share memory by file descriptors."""
    try:
        driver = _driver(device_index)
        return driver.attribute(_ATTRIBUTE_VMM) == 1 and driver.attribute(_ATTRIBUTE_POSIX_FD) == 1
    except CudaError:
        return False


def make(num_bytes: int, device_index: int) -> tuple[MappedMemory, int]:
    """Makes memory on a GPU. Returns it mapped, and a descriptor of it that the caller closes. Raises CudaError."""
    driver = _driver(device_index)
    with driver.current():
        size = driver.rounded(num_bytes)
        handle = driver.create(size)
        try:
            fd = driver.export(handle)
            try:
                return MappedMemory(driver, driver.map(handle, size), size), fd
            except BaseException:
                os.close(fd)
                raise
        finally:
            driver.call("cuMemRelease", handle)  # the mapping, and the descriptor, keep the memory


def map_shared(fd: int, num_bytes: int, device_index: int) -> MappedMemory:
    """Maps memory that another process made with `make(num_bytes)`, for use by this GPU. Raises CudaError.

    The caller closes the descriptor. A size that differs from what was made is an error of the driver.
    """
    driver = _driver(device_index)
    with driver.current():
        size = driver.rounded(num_bytes)
        handle = driver.import_from(fd)
        try:
            return MappedMemory(driver, driver.map(handle, size), size)
        finally:
            driver.call("cuMemRelease", handle)


class _Driver:
    """The calls, for one GPU."""

    def __init__(self, library: ctypes.CDLL, device_index: int) -> None:
        self._library = library
        for name, types in SIGNATURES.items():
            getattr(library, name).argtypes = types
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), device_index)
        self._device = device.value

    def call(self, name: str, *arguments: object) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the context that torch uses the thread's own."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @functools.cached_property
    def _context(self) -> ctypes.c_void_p:
        # Kept for good: where torch has no use for it yet, releasing it destroys it, and what is mapped with it.
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        return context

    def attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
        return value.value

    def rounded(self, num_bytes: int) -> int:
        granularity = ctypes.c_size_t()
        self.call(
            "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop()), _GRANULARITY_MINIMUM
        )
        return -(-num_bytes // granularity.value) * granularity.value

    def create(self, size: int) -> _c_handle:
        handle = _c_handle()
        self.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._prop()), 0)
        return handle

    def export(self, handle: _c_handle) -> int:
        fd = ctypes.c_int(-1)
        self.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _HANDLE_POSIX_FD, 0)
        return fd.value

    def import_from(self, fd: int) -> _c_handle:
        handle = _c_handle()
        self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), _HANDLE_POSIX_FD)
        return handle

    def map(self, handle: _c_handle, size: int) -> int:
        address = _c_address()
        self.call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        try:
            self.call("cuMemMap", address, size, 0, handle, 0)
            try:
                access = MemAccessDesc(MemLocation(_LOCATION_DEVICE, self._device), _ACCESS_READ_WRITE)
                self.call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
            except BaseException:
                self.call("cuMemUnmap", address, size)
                raise
        except BaseException:
            self.call("cuMemAddressFree", address, size)
            raise
        return address.value

    def unmap(self, address: int, size: int) -> None:
        try:
            with self.current():
                self.call("cuMemUnmap", address, size)
                self.call("cuMemAddressFree", address, size)
        except CudaError:
            logger.exception("memory of a GPU could not be given back")

    def _prop(self) -> MemAllocationProp:
        location = MemLocation(_LOCATION_DEVICE, self._device)
        return MemAllocationProp(_ALLOCATION_PINNED, _HANDLE_POSIX_FD, location)


@functools.cache
def _driver(device_index: int) -> _Driver:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from error
    return _Driver(library, device_index)
