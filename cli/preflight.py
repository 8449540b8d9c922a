"""`tandem doctor --preflight`: whether a worker or a gateway that is about to start here would run, and run well.

Its settings have the names of the program's own, so that the variables of a container hold for both. Each check
compares a need with what it finds here; the first need that is not met makes the exit code 1, and its reason becomes
the last words of the container.
"""

import errno
import importlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cli.findings import Finding, Level, size_text
from services.cluster.probe import probe
from services.engine.weights.config import load_config
from services.runtime.addresses import join_host_port
from services.runtime.api_client import GatewaySettings
from services.runtime.config import option
from services.runtime.errors import ConfigError, ModelError, StoreUnavailable
from services.runtime.gpu_facts import GpuFacts
from services.runtime.kinds import choice, comma_separated, host_name, integer, size_bytes, text
from services.runtime.memory_limit import memory_limit
from services.runtime.model_size import start_budget_s, weight_bytes
from services.runtime.transports import TRANSPORTS
from worker.nvml import num_gpus, open_gpu

MAX_CLOCK_OFFSET_S = 1.0
PROCESS_BYTES = 384 << 20
"""A worker without weights and pages: 180 MiB at rest, and room for steps, grammars and connections."""
DEFAULT_KV_BYTES = 1 << 30
"""The KV pool of a worker on a processor, where nobody says a size; it takes less where memory is short."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NCCL_SHARED_BYTES = 1 << 30
"""What NCCL's handbook has containers be given; Docker's own 64 MiB are too little for it."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - nothing is written there
LINK_FLOOR_BYTES_PER_S = 100_000_000
"""Below this, moving the pages of a prompt takes longer than computing it again does on most machines."""


@dataclass(frozen=True, kw_only=True)
class PreflightSettings(GatewaySettings):
    """What is about to start here, as far as preflight compares it with the machine."""

    device: str = option(choice("auto", "cpu", "cuda"), default="auto", help="Preflight: where the model will run.")
    dtype: str = option(choice("auto", *DTYPE_BYTES), default="auto", help="Preflight: type of weights and KV.")
    kv_memory: int | None = option(size_bytes(), default=None, help="Preflight: size of the KV pool.")
    kv_pages: int | None = option(integer(1), default=None, help="Preflight: pages of the KV pool.")
    page_size: int = option(integer(1, 1024), default=16, help="Preflight: tokens of a KV page.")
    shared_memory: int | None = option(
        size_bytes(minimum=0),
        default=None,
        help="Preflight: least size of /dev/shm. Not given: 1 GiB where a GPU is used, for NCCL; else none.",
    )
    host: str = option(host_name(), default="127.0.0.1", help="Preflight: address that the program will listen on.")
    ports: tuple[int, ...] = option(
        comma_separated(integer(1, 65535)), default=(), help="Preflight: ports that must be free there."
    )
    serve: int | None = option(
        integer(0, 65535),
        default=None,
        help="Answers the doctors of other machines (--peer) on this port of --host until it is ended.",
    )
    peer: str | None = option(
        text(pattern=r".+:\d{1,5}", rule="HOST:PORT"),
        default=None,
        help="Preflight: a doctor with --serve, to which pages are sent and timed.",
    )
    link_floor: int = option(
        size_bytes(), default=LINK_FLOOR_BYTES_PER_S, help="Preflight: least bytes per second of the way to --peer."
    )
    transport: str = option(
        choice("auto", *TRANSPORTS), default="auto", help="Channel between --peer and --serve, as a worker's."
    )
    advertise_host: str | None = option(
        host_name(), default=None, help="Host that --peer connects to, where it is not --host; of --serve."
    )
    advertise_port: int | None = option(
        integer(1, 65535), default=None, help="Port that --peer connects to, where something in between maps it."
    )
    transfer_port: int = option(integer(0, 65535), default=0, help="Port of the pages of --serve; 0 picks a free one.")
    advertise_transfer_port: int | None = option(
        integer(1, 65535), default=None, help="Port that they come to, where something in between maps it; of --serve."
    )


