"""Starts the cluster's programs in a tenth of a second: a process that has imported them and forks on demand.

A replacement for a killed worker must be there before the next trial, and importing torch or vLLM takes seconds. What
runs in the child is the program's own `main`, with the arguments of its command line. A plan (see `faulty_worker`) adds
faults. Commands come as JSON lines on stdin: {"program", "arguments", "log", "plan", "netns", "clock_ahead_s"}; the
answer is {"pid"}. A network namespace is a name or the path of its file. The children end with this process, and this
process with the one that started it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import sys
import time
import traceback
import types
from typing import Any

from services.runtime import clock, process
from worker.vllm import loading

PROGRAMS = ("gateway", "prefill_worker", "decode_worker", "dual_worker")
_CLONE_NEWNET = 0x40000000


def main() -> None:
    process.die_with_parent()
    for program in PROGRAMS:
        importlib.import_module(f"{program}.__main__")
    importlib.import_module("tests.faults.faulty_worker")
    if os.environ.get("TANDEM_ENGINE") == "vllm":
        loading.import_vllm()
    _say({"ready": True})
    buffer = b""
    while True:
        _reap()
        if not select.select([0], [], [], 0.05)[0]:
            continue
        piece = os.read(0, 65536)
        if not piece:
            return
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            _say({"pid": _start(json.loads(line))})


def _start(order: dict[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = _run(order, parent)
    except BaseException:  # noqa: BLE001 - the root of a process: nothing may go back into the nursery's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(order: dict[str, Any], parent: int) -> int:
    os.environ[process.DIE_WITH_PARENT_ENV] = str(parent)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    if order.get("netns"):
        _enter_netns(order["netns"])
    if order.get("clock_ahead_s"):
        _set_clock(order["clock_ahead_s"])
    sys.argv = [order["program"], *order["arguments"]]
    from tests.faults import faulty_worker

    faulty_worker.observe()
    if order.get("plan"):
        faulty_worker.install(order["plan"])
    return process.exit_code(importlib.import_module(f"{order['program']}.__main__").main)


def _enter_netns(name: str) -> None:
    fd = os.open(os.path.join("/var/run/netns", name), os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
    os.close(fd)


def _set_clock(ahead_s: float) -> None:
    """Another wall clock for Python code. What waits does so by the monotonic one, which stays.

    gRPC keeps the system's: it compares Python's time with that of its core.
    """
    real = types.SimpleNamespace(**vars(time))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "grpc" and getattr(module, "time", None) is time:
            module.time = real  # type: ignore[attr-defined]
    time.time = lambda: real.time() + ahead_s
    time.time_ns = lambda: real.time_ns() + round(ahead_s * 1e9)
    clock.SystemClock.unix_ns = staticmethod(time.time_ns)  # type: ignore[assignment]


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
