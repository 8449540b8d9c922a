"""`tandem join REDIS`: workers on this machine for a cluster that runs elsewhere, kept running until they are to end.

They find the cluster by its Redis, and gateways find them there; no gateway is asked anything.
"""

import asyncio
import functools
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cli.children import Addresses, ChildSpec, ModelPlan, child_environment, worker_specs
from cli.commands import CommandParser
from cli.cores import this_machine
from cli.gpus import visible_gpus
from cli.log_lines import is_ready_line, says, start_text
from cli.progress import Progress
from cli.restarts import RestartPolicy
from cli.supervisor import Child, Supervisor
from cli.up_checks import checked, with_local_draft
from cli.up_scopes import early_signals, end_signals, log_folder
from cli.up_settings import DEMO_MODEL, LEFT_TO_US
from decode_worker.config import DecodeWorkerConfig
from prefill_worker.config import PrefillWorkerConfig
from services.hub.models import with_local_model
from services.hub.source import model_source, served_name
from services.runtime.config import forwarded, option, read
from services.runtime.errors import ConfigError
from services.runtime.kinds import argument, flag, folder, integer, number, redis_url, text
from services.runtime.process import watched
from services.runtime.worker_state import FOUND, UNFOUND, UNLISTED
from worker.config import WorkerConfig

POLL_S = 0.2
NUM_TAIL_LINES = 20
EXIT_FAILED = 1
WHY_UNFOUND = "does one of this cluster and model run? Its log and `tandem doctor` there say why it does not come"


