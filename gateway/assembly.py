"""One gateway process put together: sessions, APIs, and their orderly end. Reads no environment and no flags."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence

from gateway.access.door import FrontDoor, KeyedDoor, OperatorsDoor
from gateway.batches.batches_api import BatchesApi
from gateway.batches.files_api import FilesApi
from gateway.batches.runner import LEAVE_S, Batches
from gateway.config import GatewayConfig
from gateway.dashboard.feed import Feed, GatewayFacts
from gateway.dashboard.pages import Dashboard
from gateway.edge.grpc_api import INFERENCE_SERVICE, SERVICE_NAMES, InferenceService, account_of, register
from gateway.edge.grpc_cluster import CLUSTER_SERVICE, ClusterService
from gateway.edge.health import NOT_READY, HealthPages
from gateway.edge.http_api import HttpApi
from gateway.edge.pages import ClusterPage, OperatorPages
from gateway.forms.answer_forms import AnswerForms
from gateway.http.bodies import Bodies
from gateway.http.browsers import BrowserGuard, Hosts
from gateway.http.client_addresses import ClientAddresses, TrustedProxies
from gateway.http.connections import MAX_CONNECTIONS
from gateway.http.exchange import App, StreamPace
from gateway.http.metrics import HttpUse
from gateway.http.server import HttpServer
from gateway.limits import MAX_BODY_BYTES
from gateway.models.catalog import ModelCatalog
from gateway.named.memory import MemoryBounds
from gateway.named.requests import Journals
from gateway.observability.background_tasks import BackgroundTaskMetrics
from gateway.observability.history import History
from gateway.observability.metrics import Metrics
from gateway.observability.storage_watch import StorageWatch
from gateway.operator_choices import (
    expected,
    health_limits,
    lane_maker,
    lane_order,
    model_catalog,
    model_entries,
    policies,
    pools,
    targets,
)
from gateway.requests.cache_hints import CacheHints
from gateway.requests.lifecycle import Requests
from gateway.requests.queue import AdmissionQueue
from gateway.stored.service import StoredResponses
from gateway.topology.members import Topology
from gateway.topology.model_match import difference
from gateway.topology.prefix_view import PrefixView
from gateway.topology.presence import Presence
from gateway.topology.trouble_watch import (
    TroubleWatch,
    circuits,
    failing_tasks,
    hot_decodes,
    quarantined,
    slow_links,
    unreadable_keys,
)
from gateway.topology.troubles import Found, Kind, Troubles
from gateway.vectors.embedder import Embedder
from services.cluster.batches import BatchStore
from services.cluster.decision_board import DecisionBoard
from services.cluster.files import FILE_TIMEOUT_S, FileStore, Room
from services.cluster.journal_room import JournalRoom
from services.cluster.journals import JournalStore
from services.cluster.memory import Complaint
from services.cluster.placements import PlacementStore, PlacementWriter
from services.cluster.prefix_index import PrefixIndex
from services.cluster.quarantine import Quarantine
from services.cluster.rate_limits import Limiter
from services.cluster.redis_store import Store
from services.cluster.registry import WorkerRecord, new_incarnation, watch_workers
from services.runtime import process, rpc, service_manager
from services.runtime.background_tasks import PROCESS_TASKS, supervise
from services.runtime.clock import SYSTEM_CLOCK, Deadline
from services.runtime.cluster_secret import Secrets
from services.runtime.errors import Overloaded
from services.runtime.intake import Intake
from services.runtime.places import Places

LEAVING_RETRY_S = 1.0
"""What a client is told whose request outlasted the drain."""
ANSWER_S = 1.0
"""Time to send that."""

MAX_ADMIN_CONNECTIONS = 256
MAX_GRPC_CONNECTIONS = 4096
HTTP_PART, GRPC_PART = 2, 4
"""HTTP may have one in two of the files that the process may open, gRPC one in four: workers and Redis need some."""

logger = logging.getLogger(__name__)


class Gateway:
    """Everything that one process serves. Raises ModelError for a bad model folder, ConfigError for a bad models file.

    With `secrets`, the gateway uses only workers whose records are signed with one of them. Must be created on the
    event loop that runs it.
    """

    def __init__(self, config: GatewayConfig, *, secrets: Secrets | None = None) -> None:
        entries = model_entries(config)
        catalog = model_catalog(config, entries)
        self.incarnation = new_incarnation()
        self.http_port = self.grpc_port = self.admin_port = self.operator_port = 0
        self._config, self._secrets = config, secrets
        self._store = Store(config.redis, cluster=config.cluster)
        self._placements = PlacementWriter(PlacementStore(self._store))
        self._quarantine = Quarantine(self._store)
        # A connection of its own: an answer that is large and late must not keep others from asking.
        self._page_store = Store(config.redis, cluster=config.cluster)
        self._prefixes = PrefixView(PrefixIndex(self._page_store))
        self.metrics, self.troubles = Metrics(), Troubles()
        self.limiter = Limiter(self._store, gateway=self.incarnation)
        self.door = FrontDoor(
            self.limiter,
            key_file=config.api_keys,
            starter_digest=config.starter_key_digest,
            on_refusal=self.metrics.note_tenant_refusal,
            region=config.region,
        )
        self._queues: dict[str, AdmissionQueue] = {}
        """Each model has its own, or a full one would hold up the others."""
        self.topology = self._make_topology(catalog)
        self.troubles.listeners.append(lambda trouble, has_begun: self.topology.tell_watchers())
        self.requests, self.embedder = self._make_requests(catalog)
        self._trouble_watch = TroubleWatch(
            self.troubles, self.topology, self._store, told=self._told, reports=self.requests.circuits
        )
        self._feed = Feed(
            self.requests,
            topology=self.topology,
            metrics=self.metrics,
            troubles=self.troubles,
            facts=GatewayFacts(self.incarnation[:8], config.cluster, config.routing, SYSTEM_CLOCK.unix_ns() / 1e9),
        )
        self._journals = self._make_journals()
        self._batch_store = Store(config.redis, cluster=config.cluster, timeout_s=FILE_TIMEOUT_S)  # for large files
        files = FileStore(self._batch_store, room=Room(config.tenant_file_storage, config.file_storage))
        self.stored = self._make_stored(catalog)
        self._storage = self._make_storage_watch(files)
        self.batches = self._make_batches(files)
        for work in (self.stored.background, self.batches):
            work.region, work.tenants_elsewhere = config.region, self.door.tenants_elsewhere
        self._bodies = Bodies(config.body_memory, tenant_bytes=config.tenant_body_memory)
        self._pages = self._make_pages()
        self.api = self._http_api(self.door)
        self._http = self._make_http_server(files)
        self._admin, self._socket = self._make_admin_servers()
        self.places = Places(config.message_memory // MAX_BODY_BYTES)
        self._grpc = self._make_grpc_server()
        self._min_prefill = {
            entry.name: config.min_prefill if entry.num_prefill is None else min(config.min_prefill, entry.num_prefill)
            for entry in entries
        }
        self._registered: Sequence[WorkerRecord] = ()
        self._strangers: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_leaving = False
        self._watch()

    def is_ready(self) -> bool:
        """Returns whether every model has enough workers, and the gateway neither leaves nor fails to follow them."""
        is_able = not self._is_leaving and not PROCESS_TASKS.is_vital_failing()
        return is_able and all(map(self._has_workers, self._min_prefill))

    def _has_workers(self, model: str) -> bool:
        if self.requests.turns.can_wake(model):
            return True
        if self.topology.num_ready("decode", model) < self._config.min_decode:
            return False
        return self.topology.num_ready("prefill", model) >= self._min_prefill[model]

    def _make_topology(self, catalog: ModelCatalog) -> Topology:
        config = self._config
        served = {model.name: model.facts for model in catalog}

        def poke_all() -> None:
            for queue in self._queues.values():
                queue.poke()
            self.embedder.poke()

        return Topology(
            gateway_incarnation=self.incarnation,
            on_change=poke_all,
            judge=lambda record: difference(
                record, served.get(record.model), allows_other_weights=config.allow_other_weights
            ),
            allows_inexact=config.allow_inexact,
            presence=Presence(expected(config)),
            pools=pools(config),
        )

    def _make_requests(self, catalog: ModelCatalog) -> tuple[Requests, Embedder]:
        config, weights = self._config, self.door.tenant_weights

        def make_queue(model: str, *, are_answered: bool = False) -> AdmissionQueue:
            maker = lane_maker(config, self.topology, model=model, tenant_weights=weights, are_answered=are_answered)
            return AdmissionQueue(maker, order=lane_order(config, weights))

        self._queues |= {model.name: make_queue(model.name, are_answered=True) for model in catalog}
        requests = Requests(
            catalog=catalog,
            topology=self.topology,
            queues=self._queues,
            policies=policies(config),
            placements=self._placements,
            metrics=self.metrics,
            quarantine=self._quarantine,
            form_of=AnswerForms().form_of,
            hints=CacheHints(self._prefixes, self.topology),
            gateway_incarnation=self.incarnation,
            seed=config.seed,
            slow_request_s=config.slow_request_s,
            history=History(targets=targets(config)),
        )
        embedder = Embedder(
            requests, self.topology, make_queue=make_queue, policies=policies(config), metrics=self.metrics
        )
        return requests, embedder

    def _make_journals(self) -> Journals:
        config = self._config
        return Journals(
            self.requests,
            JournalStore(self._store, room=JournalRoom(config.tenant_journal_storage, config.journal_storage)),
            gateway_incarnation=self.incarnation,
            bounds=MemoryBounds(config.tenant_journal_memory, config.journal_memory),
            on_refusal=self.metrics.note_tenant_refusal,
        )

    def _make_stored(self, catalog: ModelCatalog) -> StoredResponses:
        return StoredResponses(
            self._batch_store,
            self._config,
            gateway_incarnation=self.incarnation,
            app_of=self._app_of,
            catalog=catalog,
            on_refusal=self.metrics.note_tenant_refusal,
        )

    def _make_storage_watch(self, files: FileStore) -> StorageWatch:
        return StorageWatch(
            self._batch_store,
            files=files,
            answers=self.stored.answers,
            bounds=self._config.storage_bounds,
            on_use=self.metrics.note_storage,
            on_complaints=self._note_complaints,
        )

    def _make_batches(self, files: FileStore) -> Batches:
        return Batches(
            BatchStore(self._batch_store, files),
            gateway_incarnation=self.incarnation,
            app_of=self._app_of,
            check_model=self._check_model,
            on_rows=lambda outcome, num_rows: self.metrics.batch_rows.labels(outcome).inc(num_rows),
            num_rows=self._config.batch_rows,
        )

    def _make_pages(self) -> OperatorPages:
        known, store = (self.requests, self.topology), self._store
        return OperatorPages(
            metrics=self.metrics,
            topology=self.topology,
            cluster=ClusterPage(*known, store=store, troubles=self.troubles, placements=self._placements),
            dashboard=Dashboard(self._feed, self.requests.log.history),
            health=HealthPages(
                self.topology,
                store,
                troubles=self.troubles,
                figures=self._feed.latest,
                limits=health_limits(self._config),
                is_ready=self.is_ready,
            ),
            port=lambda: self.http_port,
        )

    def _make_http_server(self, files: FileStore) -> HttpServer:
        config, batches = self._config, self.batches
        pace = StreamPace(config.stream_head_s, config.stream_comment_s)
        file_routes = FilesApi(files, max_file_bytes=config.max_file_size).routes()
        batch_routes = BatchesApi(
            batches.store, files, bodies=self._bodies, on_change=batches.poke, residency_of=self.door.residency
        ).routes()
        routes = [*file_routes, *batch_routes, *self.stored.routes(self._bodies)]
        app = self.api.app(routes, embedder=self.embedder, pace=pace, keepers=self.stored.keepers)
        return HttpServer(
            self._guarded(app, bound_to=config.http_host),
            identity=rpc.identity(),
            max_connections=min(config.max_connections or MAX_CONNECTIONS, process.descriptor_limit() // HTTP_PART),
        )

    def _make_admin_servers(self) -> tuple[HttpServer | None, HttpServer | None]:
        """The servers of the operators' pages, at a port and at a socket; None where the operator wants none."""
        config, admin, socket = self._config, None, None
        if config.admin_port is not None:
            pages = self.api.admin_app(OperatorsDoor(self.door, digest=config.admin_key_digest))
            guarded = self._guarded(pages, bound_to=config.admin_host)
            admin = HttpServer(guarded, identity=rpc.identity(), max_connections=MAX_ADMIN_CONNECTIONS)
        if config.admin_socket is not None:
            socket = HttpServer(self.api.admin_app(None), max_connections=MAX_ADMIN_CONNECTIONS)
        return admin, socket

    def _make_grpc_server(self) -> rpc.RpcServer:
        config, num_files = self._config, process.descriptor_limit()
        server = rpc.make_server(
            SERVICE_NAMES,
            profile=rpc.PUBLIC,
            with_reflection=config.reflection,
            intake=Intake(
                self.places,
                account_of(self.door),
                max_message_bytes=MAX_BODY_BYTES,
                refusals_noted=self.requests.refusals_noted,
            ),
            max_connections=min(config.max_grpc_connections or MAX_GRPC_CONNECTIONS, num_files // GRPC_PART),
        )
        known = self.requests, self.topology
        register(
            server,
            InferenceService(
                self.requests, self._journals, embedder=self.embedder, door=self.door, bodies=self._bodies
            ),
            ClusterService(*known, door=self.door, troubles=self.troubles, placements=self._placements),
        )
        return server

    def _watch(self) -> None:
        """Has the metrics read what these parts count."""
        self.metrics.watch_troubles(self.troubles, self.topology.presence)
        self.metrics.watch_pace(self.topology.pace)
        if not self.door.is_open:
            self.metrics.watch_tenants(self.door.knows_tenant)
        self.metrics.watch_store(self._store)
        self.metrics.watch_journals(lambda: self._journals.num_bytes)
        self.metrics.watch(HttpUse(self._http.connections, self._bodies))
        self.metrics.watch(BackgroundTaskMetrics(PROCESS_TASKS))

    def _http_api(self, door: FrontDoor) -> HttpApi:
        return HttpApi(
            self.requests,
            journals=self._journals,
            door=door,
            bodies=self._bodies,
            metrics=self.metrics,
            pages=self._pages,
        )

    def _guarded(self, app: App, *, bound_to: str) -> App:
        """The application of a port that web pages can reach."""
        config = self._config
        # A browser that was led here by another name does not take the certificate for that name's.
        given = config.allowed_hosts or (None if config.tls is None else "*")
        if config.trusted_proxies is not None:
            app = ClientAddresses(app, TrustedProxies(config.trusted_proxies))
        return BrowserGuard(
            app,
            Hosts(given, bound_to=bound_to),
            origins=(config.cors_origins or "").split(","),
            on_refusal=self.metrics.note_refusal,
        )

    def _app_of(self, key_digest: str) -> App:
        """The HTTP API for what was asked with the key of this digest before. It keeps nothing."""
        return self._http_api(KeyedDoor(self.door, key_digest)).app(embedder=self.embedder)

    def _check_model(self, key_digest: str, name: str | None) -> None:
        """Raises Unauthenticated, PermissionDenied or NotFound where the key's owner may not ask the model."""
        catalog = self.requests.catalog
        self.door.check_model(self.door.key_with(key_digest), catalog.name_of(name), asked=name)
        catalog.resolve(name)

    async def start(self) -> None:
        """Listens and begins to look for workers. Raises ConfigError where an address cannot be had."""
        config = self._config
        self.topology.start()  # before a client can ask: until the registry is read, requests wait
        if config.operator_port is not None:
            self.operator_port = self._grpc.listen(config.admin_host, config.operator_port, asks_for_certificate=True)
        self.grpc_port = await self._grpc.start(config.grpc_host, config.grpc_port)
        self.http_port = await self._http.start(config.http_host, config.http_port)
        if self._admin is not None and config.admin_port is not None:
            self.admin_port = await self._admin.start(config.admin_host, config.admin_port)
        if self._socket is not None and config.admin_socket is not None:
            await self._socket.start_on_socket(config.admin_socket)
        self.door.start()
        self._placements.start()
        self._journals.start()
        self._quarantine.start()
        self._prefixes.start()
        self.requests.start()
        self.batches.start()
        self.stored.background.start()
        self._storage.start()
        self._trouble_watch.start()
        self._feed.start(DecisionBoard(self._page_store))
        self._tasks = [
            supervise(self._follow_workers, name="workers", is_vital=True),
            supervise(self._tell_readiness, name="readiness"),
        ]
        await self._grpc.set_serving(True, CLUSTER_SERVICE)
        logger.info("listening", extra={"http_port": self.http_port, "grpc_port": self.grpc_port})

    async def stop(self) -> None:
        """Leaves without losing a request, as far as `drain_s` allows; callers that still wait then get an error.

        The gateway says at once that it is not ready. Load balancers notice that a moment later, so it serves
        everything as before for `linger_s`. Then it closes its HTTP port, which sends load balancers and clients
        elsewhere, and refuses new requests on open connections while the running ones end.
        """
        self._is_leaving = True
        leaving = Overloaded("the gateway is leaving", retry_after_s=LEAVING_RETRY_S)
        deadline = Deadline.after(self._config.drain_s)
        self._http.begin_to_leave()
        await self._grpc.set_serving(False)
        leaving_batches = asyncio.create_task(self.batches.close(timeout_s=min(LEAVE_S, self._config.drain_s)))
        await asyncio.sleep(min(self._config.linger_s, self._config.drain_s))
        await leaving_batches
        await self.stored.background.close()
        self._http.close_listener()
        # gRPC's listener stays until the end: the library closes it by cancelling the calls that are on their way,
        # which is no reason for clients to try again, as a refusal is.
        self.requests.refuse_new(leaving)
        if not await self.requests.wait_until_idle(timeout_s=deadline.remaining_s()):
            self.requests.end_all(leaving)
            self.embedder.end_all(leaving)
            await self.requests.wait_until_idle(timeout_s=ANSWER_S)
        await self._feed.close()
        servers = (self._http, self._admin, self._socket)
        await asyncio.gather(self._grpc.stop(1.0), *(server.stop(1.0) for server in servers if server is not None))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._journals.close()
        await self._storage.close()
        await self.requests.close()
        await self._trouble_watch.close()
        await self.topology.close()
        await self._placements.close()
        await self._quarantine.close()
        await self._prefixes.close()
        await self.door.close()
        await self._page_store.close()
        await self._batch_store.close()
        await self._store.close()

    def _told(self) -> Mapping[Kind, Mapping[str, Found]]:
        """What other parts know to be wrong."""
        key_file = self.door.key_file
        return {
            "background_task": failing_tasks(PROCESS_TASKS.failing()),
            "api_keys": unreadable_keys(key_file.error.message if key_file and key_file.error else ""),
            "circuit": circuits(self.requests.circuits().values(), self.requests.cut_pairs()),
            "hot_spot": hot_decodes(self.requests.rebalancer.hot_spots()),
            "link": slow_links(self.requests.slow_pairs()),
            "quarantine": quarantined(self._quarantine.count()),
        }

    def _note_complaints(self, complaints: Iterable[Complaint]) -> None:
        self.troubles.settle("storage", {one.subject: Found(one.what, one.advice) for one in complaints})

    async def _tell_readiness(self) -> None:
        """Keeps the health of the service that needs workers, which is the gateway's readiness."""
        was_ready: bool | None = None
        async with contextlib.aclosing(self.topology.changes(with_loads=False)) as changes:
            async for _ in changes:
                if self._is_leaving:
                    return
                if (is_ready := self.is_ready()) != was_ready:
                    was_ready = is_ready
                    await self._grpc.set_serving(is_ready, INFERENCE_SERVICE, rpc.READINESS)
                    service_manager.tell_status("serving" if is_ready else f"not ready: {NOT_READY}")

    async def _follow_workers(self) -> None:
        quiet_workers, take_renewals = self.topology.quiet_workers, self.topology.take_renewals
        watch = watch_workers(self._store, secrets=self._secrets, suspects=quiet_workers, on_renewals=take_renewals)
        async with contextlib.aclosing(watch) as memberships:
            async for membership in memberships:
                if not membership.is_stale:  # A restarted watch does not know the workers before Redis answers.
                    self._registered = membership.workers
                self.topology.take_membership(self._registered, is_stale=membership.is_stale)
                self._note_strangers(self._registered)

    def _note_strangers(self, workers: Iterable[WorkerRecord]) -> None:
        """Says once of each worker that its model is not served here: its --model-name may be a mistake."""
        strangers = {worker.incarnation: worker for worker in workers if worker.model not in self._min_prefill}
        for worker in map(strangers.__getitem__, strangers.keys() - self._strangers):
            logger.info("a worker has a model not served here", extra={"worker": worker.id, "model": worker.model})
        self._strangers = set(strangers)
