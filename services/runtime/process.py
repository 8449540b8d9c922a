"""The life of a service process: its exit code, its signals, its event loop, its parent. Knows no service."""

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import uvloop

from services.runtime import last_words, service_manager
from services.runtime.background_tasks import PROCESS_TASKS, supervise
from services.runtime.errors import ConfigError, InvariantViolated, ModelError

DIE_WITH_PARENT_ENV = "TANDEM_DIE_WITH_PARENT"
AUTOGROUP = Path("/proc/self/autogroup")
MAX_DESCRIPTORS = 2**20
"""As many as Linux gives a process unless its administrator says otherwise."""
STDERR = 2
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

_PR_SET_PDEATHSIG = 1

T = TypeVar("T")

logger = logging.getLogger(__name__)


def run(main: Callable[[], object]) -> NoReturn:
    """Ends the process after `main`: 0 clean, 2 and one sentence for bad settings or model, 1 otherwise."""
    sys.exit(exit_code(main))


def exit_code(main: Callable[[], object]) -> int:
    """Calls `main` and says how the process should end; an error becomes its last words too."""
    last_words.begin()
    try:
        main()
    except (ConfigError, ModelError) as error:
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201 - the one sentence for the starter of the process
        last_words.leave(last_words.words_for(error), EXIT_BAD_INPUT)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_FAILED
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else EXIT_FAILED * bool(exit_request.code)
    except Exception as error:  # the outermost frame: any error that ends a service is logged and told by the exit code
        last_words.leave(last_words.words_for(error), EXIT_FAILED)
        logger.exception("the process failed")
        return EXIT_FAILED
    return 0


def run_async(main: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine on a new uvloop event loop until it returns, with as many open files as the system allows.

    Beside it the loop tells a service manager's watchdog that it runs, and notes when memory becomes short.
    """
    raise_descriptor_limit()
    uvloop.run(watched(main))


async def watched(main: Coroutine[Any, Any, T]) -> T:
    """Awaits `main` while background tasks report to the service manager and watch the memory limit.

    Cancels `main` and raises InvariantViolated if a background task raises it.
    """
    violations: list[InvariantViolated] = []
    task = asyncio.current_task()
    assert task is not None
    cancel = task.cancel

    def end(violation: InvariantViolated) -> None:
        violations.append(violation)
        cancel()

    PROCESS_TASKS.on_invariant_violated(end)
    beside = [
        supervise(service_manager.keep_watchdog, name="watchdog"),
        supervise(last_words.watch_memory, name="memory-watch"),
    ]
    try:
        return await main
    except asyncio.CancelledError:
        if violations:
            raise violations[0] from None
        raise
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


def raise_descriptor_limit() -> None:
    """Raises the limit of open files to the most that this process may have: each connection is one.

    The limit that processes are started with, often 1,024, exists for programs that call select(), which fails beyond
    it. Nothing here calls it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        # Some systems have one more limit, for all processes; what there is has to do then.
        logger.warning("cannot raise the limit of open files", extra={"wanted": wanted, "have": descriptor_limit()})


def descriptor_limit() -> int:
    """Returns how many files this process may have open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def be_nice(niceness: int) -> None:
    """Lets others on this machine go first, more so the higher `niceness` is, up to 19.

    Below 0, to -20, this process goes before others, where it may (root, CAP_SYS_NICE, RLIMIT_NICE); elsewhere nothing
    happens, and a log line says so.

    A kernel that shares cores out by session (`sched_autogroup_enabled`) heeds niceness only among processes of one
    session; there the niceness applies to the whole session, if this process leads one. See `man 7 sched`, autogroup.
    """
    try:
        os.nice(niceness)
    except PermissionError:
        logger.info("this process may not go before others of its machine", extra={"niceness": niceness})
        return
    if niceness and os.getsid(0) == os.getpid():
        # Absent on kernels that know no such groups. An unprivileged process may ask only rarely.
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(str(niceness))


def keep_to_cores(cores: Sequence[int]) -> None:
    """Lets this thread, and those that it starts from now on, run on these cores only, as far as it may use them.

    Where it may use none of them, or the system knows no such thing, a warning says so and it uses what it may.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    wanted = allowed.intersection(cores)
    if not wanted:
        logger.warning("cannot keep to the wanted cores", extra={"wanted": list(cores), "allowed": sorted(allowed)})
        return
    os.sched_setaffinity(0, wanted)


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Gives an event that SIGTERM or SIGINT sets. A second signal ends the process at once, 128 + number."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            last_words.leave(f"a second signal ({number.name}) ended it before its work was done", 128 + number)
            os._exit(128 + number)
        logger.info("stopping", extra={"signal": number.name})
        service_manager.tell_stopping(f"draining, after {number.name}")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def die_with_parent() -> None:
    """Makes the kernel end this process with its parent, if TANDEM_DIE_WITH_PARENT asks for it.

    Its value is the parent's process id, or 1 for whichever parent there is now. Linux only; elsewhere nothing
    happens. The signal comes when the *thread* that started this process ends, so a parent starts its children
    from a thread that lives on.
    """
    wanted = os.environ.get(DIE_WITH_PARENT_ENV, "")
    if not wanted or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    is_orphan = os.getppid() != int(wanted) if wanted.isdigit() and wanted != "1" else os.getppid() == 1
    if is_orphan:
        words = f"its parent has ended, or {DIE_WITH_PARENT_ENV}={wanted} was inherited from another process: unset it"
        with contextlib.suppress(OSError):  # what the parent read may be closed
            os.write(STDERR, f"error: {words}\n".encode())
        os._exit(EXIT_FAILED)
