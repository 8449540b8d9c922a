"""The supervisor over real processes."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cli.children import ChildSpec
from cli.restarts import Phase, RestartPolicy
from cli.supervisor import Child, Supervisor
from tests.waiting import HANG_LIMIT_S, settle, until

QUICK = RestartPolicy(first_backoff_s=0.05, max_backoff_s=0.2, max_start_failures=3)
SLEEP = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
WITH_GRANDCHILD = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print(p.pid, flush=True); time.sleep(60)"
)


def spec(name: str, program: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-I", "-S", "-c", program), dict(os.environ))


@asynccontextmanager
async def supervising(folder: Path, *specs: ChildSpec) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    news: list[str] = []

    def on_change(child: Child, text: str) -> None:
        news.append(f"{child.name} {text}")

    supervisor = Supervisor(log_dir=folder, on_change=on_change, policy=QUICK)
    supervisor.start(specs)
    try:
        yield supervisor, news
    finally:
        supervisor.kill_all()
        await supervisor.stop(list(supervisor.children), grace_s=1.0)


def lives(pid: int) -> bool:
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_killed_child_comes_back_with_another_pid(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec("a", SLEEP)) as (supervisor, news):
        child = supervisor.children["a"]
        await until(lambda: child.process is not None)
        supervisor.mark_ready("a")
        first = child.pid
        assert first is not None
        os.kill(first, 9)
        await until(lambda: child.pid not in (None, first))
        assert any("SIGKILL" in text and "again" in text for text in news)
        assert not lives(first)


async def test_a_stopped_child_ends_and_stays_away(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec("a", SLEEP)) as (supervisor, _):
        child = supervisor.children["a"]
        await until(lambda: child.process is not None)
        pid = child.pid
        assert pid is not None
        await supervisor.stop(["a"], grace_s=10.0)
        assert child.state.phase is Phase.ENDED
        assert not lives(pid)
        await settle()
        assert child.pid is None


async def test_a_deaf_child_is_killed_after_the_grace(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec("a", STUBBORN)) as (supervisor, _):
        child = supervisor.children["a"]
        await until(lambda: child.last_log_lines(1) == ["deaf"])
        pid = child.pid
        assert pid is not None
        await supervisor.stop(["a"], grace_s=0.3)
        assert child.state.exit_code == -9
        assert not lives(pid)


async def test_a_frozen_child_is_ended_too(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec("a", SLEEP)) as (supervisor, _):
        child = supervisor.children["a"]
        await until(lambda: child.process is not None)
        assert child.pid is not None
        os.kill(child.pid, 19)
        await supervisor.stop(["a"], grace_s=10.0)
        assert child.state.exit_code == -15


async def test_what_a_killed_child_had_started_goes_with_it(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec("a", WITH_GRANDCHILD)) as (supervisor, _):
        child = supervisor.children["a"]
        await until(lambda: len(child.last_log_lines(1)) == 1)
        grandchild = int(child.last_log_lines(1)[0])
        assert lives(grandchild)
        assert child.pid is not None
        os.kill(child.pid, 9)
        await until(lambda: not lives(grandchild))


async def test_a_child_that_refuses_its_settings_is_given_up_with_its_sentence(tmp_path: Path) -> None:
    refusing = spec("a", "import sys; print('error: no such model', file=sys.stderr); sys.exit(2)")
    async with supervising(tmp_path, refusing, spec("b", SLEEP)) as (supervisor, _):
        async with asyncio.timeout(HANG_LIMIT_S):
            await supervisor.gave_up.wait()
        assert supervisor.failed is supervisor.children["a"]
        assert supervisor.failed.state.exit_code == 2
        assert supervisor.failed.last_log_lines(5) == ["error: no such model"]


async def test_a_program_that_does_not_exist_is_given_up(tmp_path: Path) -> None:
    async with supervising(tmp_path, ChildSpec("a", ("/does/not/exist",), {})) as (supervisor, news):
        async with asyncio.timeout(HANG_LIMIT_S):
            await supervisor.gave_up.wait()
        assert any("could not be started" in text for text in news)


async def test_stop_during_a_backoff_starts_nothing(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec("a", "raise SystemExit(1)")) as (supervisor, _):
        child = supervisor.children["a"]
        supervisor.mark_ready("a")
        await until(lambda: child.state.phase is Phase.WAITING and child.state.exit_code == 1)
        await supervisor.stop(["a"], grace_s=1.0)
        assert child.state.phase is Phase.ENDED


async def test_a_stop_before_the_first_process_is_made_leaves_none(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec("a", SLEEP)) as (supervisor, _):
        await asyncio.sleep(0)  # the keeper is in the middle of making the process
        await supervisor.stop(["a"], grace_s=5.0)
        child = supervisor.children["a"]
        assert child.state.phase is Phase.ENDED
        assert child.process is None or not lives(child.process.pid)