@dataclass(frozen=True, kw_only=True)
class JoinSettings:
    """Runs workers on this machine for the cluster whose Redis is REDIS, and keeps them running.

    The cluster reaches them at --host, or at --advertise-host where that differs. When it is told to stop, they finish
    what they run; answers that are not finished by then move to other workers.
    """

    redis: str = option(argument(redis_url()), help="The cluster's Redis, such as redis://10.0.0.1:6379.")
    prefill: int = option(integer(0, 256), default=0, help="Number of prefill workers.")
    decode: int = option(integer(0, 256), default=1, help="Number of decode workers.")
    model: Path = option(
        model_source(), default=DEMO_MODEL, help="The cluster's model: its folder here, or its name. Demo if not given."
    )
    model_name: str | None = option(
        text(pattern=r"\S{1,256}", rule="1 to 256 characters without spaces"),
        default=None,
        help="What the model is called in the cluster; its folder's name if not given, or ORG/MODEL.",
    )
    machine: str | None = option(
        text(pattern=r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", rule="1 to 32 of a-z, 0-9 and inner hyphens"),
        default=None,
        help="Part of the workers' names, which are unique in the cluster: decode-MACHINE-0. This host's name if not "
        "given.",
    )
    pin: bool = option(
        flag(), default=True, help="Keeps each worker to processor cores of its own, as far as possible."
    )
    log_dir: Path | None = option(
        folder(), default=None, help="Folder of the log files; a temporary one, removed at a clean end, if not given."
    )
    stop_grace: float = option(
        number(0, 86_400), default=60.0, help="Seconds that running requests get to finish or move when it is to stop."
    )
    services: Mapping[str, str] = forwarded(
        {"all workers": WorkerConfig, "prefill workers": PrefillWorkerConfig, "decode workers": DecodeWorkerConfig},
        without=LEFT_TO_US,
    )

    def __post_init__(self) -> None:
        if not self.prefill + self.decode:
            raise ConfigError("--prefill and --decode are both 0; there must be a worker to join with")
        _ = self.decode_worker

    @functools.cached_property
    def decode_worker(self) -> DecodeWorkerConfig:
        """A decode worker's settings, as far as they are given. Raises ConfigError."""
        texts = {**self.services, "id": "decode", "model": str(self.model), "redis": self.redis}
        return read(DecodeWorkerConfig, texts, environ={})

    def worker_texts(self, role: str) -> dict[str, str]:
        """The texts of the workers' settings by name, as far as they are given; of all roles alike."""
        return dict(self.services)

    @property
    def plan(self) -> ModelPlan:
        """The workers."""
        name = self.model_name or ("tandem-demo" if self.model == DEMO_MODEL else served_name(self.model))
        label = self.machine or machine_label(socket.gethostname())
        worker = self.decode_worker
        return ModelPlan(name, self.model, self.prefill, self.decode, worker.engine, label, lora=worker.lora or {})


def machine_label(host: str) -> str:
    """Returns a host's name as names of workers can have it."""
    return re.sub("[^a-z0-9]+", "-", host.lower().partition(".")[0])[:32].strip("-") or "machine"


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(JoinSettings, run)


def run(settings: JoinSettings) -> int:
    """Runs the workers until a signal ends them; returns the exit code. Raises ModelError or ConfigError."""
    with early_signals() as came:
        settings = with_local_model(settings)
        settings = replace(settings, services=with_local_draft(settings.services, settings.decode_worker.draft_model))
        plan = checked(settings.plan)
        environment = child_environment(os.environ, parent_pid=os.getpid())
        addresses = Addresses(settings.redis, 0, 0, workers_at={})
        specs = worker_specs(settings, [plan], addresses, environment, this_machine(), visible_gpus(environment))
        with log_folder(settings.log_dir) as logs:
            logs.is_worth_keeping = True
            code = asyncio.run(watched(Joined(specs, logs.path, grace_s=settings.stop_grace).run(came)))
            logs.is_worth_keeping = code != 0
            return code


class Joined:
    """The workers of one run. Make it and call `run` once."""

    def __init__(self, specs: list[ChildSpec], log_dir: Path, *, grace_s: float) -> None:
        self._specs = specs
        self._grace_s = grace_s
        self._progress = Progress(sys.stderr, [spec.name for spec in specs], is_live=sys.stderr.isatty())
        self._supervisor = Supervisor(log_dir=log_dir, on_change=self._on_change, policy=RestartPolicy())
        self._stop = asyncio.Event()
        self._began_at: dict[str, int] = {}
        """Where the lines of each child's present life begin in its log, in bytes."""
        self._ready: set[str] = set()
        self._found: set[str] = set()
        """Those that a gateway has connected to."""
        self._unfound: set[str] = set()
        """Those of which it was said that no gateway has."""

    async def run(self, early_signals: list[int]) -> int:
        """Starts the workers, says when all are ready, waits for the end, ends them. Returns the exit code."""
        async with end_signals(self._on_signal):
            if early_signals:
                return 0
            self._supervisor.start(self._specs)
            has_told = False
            while not self._stop.is_set() and not self._supervisor.gave_up.is_set():
                self._look()
                if not has_told and len(self._ready) == len(self._specs):
                    has_told = True
                    self._progress.finish()
                    print(f"ready {' '.join(spec.name for spec in self._specs)}", flush=True)
                await self._pause()
            self._progress.finish()
            await self._supervisor.stop(list(self._supervisor.children), grace_s=self._grace_s)
        return self._exit_code()

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), POLL_S)
        except TimeoutError:
            self._progress.tick()

    def _look(self) -> None:
        """Finds out from the logs which workers are ready, and how far the others are."""
        for child in self._supervisor.children.values():
            if child.pid is None or child.name in self._found:
                continue
            lines = _lines_after(child.log, self._began_at.get(child.name, 0))
            if child.name in self._ready:
                self._look_for_gateways(child, lines)
            elif any(map(is_ready_line, lines)):
                self._ready.add(child.name)
                self._supervisor.mark_ready(child.name)
                self._progress.show(child.name, f"ready (pid {child.pid})", is_done=True)
            elif lines and (said := start_text(lines[-1])):
                self._progress.show(child.name, said)

    def _look_for_gateways(self, child: Child, lines: list[str]) -> None:
        if any(says(line, FOUND) for line in lines):
            self._found.add(child.name)
            if child.name in self._unfound:
                print(f"{child.name}: {FOUND}", file=sys.stderr, flush=True)
        elif child.name not in self._unfound and (why := next(filter(None, map(_why_unfound, lines)), "")):
            self._unfound.add(child.name)
            print(f"{child.name}: {why}", file=sys.stderr, flush=True)

    def _on_change(self, child: Child, news: str) -> None:
        for names in (self._ready, self._found, self._unfound):
            names.discard(child.name)
        self._began_at[child.name] = child.log.stat().st_size if child.log.exists() else 0
        self._progress.show(child.name, news)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._supervisor.kill_all()
        self._stop.set()

    def _exit_code(self) -> int:
        """0 if a signal ended it; else says on standard error what went wrong."""
        failed = self._supervisor.failed
        if not self._supervisor.gave_up.is_set():
            return 0
        if failed is not None:
            tail = "\n".join(failed.last_log_lines(NUM_TAIL_LINES))
            print(f"error: {failed.name} cannot be kept running; its log {failed.log} ends:\n{tail}", file=sys.stderr)
        return EXIT_FAILED


def _why_unfound(line: str) -> str:
    """Returns why no gateway uses a worker, by a line of its log; empty where the line does not say."""
    if says(line, UNFOUND):
        return f"{UNFOUND}; {WHY_UNFOUND}"
    return start_text(line) if says(line, UNLISTED) else ""


def _lines_after(log: Path, offset: int) -> list[str]:
    """Returns the whole lines of a log behind an offset in bytes."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            return file.read().decode("utf-8", "replace").split("\n")[:-1]
    except OSError:
        return []
