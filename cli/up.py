"""`tandem up`: a whole cluster on this machine, from the first check of the model folder to the last ended process.

Knows what must run and in which order it starts and ends; how a process is kept running is the supervisor's.
"""

import asyncio
import functools
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cli.children import (
    AUTOSCALER,
    GATEWAY,
    REDIS,
    Addresses,
    ModelPlan,
    autoscaler_spec,
    child_environment,
    gateway_spec,
    model_plans,
    worker_specs,
)
from cli.commands import CommandParser
from cli.control import Fence, Order, taking_orders
from cli.cores import this_machine
from cli.fleet import Fleet, Resized
from cli.gpus import visible_gpus
from cli.log_files import open_private
from cli.log_lines import for_people, start_text
from cli.progress import Progress
from cli.restarts import EXIT_BAD_INPUT, RestartPolicy
from cli.supervisor import Child, Supervisor
from cli.up_checks import check_certificate, checked, claim_port, open_address, with_local_draft
from cli.up_scopes import early_signals, end_signals, log_folder, own_redis, pid_file
from cli.up_settings import UpSettings
from gateway.access.keys import digest_of_key, new_key, read_keys
from services.cluster.embedded_redis import EmbeddedRedis
from services.hub.models import local_model, with_local_model
from services.runtime import last_words, service_manager
from services.runtime.addresses import connectable, join_host_port
from services.runtime.api_client import ApiRefused, ApiUnreachable, get_json, get_status
from services.runtime.background_tasks import supervise
from services.runtime.errors import ConfigError, StoreUnavailable, TandemError
from services.runtime.logs import wants_colour
from services.runtime.orders import socket_path
from services.runtime.process import watched
from services.runtime.tls import pinned_context
from services.runtime.worker_state import WorkerState

POLL_S = 0.1
SLOW_POLL_S = 1.0
PROBE_TIMEOUT_S = 2.0
STRAGGLER_GRACE_S = 15.0
"""After the first request could be served, how long `ready` waits for workers that are still loading."""
GATEWAY_GRACE_S = 3.0
"""What the gateway gets beyond --stop-grace, to tell the requests that did not finish in it."""
WORKER_GRACE_S = 5.0
"""Workers end after the gateway, when no request is left; this is for leaving the cluster in order."""
NUM_TAIL_LINES = 20
EXPECTED = "expected.txt"
"""The file beside the logs that says how many workers there are to be."""


class NotReady(TandemError):
    """The cluster could not serve a request in time."""


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(UpSettings, run)


def run(settings: UpSettings) -> int:
    """Runs the cluster until a signal ends it; returns the exit code.

    Raises ModelError, ConfigError, PortTaken or StoreUnavailable where the cluster cannot be started.
    """
    with early_signals() as came:
        return _run(settings, came)


def _run(settings: UpSettings, early_signals: list[int]) -> int:
    settings = with_local_model(settings)
    settings = replace(settings, services=with_local_draft(settings.services, settings.decode_worker.draft_model))
    plans = [checked(replace(plan, path=local_model(plan.path))) for plan in model_plans(settings)]
    gateway = settings.gateway
    if gateway.api_keys is not None:
        read_keys(gateway.api_keys)
    has_prefill = any(plan.num_prefill for plan in plans)
    check_certificate(settings, (GATEWAY, "decode", "prefill") if has_prefill else (GATEWAY, "decode"))
    if (open_to_all := open_address(settings)) is not None:
        print(open_to_all, file=sys.stderr)
    http_port = claim_port(settings.host, gateway.http_port, flag="--http-port")
    grpc_port = claim_port(settings.host, gateway.grpc_port, flag="--grpc-port", taken=http_port)
    with log_folder(settings.log_dir) as logs, pid_file(settings.pid_file), own_redis(settings) as redis:
        redis_url = settings.redis if redis is None else redis.url
        assert redis_url is not None, "either --redis is given or the embedded one runs"
        key = None if gateway.api_keys is None else new_key()
        digest = None if key is None else digest_of_key(key)
        decisions, expected = logs.path / "decisions.jsonl", logs.path / EXPECTED
        addresses = Addresses(redis_url, http_port, grpc_port, digest, decisions, logs.path, expected)
        up = Up(settings, plans, addresses, redis, logs.path, api_key=key)
        logs.is_worth_keeping = True  # unless it comes to one of the two ends that explain themselves
        code = asyncio.run(watched(up.run(early_signals)))
        logs.is_worth_keeping = code not in (0, EXIT_BAD_INPUT)
        return code


