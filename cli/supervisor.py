"""Keeps child processes running, as `restarts` decides. Never forks Python code; knows nothing of what they serve."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cli import restarts
from cli.children import ChildSpec
from cli.log_files import open_private
from cli.restarts import Action, ChildState, Phase, RestartPolicy

KILL_WAIT_S = 5.0
"""After SIGKILL a process that is still there hangs in the kernel; waiting longer would not help."""
MAX_TAIL_BYTES = 64 * 1024


@dataclass
class Child:
    """A process that is kept running, its state and where its output goes."""

    spec: ChildSpec
    log: Path
    state: ChildState
    process: asyncio.subprocess.Process | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_vital: bool = True
    """Whether everything ends where it cannot be kept running."""

    @property
    def name(self) -> str:
        """The child's name, such as decode-0."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Process id while the process lives."""
        return self.process.pid if self.process is not None and self.state.phase in restarts.ALIVE else None

    def last_log_lines(self, count: int) -> list[str]:
        """The end of what the child wrote, oldest first."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_TAIL_BYTES))
                return file.read().decode("utf-8", "replace").splitlines()[-count:]
        except OSError:
            return []


class Supervisor:
    """Runs every child in a task of its own.

    `on_change(child, news)` is called on the event loop with a few words for each thing that happens to a child.
    `gave_up` is set as soon as a vital child cannot be kept running; `failed` says which, where it was its fault.
    Must live on the main thread: the kernel ends the children together with the thread that started them.
    """

    def __init__(
        self,
        *,
        log_dir: Path,
        on_change: Callable[[Child, str], None],
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_dir = log_dir
        self._on_change = on_change
        self._policy = policy or RestartPolicy()
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.children: dict[str, Child] = {}
        self.gave_up = asyncio.Event()
        self.failed: Child | None = None

    def start(self, specs: Iterable[ChildSpec], *, is_vital: bool = True) -> None:
        """Begins to keep these children running; returns at once."""
        for spec in specs:
            log = self._log_dir / f"{spec.name}.log"
            child = Child(spec, log, restarts.begin(self._clock()), is_vital=is_vital)
            self.children[spec.name] = child
            task = asyncio.create_task(self._keep(child), name=f"keep {spec.name}")
            task.add_done_callback(self._keeper_ended)
            self._tasks[spec.name] = task

    def mark_ready(self, name: str) -> None:
        """The child does its work: from now on it is restarted whatever it dies of."""
        child = self.children[name]
        child.state = restarts.on_ready(child.state)

    async def stop(self, names: Iterable[str], *, grace_s: float) -> None:
        """Ends these children: SIGTERM, and SIGKILL after the grace. Returns when they are gone."""
        wanted = [self.children[name] for name in names if name in self.children]
        for child in wanted:
            child.state, action = restarts.on_stop(child.state, self._clock(), grace_s)
            self._signal(child, action)
            child.changed.set()
        tasks = [self._tasks[child.name] for child in wanted]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s + KILL_WAIT_S)
        for task in tasks:
            if task.done():
                task.result()  # a failure of the keeper itself is raised here

    async def retire(self, names: Iterable[str], *, grace_s: float) -> None:
        """Ends these children for good: they are no longer among `children`, and may be started anew."""
        names = list(names)
        await self.stop(names, grace_s=grace_s)
        for name in names:
            self.children.pop(name, None)

    def kill_all(self) -> None:
        """Ends every child at once and starts none again; does not wait."""
        for child in self.children.values():
            child.state, _ = restarts.on_stop(child.state, self._clock(), 0.0)
            self._signal(child, Action.KILL)
            child.changed.set()

    def _keeper_ended(self, task: "asyncio.Task[None]") -> None:
        """Ends everything if a keeper or watcher fails, because its child would be left alone unnoticed."""
        if not task.cancelled() and task.exception() is not None:
            self.gave_up.set()

    async def _keep(self, child: Child) -> None:
        """One child's life: does what the state machine says until it has ended."""
        while child.state.phase is not Phase.ENDED:
            child.changed.clear()
            child.state, action = restarts.on_time(child.state, self._clock())
            if action is Action.SPAWN:
                await self._spawn(child)
            else:
                self._signal(child, action)
            await self._sleep(child)

    async def _sleep(self, child: Child) -> None:
        """Until something happened to the child or its next deadline is reached."""
        if child.state.phase is Phase.ENDED:
            return
        wake_at_s = child.state.wake_at_s
        timeout_s = None if wake_at_s is None else max(0.0, wake_at_s - self._clock())
        try:
            await asyncio.wait_for(child.changed.wait(), timeout_s)
        except TimeoutError:
            pass

    async def _spawn(self, child: Child) -> None:
        try:
            with open_private(child.log) as log:
                child.process = await asyncio.create_subprocess_exec(
                    *child.spec.command,
                    env=dict(child.spec.environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C reaches a terminal's whole group; only the supervisor may decide what it means.
                    start_new_session=True,
                )
        except OSError as error:
            self._exited(child, 1, f"could not be started: {error}")
            return
        if child.state.phase is Phase.STOPPING:  # told to stop while the process was being made
            self._signal(child, Action.TERMINATE)
        self._on_change(child, f"loading (pid {child.process.pid})")
        watcher = asyncio.create_task(self._watch(child, child.process), name=f"watch {child.name}")
        watcher.add_done_callback(self._keeper_ended)
        self._tasks[f"{child.name} watch"] = watcher

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        exit_code = await process.wait()
        _kill_group(process.pid)  # whatever the child started and left
        self._exited(child, exit_code, f"ended with {_in_words(exit_code)}")

    def _exited(self, child: Child, exit_code: int, news: str) -> None:
        now_s = self._clock()
        child.state, action = restarts.on_exit(child.state, now_s, exit_code, self._policy)
        if action is Action.GIVE_UP:
            if child.is_vital:
                self.failed = self.failed or child
                self.gave_up.set()
            self._on_change(child, f"{news}; given up")
        elif child.state.phase is Phase.WAITING and child.state.wake_at_s is not None:
            self._on_change(child, f"{news}; starting it again in {child.state.wake_at_s - now_s:.1f} s")
        else:
            self._on_change(child, "stopped" if exit_code == 0 else f"stopped ({_in_words(exit_code)})")
        child.changed.set()

    def _signal(self, child: Child, action: Action | None) -> None:
        if child.process is None or child.process.returncode is not None:
            return
        if action is Action.TERMINATE:
            try:
                child.process.terminate()
                child.process.send_signal(signal.SIGCONT)  # a stopped process cannot end by itself
            except ProcessLookupError:
                pass
        elif action is Action.KILL:
            _kill_group(child.process.pid)


def _kill_group(pid: int) -> None:
    """SIGKILL to the child's process group, which it leads."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM of a group whose last process is being reaped
        pass


def _in_words(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