def preflight(settings: PreflightSettings, *, model: Path | None, redis: str | None) -> Iterator[Finding]:
    """All checks that the settings ask for, in order."""
    facts = _gpu_facts()
    is_gpu = settings.device == "cuda" or (settings.device == "auto" and bool(facts))
    checks: list[Callable[[], Iterable[Finding]]] = [
        lambda: gpu(facts, is_wanted=settings.device == "cuda"),
        lambda: shared_memory(_least_shared_bytes(settings, is_gpu=is_gpu)),
        lambda: free_ports(settings.host, settings.ports),
    ]
    if is_gpu:
        checks.insert(1, nccl)
    if model is not None:
        checks.append(lambda: memory(settings, model, gpus=facts if is_gpu else []))
    if redis is not None:
        checks.append(lambda: clock(redis))
    if settings.peer is not None:
        checks.append(lambda: way_to(settings))
    for check in checks:
        yield from check()


def _gpu_facts() -> list[GpuFacts]:
    """The facts of each GPU that NVML shows."""
    found: list[GpuFacts] = []
    for index in range(num_gpus()):
        if (reader := open_gpu(index)) is not None:
            try:
                found.append(reader.read())
            finally:
                reader.close()
    return found


def _least_shared_bytes(settings: PreflightSettings, *, is_gpu: bool) -> int:
    if settings.shared_memory is not None:
        return settings.shared_memory
    return NCCL_SHARED_BYTES if is_gpu else 0


def gpu(facts: list[GpuFacts], *, is_wanted: bool) -> Iterator[Finding]:
    """Whether a GPU and its driver are here, if the worker needs one, and torch can use them."""
    if not facts:
        if is_wanted:
            advice = "give the container a GPU (nvidia.com/gpu), or --device cpu"
            yield Finding(Level.BAD, "gpu", "none is here, or its driver does not answer", advice)
        else:
            yield Finding(Level.OK, "gpu", "none, and none is needed")
        return
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
    finally:
        nvml.nvmlShutdown()
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        what = f"{len(facts)} with driver {driver}, which torch {torch.__version__} cannot use"
        yield Finding(Level.BAD, "gpu", what, "update the driver, or use an image for the CUDA version that it knows")
        return
    yield Finding(Level.OK, "gpu", f"{len(facts)} with driver {driver}, torch {torch.__version__} can use them")
    for number, fact in enumerate(facts):
        if fact.is_lost:
            yield Finding(Level.BAD, "gpu", f"GPU {number} does not answer", "reset it, or restart the machine")


def nccl() -> Iterator[Finding]:
    """Whether NCCL can be loaded, which carries pages between GPUs."""
    library = importlib.import_module("kv_transfer.transports.nccl_library")
    found = library.library_version()
    if found:
        yield Finding(Level.OK, "nccl", f"version {found}")
    else:
        yield Finding(Level.NOTE, "nccl", "cannot be loaded", "pages go through the host's memory: slower, not wrong")


