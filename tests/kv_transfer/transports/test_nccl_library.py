"""Our declarations of NVIDIA's functions against its own headers and libraries, where they are installed.

Neither needs a GPU. `pip install nvidia-nccl-cu13` (or -cu12) brings NCCL; CUDA_HOME names a toolkit with cuda.h.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kv_transfer.transports import nccl_library
from kv_transfer.transports.nccl_library import SIGNATURES, Config, NcclFailed, NcclLibrary, UniqueId, make_config
from services.runtime import cuda_memory
from tests.waiting import HANG_LIMIT_S


def nccl_folder() -> Path:
    found = importlib.util.find_spec("nvidia")
    for folder in [*(found.submodule_search_locations or ())] if found else []:
        if (Path(folder) / "nccl" / "include" / "nccl.h").exists():
            return Path(folder) / "nccl"
    pytest.skip("NVIDIA's package of NCCL is not installed")


@pytest.fixture
def library() -> NcclLibrary:
    return NcclLibrary(str(nccl_folder() / "lib" / "libnccl.so.2"))


def test_every_function_is_there_and_names_a_version(library: NcclLibrary) -> None:
    header = (nccl_folder() / "include" / "nccl.h").read_text()
    for name in SIGNATURES:
        assert re.search(rf"\b{name}\(", header), name
    assert library.version >= 22800
    assert str(library.version) in re.sub(r"[^0-9]", " ", header).split()


def test_unique_ids_differ_and_have_their_size(library: NcclLibrary) -> None:
    ids = {library.unique_id() for _ in range(3)}
    assert len(ids) == 3
    assert {len(each) for each in ids} == {nccl_library.UNIQUE_ID_BYTES}


def test_the_configuration_begins_as_the_header_has_it() -> None:
    """Fields in the header's order, of its types; what came after ours, an older `version` leaves to the library."""
    header = (nccl_folder() / "include" / "nccl.h").read_text()
    body = re.search(r"typedef struct ncclConfig_v22800 \{(.*?)\} ncclConfig_t;", header, re.DOTALL)
    assert body is not None
    kinds = {"size_t": ctypes.c_size_t, "unsigned int": ctypes.c_uint, "int": ctypes.c_int}
    declared = re.findall(r"^\s*(size_t|unsigned int|int|const char \*)\s*(\w+);", body[1], re.MULTILINE)
    theirs = [(name, kinds.get(kind, ctypes.c_char_p)) for kind, name in declared]
    assert theirs[: len(Config._fields_)] == list(Config._fields_)
    assert f"NCCL_UNIQUE_ID_BYTES {nccl_library.UNIQUE_ID_BYTES}\n" in header
    # A number of the initializer in some versions, a name of its own in others.
    before = r"MAGIC |sizeof\(ncclConfig_t\), /\* size \*/[\s\\]*"
    assert re.search(rf"({before}){nccl_library.MAGIC:#x}", header)
    for name, value in (("ncclInProgress", 7), ("ncclRemoteError", 6), ("ncclUint8", nccl_library.UINT8)):
        assert re.search(rf"{name}\s*=\s*{value}\b", header)


def test_a_configuration_says_what_is_meant_and_leaves_the_rest_to_nccl() -> None:
    config = make_config()
    assert (config.size, config.magic) == (80, 0xCAFEBEEF)
    assert (config.blocking, config.minCTAs, config.maxCTAs) == (0, 1, 4)
    rest = {name for name, kind in Config._fields_ if kind is ctypes.c_int} - {"blocking", "minCTAs", "maxCTAs"}
    assert {getattr(config, name) for name in rest} == {-(2**31)}
    assert config.netName is None
    assert ctypes.sizeof(UniqueId) == 128


def test_without_a_library_there_is_no_nccl() -> None:
    with pytest.raises(NcclFailed, match="no NCCL"):
        NcclLibrary("libnccl-that-is-not-there.so")


def test_without_a_driver_no_memory_is_shared() -> None:
    if cuda_memory.is_supported(0):
        pytest.skip("there is a driver")
    with pytest.raises(cuda_memory.CudaError):
        cuda_memory.make(2**20, 0)


def test_structures_and_constants_are_those_of_the_drivers_header(tmp_path: Path) -> None:
    include = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    compiler = shutil.which("g++")
    if not (include / "cuda.h").exists() or compiler is None:
        pytest.skip("no cuda.h, or no compiler")
    prop, access = cuda_memory.MemAllocationProp, cuda_memory.MemAccessDesc
    facts = {
        "sizeof(CUmemLocation)": ctypes.sizeof(cuda_memory.MemLocation),
        "sizeof(CUmemAllocationProp)": ctypes.sizeof(prop),
        "offsetof(CUmemAllocationProp, location)": prop.location.offset,
        "offsetof(CUmemAllocationProp, win32HandleMetaData)": prop.win32HandleMetaData.offset,
        "offsetof(CUmemAllocationProp, allocFlags)": prop.compressionType.offset,
        "offsetof(CUmemAllocationProp, allocFlags.usage)": prop.usage.offset,
        "sizeof(CUmemAccessDesc)": ctypes.sizeof(access),
        "offsetof(CUmemAccessDesc, flags)": access.flags.offset,
        "CU_MEM_ALLOCATION_TYPE_PINNED": cuda_memory._ALLOCATION_PINNED,
        "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": cuda_memory._HANDLE_POSIX_FD,
        "CU_MEM_LOCATION_TYPE_DEVICE": cuda_memory._LOCATION_DEVICE,
        "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda_memory._ACCESS_READ_WRITE,
        "CU_MEM_ALLOC_GRANULARITY_MINIMUM": cuda_memory._GRANULARITY_MINIMUM,
        "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": cuda_memory._ATTRIBUTE_VMM,
        "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": cuda_memory._ATTRIBUTE_POSIX_FD,
    }
    lines = [f"static_assert({fact} == {value});" for fact, value in facts.items()]
    calls = "\n".join(f"auto* f{index} = &{name};" for index, name in enumerate(cuda_memory.SIGNATURES))
    counts = "\n".join(
        f"static_assert(count(&{name}) == {len(types)});" for name, types in cuda_memory.SIGNATURES.items()
    )
    source = tmp_path / "facts.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cuda.h>\n"
        "template <class R, class... A> constexpr int count(R (*)(A...)) { return sizeof...(A); }\n"
        + "\n".join([*lines, calls, counts])
    )
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{include}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
