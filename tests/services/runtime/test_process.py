"""Exit codes, signals and the bond to the parent, with real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from services.runtime import last_words, process, service_manager
from services.runtime.background_tasks import supervise
from services.runtime.errors import ConfigError, InvariantViolated, ModelError
from services.runtime.process import EXIT_FAILED, exit_code, watched
from tests.waiting import HANG_LIMIT_S, wait_until

SERVICE = """
import asyncio
from services.runtime import process

async def serve():
    with process.stop_signals() as stop:
        print("ready", flush=True)
        await stop.wait()
        print("draining", flush=True)
        await asyncio.sleep({drain_s})
    print("done", flush=True)

process.run(lambda: process.run_async(serve()))
"""

CHILD = """
import time
from services.runtime import process
process.die_with_parent()
print("ready", flush=True)
time.sleep(60)
"""

PARENT = """
import os, subprocess, sys, time
environ = os.environ | {"TANDEM_DIE_WITH_PARENT": %s}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environ, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def service(drain_s: float) -> "subprocess.Popen[str]":
    code = SERVICE.format(drain_s=drain_s)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--port is 'x'"), 2),
        (ModelError("no config.json"), 2),
        (InvariantViolated("x"), 1),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 1),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit("text"), 1),
        (SystemExit(), 0),
    ],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(raising(error)) == code
    if code == 2:
        lines = capsys.readouterr().err.splitlines()
        assert lines == [f"error: {error}"]


def test_a_clean_end_is_zero() -> None:
    assert exit_code(lambda: None) == 0


def test_a_background_task_that_finds_the_program_contradict_itself_ends_the_process() -> None:
    cleaned_up: list[bool] = []

    async def contradict() -> None:
        raise InvariantViolated("a page is held twice")

    async def main() -> None:
        task = supervise(contradict, name="pages")
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(task.done())

    assert exit_code(lambda: asyncio.run(watched(main()))) == EXIT_FAILED
    assert cleaned_up == [True]


@pytest.mark.parametrize("name", ["watchdog", "memory-watch"])
def test_what_watches_the_process_goes_on_after_an_unexpected_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls = Counter[str]()

    async def main() -> None:
        went_on = asyncio.Event()

        async def watch(watched_name: str) -> None:
            num_calls[watched_name] += 1
            if watched_name == name and num_calls[name] == 1:
                raise KeyError("an error that nobody expects")
            if watched_name == name:
                went_on.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(service_manager, "keep_watchdog", partial(watch, "watchdog"))
        monkeypatch.setattr(last_words, "watch_memory", partial(watch, "memory-watch"))

        async def until_it_went_on() -> None:
            async with asyncio.timeout(HANG_LIMIT_S):
                await went_on.wait()

        await watched(until_it_went_on())

    asyncio.run(main())
    assert num_calls[name] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_service_drain(number: signal.Signals) -> None:
    process = service(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANG_LIMIT_S)
    assert output == "draining\ndone\n"
    assert process.returncode == 0


def test_a_second_signal_ends_it_at_once() -> None:
    process = service(60)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "draining\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system keeps no process to cores")
def test_threads_keep_to_the_cores_of_the_process() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    code = (
        "import json, os, sys, threading; from services.runtime import process\n"
        "process.keep_to_cores(json.loads(sys.argv[1]))\n"
        "thread = threading.Thread(target=lambda: print(sorted(os.sched_getaffinity(0))))\n"
        "thread.start(); thread.join()"
    )
    # What is not allowed is left out; where nothing else was wanted, everything that is allowed stays so.
    for wanted, kept in (([allowed[-1], 9999], [allowed[-1]]), ([9999], allowed)):
        ran = subprocess.run([sys.executable, "-c", code, str(wanted)], capture_output=True, text=True, check=True)
        assert ran.stdout == f"{kept}\n"
        assert ("cannot keep to the wanted cores" in ran.stderr) == (kept == allowed)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.parametrize("value", ["'1'", "str(os.getpid())"])
def test_a_child_dies_with_its_parent(value: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT % value, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_alive(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_child_of_another_parent_ends_itself() -> None:
    environ = os.environ | {"TANDEM_DIE_WITH_PARENT": str(os.getpid() + 1)}
    ended = subprocess.run(
        [sys.executable, "-c", CHILD], env=environ, capture_output=True, timeout=HANG_LIMIT_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"TANDEM_DIE_WITH_PARENT=%d was inherited from another process: unset it" % (os.getpid() + 1) in ended.stderr


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(not process.AUTOGROUP.exists(), reason="this kernel does not share cores out by session")
@pytest.mark.parametrize("leads_a_session", [True, False])
def test_a_nice_process_lets_its_session_give_way_where_it_leads_one(leads_a_session):
    """One that was started in somebody's terminal must not slow down what else runs there."""
    code = (
        "import os; from services.runtime import process; niceness = os.nice(0); "
        "before = process.AUTOGROUP.read_text(); process.be_nice(7); after = process.AUTOGROUP.read_text(); "
        "print(os.nice(0) - niceness, after != before, after.split()[-1])"
    )
    # A session of its own around it, so that the one of the test is left alone in any case.
    command = [sys.executable, "-c", code]
    if not leads_a_session:
        command = [sys.executable, "-c", f"import subprocess; subprocess.run({command!r}, check=True)"]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, start_new_session=True, timeout=HANG_LIMIT_S
    )
    assert said.stdout.split() == (["7", "True", "7"] if leads_a_session else ["7", "False", "0"])


def test_a_process_that_may_not_go_first_runs_as_it_is(monkeypatch, caplog):
    def refuse(niceness):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "nice", refuse)
    with caplog.at_level("INFO"):
        process.be_nice(-10)
    assert "may not go before others" in caplog.text


def test_a_service_may_open_as_many_files_as_the_system_lets_it() -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 300))\n"
        "from services.runtime import process\n"
        "async def look(): print(process.descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "process.run_async(look())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_LIMIT_S
    )
    assert shown.stdout == "300 (300, 300)\n"