class Up:
    """One run of a cluster. Make it and call `run` once."""

    def __init__(
        self,
        settings: UpSettings,
        plans: Sequence[ModelPlan],
        addresses: Addresses,
        redis: EmbeddedRedis | None,
        log_dir: Path,
        *,
        api_key: str | None = None,
    ) -> None:
        environment = child_environment(os.environ, parent_pid=os.getpid())
        self._settings = settings
        self._api_key = api_key
        self._redis = redis
        self._log_dir = log_dir
        self._policy = RestartPolicy()
        here = (addresses, environment, this_machine(), visible_gpus(environment))
        self._orders_path = functools.partial(socket_path, addresses.http_port)
        self._gateway = gateway_spec(settings, addresses, environment)
        scheme = "http" if settings.gateway.tls is None else "https"
        self._probe_url = f"{scheme}://{join_host_port(connectable(settings.host), addresses.http_port)}"
        self._http = f"{scheme}://{join_host_port(settings.host, addresses.http_port)}"
        self._grpc = join_host_port(settings.host, addresses.grpc_port)
        self._first_specs = [self._gateway, *worker_specs(settings, plans, *here)]
        self._autoscaler = (
            []
            if settings.autoscale is None
            else [autoscaler_spec(settings, addresses, environment, url=self._probe_url, api_key=api_key)]
        )
        names = ([REDIS] if redis is not None else []) + [spec.name for spec in (*self._first_specs, *self._autoscaler)]
        self._progress = Progress(sys.stderr, names, is_live=sys.stderr.isatty() and not settings.verbose)
        self._supervisor = Supervisor(log_dir=log_dir, on_change=self._on_change, policy=self._policy)
        unpinned = replace(settings, pin=False)  # cores that are given to running workers stay theirs
        self._fleet = Fleet(
            self._supervisor,
            plans,
            make_specs=lambda plans: worker_specs(unpinned, plans, *here),
            roles=log_dir,
            ready=self._ready_roles,
        )
        self._tell_expected()
        self._fence = Fence()
        self._finishing: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._ready_pids: dict[str, int] = {}

    async def run(self, early_signals: list[int]) -> int:
        """Starts everything, says when it is ready, waits for the end, ends everything.

        `early_signals` are those that asked for the end before this. Returns the exit code. Raises NotReady.
        """
        if self._redis is not None:
            self._progress.show(REDIS, f"ready (pid {self._redis.pid})", is_done=True)
        async with end_signals(self._on_signal), self._side_tasks(), self._taking_orders():
            if early_signals:
                return 0
            service_manager.tell_status(f"starting; logs: {self._log_dir}")
            service_manager.ask_for_time(self._settings.start_timeout + STRAGGLER_GRACE_S)
            self._supervisor.start(self._first_specs)
            self._supervisor.start(self._autoscaler, is_vital=False)
            try:
                if await self._until_over(self._until_ready()):
                    self._progress.finish()
                    print(f"ready http={self._http} grpc={self._grpc}", flush=True)
                    service_manager.tell_ready(f"ready on {self._http}")
                    await self._until_over(self._watch_readiness())
            finally:
                self._progress.finish()
                await self._end_all()
        return self._exit_code()

    @asynccontextmanager
    async def _taking_orders(self) -> AsyncIterator[None]:
        """Takes the orders of `tandem drain`, `scale`, `role` and `logs`; serving does not depend on them."""
        orders: dict[str, Order] = {"children": self._tell_children, "drain": self._drain}
        orders |= {"scale": self._scale, "sizes": self._tell_sizes, "role": self._change_role}
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(taking_orders(self._orders_path(), orders))
            except (OSError, ConfigError) as error:
                self._progress.note(f"`tandem drain`, `scale`, `role` and `logs` cannot reach this cluster: {error}")
            yield

    async def _tell_children(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._fleet.children()

    async def _drain(self, order: Mapping[str, Any]) -> None:
        await self._fleet.drain(order["name"], grace_s=order["grace_s"])

    async def _change_role(self, order: Mapping[str, Any]) -> bool:
        check_certificate(self._settings, (order["role"],))
        limits = {"timeout_s": order["grace_s"], "is_forced": order["is_forced"]}
        try:
            return await self._fleet.change_role(order["name"], order["role"], **limits)
        finally:
            self._tell_expected()

    async def _scale(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self._fence.check(order.get("lease"))
        if port := self._settings.decode_worker.metrics_port:
            raise ConfigError(
                f"the ports after --metrics-port {port} are given to workers in order; start with 0 instead"
            )
        done = self._fleet.resize(order["model"], prefill=order["prefill"], decode=order["decode"])
        self._tell_expected()
        finishing = self._finish(done, grace_s=order["grace_s"])
        if order.get("waits", True):
            await finishing
        else:
            task = asyncio.create_task(self._told(finishing), name="finish")
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)
        return asdict(done)

    async def _finish(self, resized: Resized, *, grace_s: float) -> None:
        """Raises ConfigError for workers that keep their roles, which are expected with them again."""
        try:
            await self._fleet.finish(resized, grace_s=grace_s)
        finally:
            self._tell_expected()

    async def _told(self, finishing: Coroutine[Any, Any, None]) -> None:
        """Shows what an order came to whose giver has left."""
        try:
            await finishing
        except ConfigError as error:
            self._progress.note(error.message)

    def _tell_expected(self) -> None:
        """Tells the gateway how many workers there are to be; with an autoscaler they may be fewer at any time."""
        if self._settings.autoscale is not None:
            return
        written = self._log_dir / "expected.new"
        sizes = ",".join(f"{role}={number}" for role, number in self._fleet.total_sizes.items())
        with open_private(written) as stream:
            stream.truncate(0)
            stream.write(sizes.encode())
        written.replace(self._log_dir / EXPECTED)

    async def _tell_sizes(self, order: Mapping[str, Any]) -> dict[str, int]:
        return self._fleet.sizes(order["model"])

    async def _until_over(self, work: Any) -> bool:
        """Whether `work` came to its end before somebody asked for the end of everything."""
        tasks = [
            asyncio.ensure_future(work),
            asyncio.ensure_future(self._stop.wait()),
            asyncio.ensure_future(self._supervisor.gave_up.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            is_over = self._stop.is_set() or self._supervisor.gave_up.is_set()
            if not is_over:
                tasks[0].result()
            return not is_over
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_ready(self) -> None:
        """Returns when a request can be served and every worker has had its chance to load. Raises NotReady."""
        give_up_at_s = time.monotonic() + self._settings.start_timeout
        can_serve_since_s: float | None = None
        while True:
            await self._look()
            self._show_loading()
            if can_serve_since_s is None and await self._can_serve():
                can_serve_since_s = time.monotonic()
            if can_serve_since_s is not None and (
                self._are_all_ready or time.monotonic() - can_serve_since_s > STRAGGLER_GRACE_S
            ):
                return
            if can_serve_since_s is None and time.monotonic() > give_up_at_s:
                raise NotReady(
                    f"no request can be served after {self._settings.start_timeout:g} s; logs: {self._log_dir}"
                )
            await asyncio.sleep(POLL_S)

    async def _watch_readiness(self) -> None:
        """Notices workers that come back; runs until it is cancelled."""
        while True:
            await asyncio.sleep(SLOW_POLL_S)
            if not self._are_all_ready:
                await self._look()

    @property
    def _are_all_ready(self) -> bool:
        return all(self._ready_pids.get(name) == child.pid for name, child in self._supervisor.children.items())

    async def _can_serve(self) -> bool:
        try:
            status = await asyncio.to_thread(
                get_status, self._probe_url, "/ready", timeout_s=PROBE_TIMEOUT_S, tls=self._probe_tls()
            )
            return status == 200
        except (ApiUnreachable, ConfigError):
            return False

    async def _look(self) -> None:
        """Asks the gateway which processes are in rotation."""
        before = {name: child.pid for name, child in self._supervisor.children.items() if name in (GATEWAY, AUTOSCALER)}
        workers = await self._ask_for_workers()
        if workers is None:
            return
        for name, pid in before.items():
            if pid is not None:
                self._mark_ready(name, pid)
        for worker in workers:
            self._mark_ready(worker["id"], worker["pid"])

    async def _ask_for_workers(self) -> list[dict[str, Any]] | None:
        """Returns what the gateway says of our workers in rotation; None: it does not answer."""
        try:
            cluster = await asyncio.to_thread(
                get_json,
                self._probe_url,
                "/cluster",
                timeout_s=PROBE_TIMEOUT_S,
                api_key=self._api_key,
                tls=self._probe_tls(),
            )
        except (ApiUnreachable, ApiRefused, ConfigError):
            return None
        ready = (one for one in cluster.get("workers", []) if one.get("state") == WorkerState.READY)
        return [one for one in ready if one.get("id") in self._supervisor.children]

    async def _ready_roles(self) -> dict[str, str]:
        """Returns the roles of workers in rotation by name; a name's earlier process does not count."""
        ours = self._supervisor.children
        found = await self._ask_for_workers() or []
        return {one["id"]: one["role"] for one in found if one["id"] in ours and one["pid"] == ours[one["id"]].pid}

    def _show_loading(self) -> None:
        """Shows how far the weights of workers are that are not ready."""
        for child in self._supervisor.children.values():
            is_ready = self._ready_pids.get(child.name) == child.pid
            if not is_ready and (said := start_text("".join(child.last_log_lines(1)))):
                self._progress.show(child.name, said)

    def _probe_tls(self) -> ssl.SSLContext | None:
        """Our own gateway is known by the very certificate that it was given, whatever host that is for.

        Raises ConfigError while the file is being replaced.
        """
        tls = self._settings.gateway.tls
        return None if tls is None else pinned_context(tls.cert)

    def _mark_ready(self, name: str, pid: int | None) -> None:
        """The child serves, if this is its process: the cluster may still list an earlier life of it."""
        child = self._supervisor.children[name]
        if child.pid is not None and child.pid == pid and self._ready_pids.get(name) != pid:
            self._ready_pids[name] = pid
            self._supervisor.mark_ready(name)
            self._progress.show(name, f"ready (pid {pid})", is_done=True)

    def _on_change(self, child: Child, news: str) -> None:
        self._progress.show(child.name, news)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._supervisor.kill_all()
        else:
            self._stop.set()

    @asynccontextmanager
    async def _side_tasks(self) -> AsyncIterator[None]:
        """What runs beside the main line: spinners, log lines on the screen, the care for Redis."""
        tasks = [supervise(self._tick, name="progress")]
        if self._settings.verbose:
            tasks.append(supervise(self._follow_logs, name="log-lines"))
        if self._redis is not None:
            tasks.append(supervise(functools.partial(self._keep_redis, self._redis), name="redis"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self._progress.tick()

    async def _follow_logs(self) -> None:
        """Copies what children write to standard error, each line with its writer's name."""
        offsets: dict[str, int] = {}
        while True:
            for child in self._supervisor.children.values():
                offsets[child.name] = self._show_log_from(child, offsets.get(child.name, 0))
            await asyncio.sleep(POLL_S)

    def _show_log_from(self, child: Child, offset: int) -> int:
        """Shows the whole lines after `offset`; returns where the next ones begin."""
        try:
            with child.log.open("rb") as file:
                file.seek(offset)
                new = file.read(1 << 20)
        except OSError:
            return offset
        end = new.rfind(b"\n") + 1
        for line in new[:end].decode("utf-8", "replace").splitlines():
            shown = for_people(line, is_coloured=wants_colour(sys.stderr)) if sys.stderr.isatty() else line
            self._progress.note(f"{child.name} | {shown}")
        return offset + end

    async def _keep_redis(self, redis: EmbeddedRedis) -> None:
        """Starts the embedded Redis again when it has died. Its content is only a hint and comes back by itself."""
        num_failures = 0
        while True:
            await asyncio.sleep(self._policy.backoff_s(num_failures))
            if redis.is_running():
                num_failures = 0
                continue
            self._progress.show(REDIS, "has ended; starting it again")
            redis.kill()
            try:
                redis.start()  # on this thread: the kernel ends the server together with the thread that started it
                self._progress.show(REDIS, f"ready (pid {redis.pid})", is_done=True)
            except (StoreUnavailable, OSError) as error:
                num_failures += 1
                self._progress.show(REDIS, f"cannot be started: {error}")

    async def _end_all(self) -> None:
        """Gateway first, so that running requests keep their workers; Redis, the last, is ended by its owner."""
        service_manager.tell_stopping("ending the gateway, the workers and Redis")
        is_wanted = self._stop.is_set() and not self._supervisor.gave_up.is_set()
        grace_s = self._settings.stop_grace if is_wanted else 0.0
        self._fleet.close()
        await self._supervisor.stop([AUTOSCALER, GATEWAY], grace_s=grace_s + GATEWAY_GRACE_S)
        await self._supervisor.stop(list(self._supervisor.children), grace_s=WORKER_GRACE_S)

    def _exit_code(self) -> int:
        """0 if a signal ended it; else says on standard error what went wrong."""
        failed = self._supervisor.failed
        if failed is None:
            return 1 if self._supervisor.gave_up.is_set() else 0
        if failed.state.exit_code == EXIT_BAD_INPUT:
            sentence = _sentence(failed)
            print(sentence, file=sys.stderr)
            last_words.leave(sentence.rpartition("error: ")[2], EXIT_BAD_INPUT)
            return EXIT_BAD_INPUT
        for line in failed.last_log_lines(NUM_TAIL_LINES):
            print(f"{failed.name} | {line}", file=sys.stderr)
        print(f"error: {failed.name} cannot be started; its log is {failed.log}", file=sys.stderr)
        last_words.leave(f"{failed.name} cannot be started; its log is {failed.log}", 1)
        return 1


def _sentence(child: Child) -> str:
    """The one sentence with which a service refuses its settings or its model."""
    lines = child.last_log_lines(NUM_TAIL_LINES)
    sentences = [line for line in lines if line.startswith("error: ")]
    return sentences[-1] if sentences else "\n".join([*lines, f"error: {child.name} refuses its settings"])