def shared_memory(least_bytes: int, *, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Whether /dev/shm is large enough. Memory that our processes share has no name there and counts as their own."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        if least_bytes:
            yield Finding(Level.BAD, "shm", f"{folder} cannot be looked at: {error.strerror}", "mount a tmpfs there")
        return
    if usage.total < least_bytes:
        what = f"{folder} has {size_text(usage.total)}, and {size_text(least_bytes)} are needed"
        yield Finding(Level.BAD, "shm", what, "mount an emptyDir with medium: Memory there, or give --shm-size")
    else:
        yield Finding(Level.OK, "shm", f"{folder} has {size_text(usage.total)}")


def free_ports(host: str, ports: Iterable[int]) -> Iterator[Finding]:
    """Whether the program could listen on each port."""
    for port in ports:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
                tried.listen(1)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            reason = "is taken by another program" if is_taken else f"cannot be used: {error.strerror or error}"
            advice = "end that program, or give another port" if is_taken else "see --host, and rights for low ports"
            yield Finding(Level.BAD, "ports", f"{join_host_port(host, port)} {reason}", advice)
        else:
            yield Finding(Level.OK, "ports", f"{join_host_port(host, port)} is free")


def memory(settings: PreflightSettings, model: Path, *, gpus: list[GpuFacts]) -> Iterator[Finding]:
    """Whether the weights, the KV pool and the process fit into what may be allocated, on the GPU or here."""
    try:
        config = load_config(model)
    except ModelError:
        return  # which the check of the folder says
    on_disk = weight_bytes(model)
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    weights = on_disk * DTYPE_BYTES[dtype] // DTYPE_BYTES[config.dtype]
    page = 2 * config.num_layers * config.num_kv_heads * config.head_dim * settings.page_size * DTYPE_BYTES[dtype]
    pool = settings.kv_memory or (settings.kv_pages or 0) * page
    parts = f"weights {size_text(weights)}, KV pool {size_text(pool)}"
    if gpus:
        largest = max(fact.free_bytes or 0 for fact in gpus)
        yield _fits("GPU memory", largest, weights + (pool or page), parts)
        yield _fits("memory", _free_bytes(), PROCESS_BYTES, f"a process {size_text(PROCESS_BYTES)}")
    else:
        # Where nobody says a size, a worker takes what there is, up to a quarter of it.
        pool_here = pool or min(DEFAULT_KV_BYTES, _free_bytes() // 4)
        parts = f"weights {size_text(weights)}, KV pool {size_text(pool_here)}, a process {size_text(PROCESS_BYTES)}"
        yield _fits("memory", _free_bytes(), weights + pool_here + PROCESS_BYTES, parts)
    yield Finding(Level.OK, "start", f"may take up to {start_budget_s(on_disk):.0f} s with these weights")


def _fits(what: str, free_bytes: int, needed_bytes: int, parts: str) -> Finding:
    shown = f"{size_text(needed_bytes)} of {what} are needed ({parts}), {size_text(free_bytes)} are free"
    if needed_bytes <= free_bytes:
        return Finding(Level.OK, "memory", shown)
    return Finding(Level.BAD, "memory", shown, "raise the memory limit, lower --kv-memory, or use a smaller model")


def _free_bytes() -> int:
    """What may be allocated here: of the machine, and under the limits of the container or unit."""
    available = available_bytes()
    limit = memory_limit()
    return available if limit is None else min(available, limit.free_bytes)


def available_bytes() -> int:
    """Returns what the machine has free, by the kernel's own estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def clock(redis: str) -> Iterator[Finding]:
    """Whether this machine's clock agrees with Redis'. A Redis that does not answer yet holds no start up."""
    try:
        ahead_s = probe(redis).clock_ahead_s
    except ConfigError as error:
        yield Finding(Level.BAD, "clock", error.message, "correct --redis")
    except StoreUnavailable as error:
        yield Finding(Level.NOTE, "clock", f"cannot be compared: {error.message}", "programs wait for Redis themselves")
    else:
        level = Level.BAD if abs(ahead_s) > MAX_CLOCK_OFFSET_S else Level.OK
        side = "ahead of" if ahead_s > 0 else "behind"
        advice = "run a time service on both machines" if level is Level.BAD else ""
        yield Finding(level, "clock", f"Redis' clock is {abs(ahead_s):.2f} s {side} this machine's", advice)


def way_to(settings: PreflightSettings) -> Iterator[Finding]:
    """Whether pages get to the peer fast enough, by sending some on each channel that both ends have."""
    from cli.link_check import measure  # with torch, which a gateway does not have

    assert settings.peer is not None, "it is only asked for where it is given"
    measured = measure(settings)
    if isinstance(measured, str):
        yield Finding(Level.BAD, "link", f"{settings.peer}: {measured}", "run tandem doctor --serve there, and see TLS")
        return
    for name, reason in measured.failures.items():
        yield Finding(
            Level.NOTE, "link", f"{settings.peer}: the channel {name} does not open: {reason}", "see firewalls"
        )
    rates = {name: round(rate) for name, rate in measured.bytes_per_s.items()}
    shown = ", ".join(f"{name} {rate / 1e9:.3g} GB/s" for name, rate in rates.items()) or "no channel"
    if max(rates.values(), default=0) < settings.link_floor:
        what = f"{shown} to {settings.peer}, and {settings.link_floor / 1e9:.3g} GB/s are needed"
        advice = "put prefill and decode nearer to each other, or lower --link-floor: handoffs would be slow"
        yield Finding(Level.BAD, "link", what, advice)
    else:
        yield Finding(Level.OK, "link", f"{shown} to {settings.peer}")
