"""Pages over HTTP that generate nothing: models, probes, metrics, the cluster, and the dashboard's."""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from gateway.access.door import FrontDoor
from gateway.access.keys import ApiKey
from gateway.dashboard.pages import Dashboard
from gateway.edge.health import HealthPages
from gateway.limits import MAX_NAME_CHARS
from gateway.models.catalog import ServedModel
from gateway.observability.metrics import Metrics, content_type_of
from gateway.requests.lifecycle import Requests
from gateway.topology.member import Member
from gateway.topology.members import Topology
from gateway.topology.presence import Gone
from gateway.topology.troubles import Troubles
from gateway.topology.watch import CircuitReport
from services.cluster.placements import Placement, PlacementWriter
from services.cluster.redis_store import Store
from services.runtime.background_tasks import PROCESS_TASKS
from services.runtime.errors import NotFound
from services.runtime.identity import identity_fields
from services.runtime.version import version
from services.runtime.worker_state import WorkerState

OPEN_PATHS = frozenset({"/health", "/ready"})
"""The probes' pages, which need no key."""


class ApiPages:
    """What any key may read: the models that it allows, and the description of the API."""

    def __init__(self, requests: Requests, door: FrontDoor) -> None:
        self._requests = requests
        self._door = door
        self._created_unix_s = int(time.time())

    def routes(self) -> list[BaseRoute]:
        """Returns the pages' routes. Each finds the caller's key in the request's state."""
        return [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/openapi.json", self._show_document),
            Route("/version", self._show_version),
            Route("/tokenizer_info", self._show_tokenizer),
        ]

    async def _list_models(self, request: Request) -> Response:
        key: ApiKey = request.state.key
        names = self._requests.catalog.names()
        data = [self._model(name, model) for name, model in names if key.allows_model(model.name)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        # Anthropic's clients read the page's ends, OpenAI's the kind of object.
        return json_response({"object": "list", "data": data, "has_more": False, **ends})

    async def _show_model(self, request: Request) -> Response:
        name, catalog = request.path_params["name"], self._requests.catalog
        self._door.check_model(request.state.key, catalog.name_of(name), asked=name)
        return json_response(self._model(name, catalog.resolve(name)))

    def _model(self, name: str, model: ServedModel) -> dict[str, Any]:
        """Returns a model under one of its names; `root` is its own, `parent` that of what an adapter changes."""
        state = self._requests.turns.state_of(model.name)
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self._created_unix_s,
            "created_at": datetime.fromtimestamp(self._created_unix_s, UTC).isoformat(),
            "owned_by": "tandem",
            "root": model.name,
            "parent": model.name if name in model.adapters else None,
            "max_model_len": self._requests.limits(model).context_length_tokens,
            "sampling_defaults": model.sampling_defaults,
            **({} if state is None else {"state": state}),
        }

    async def _show_version(self, request: Request) -> Response:
        return json_response({"version": version()})

    async def _show_tokenizer(self, request: Request) -> Response:
        name, catalog = request.query_params.get("model"), self._requests.catalog
        self._door.check_model(request.state.key, catalog.name_of(name), asked=name)
        return json_response(catalog.resolve(name).tokenizer.described())

    async def _show_document(self, request: Request) -> Response:
        from gateway.openapi.document import document_bytes  # only where it is asked for: it takes a while to import

        return Response(document_bytes(asks_for_keys=not self._door.is_open), media_type="application/json")


class ClusterPage:
    """What /cluster shows: the workers, what is wrong with them, and what waits and runs."""

    def __init__(
        self, requests: Requests, topology: Topology, *, store: Store, troubles: Troubles, placements: PlacementWriter
    ) -> None:
        self._requests = requests
        self._topology = topology
        self._store = store
        self._troubles = troubles
        self._placements = placements

    async def place(self, request_id: str) -> dict[str, Any]:
        """Returns where a request is, as a JSON object. Raises NotFound or StoreUnavailable."""
        placement = await located(self._placements, request_id)
        return {
            "id": placement.request_id,
            "state": placement.shown_state,
            "last_state": placement.state,
            "attempt": placement.attempt,
            "gateway": placement.gateway,
            "prefill_worker": placement.prefill_worker,
            "decode_worker": placement.decode_worker,
            "regions": {
                "prefill": region_of(self._topology, placement.prefill_worker),
                "decode": region_of(self._topology, placement.decode_worker),
            },
            "began_unix_s": placement.began_unix_ns / 1e9,
        }

    def document(self) -> dict[str, Any]:
        """Returns the page as a JSON object."""
        requests, topology, store = self._requests, self._topology, self._store
        circuits = requests.circuits()
        return {
            "workers": [_worker_json(member, circuits.get(member.record.id)) for member in topology.members()],
            "cut_pairs": [dataclasses.asdict(pair) for pair in requests.cut_pairs()],
            "version": version(),
            "requests": {"queued": requests.num_queued, "running": requests.num_running},
            "prefill": requests.prefill_choice,
            "pools": list(topology.pools),
            "rebalancing": requests.rebalancer.state,
            "turns": requests.turns.state,
            "redis": {
                "available": store.is_up,
                "round_trip_s": round(store.round_trip.waited_s, 6),
                "last_failure": store.last_failure,
            },
            "expected": topology.presence.expected,
            "gone": [_gone_json(gone) for gone in topology.presence.gone],
            "troubles": self._troubles.all(),
            "failing_tasks": PROCESS_TASKS.failing(),
            "bottlenecks": requests.bottlenecks.told(),
        }


class OperatorPages:
    """Pages of probes and operators. `port` says where the API is served."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        topology: Topology,
        cluster: ClusterPage,
        dashboard: Dashboard,
        health: HealthPages,
        port: Callable[[], int],
    ) -> None:
        self._metrics = metrics
        self._topology = topology
        self._cluster = cluster
        self._dashboard = dashboard
        self._health = health
        self._port = port

    def is_open(self, scope: Scope) -> bool:
        """Returns whether a request asks for a page that says nothing about a cluster, so that it needs no key."""
        path: str = scope["path"]
        return (path in OPEN_PATHS and not _is_verbose(scope)) or self._dashboard.is_open(path)

    def routes(self, *, has_api: bool) -> list[BaseRoute]:
        """Returns the pages' routes. `has_api`: the API is served beside them, at the same address."""
        return [
            Route("/health", self._show_health),
            Route("/ready", self._show_readiness),
            Route("/metrics", self._show_metrics),
            Route("/metrics/targets", self._list_targets),
            Route("/cluster", self._show_cluster),
            Route("/cluster/requests/{name}", self._locate),
            *self._dashboard.routes(api_port=self._port, has_api=has_api),
        ]

    async def _show_health(self, request: Request) -> Response:
        return json_response(self._health.report() if _is_verbose(request.scope) else {"status": "alive"})

    async def _show_readiness(self, request: Request) -> Response:
        is_ready = self._health.is_ready()
        return json_response({"status": "ready" if is_ready else "not ready"}, http_status=200 if is_ready else 503)

    async def _show_metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        page = self._metrics.render(self._topology.members(), accept=accept)
        return Response(page, media_type=content_type_of(accept))

    async def _list_targets(self, request: Request) -> Response:
        return json_response(scrape_targets(self._topology.members()))

    async def _show_cluster(self, request: Request) -> Response:
        return json_response(self._cluster.document())

    async def _locate(self, request: Request) -> Response:
        return json_response(await self._cluster.place(request.path_params["name"]))


def _is_verbose(scope: Scope) -> bool:
    """Returns whether the checks are asked for: `?verbose`, with any value but 0 or false."""
    given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True).get("verbose", ["false"])
    return given[-1].lower() not in ("0", "false")


async def located(placements: PlacementWriter, request_id: str) -> Placement:
    """Returns where a request is, by its id or by that of its answer. Raises NotFound or StoreUnavailable."""
    name, placement = request_id[: MAX_NAME_CHARS + 1], None
    for known in dict.fromkeys((name, re.sub("^((chat)?cmpl-|resp_|msg_)", "", name))):
        if placement is None and len(name) <= MAX_NAME_CHARS:
            placement = await placements.find(known)
    if placement is None:
        raise NotFound(f"no request {name} runs, and none has ended within the last minute", code="request_not_found")
    return placement


def region_of(topology: Topology, worker_id: str) -> str:
    """Returns where a worker runs; empty where it is not known, or in no region."""
    member = topology.member(worker_id)
    return "" if member is None else member.record.region


def json_response(value: Any, *, http_status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a JSON document as an answer."""
    return Response(msgspec.json.encode(value), http_status, headers, media_type="application/json")


def scrape_targets(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Returns the workers that serve metrics, as Prometheus' HTTP service discovery reads them.

    A worker's own series have its id as the label `worker`; what they do not say becomes a label of the target.
    """
    return [
        {"targets": [record.metrics_address], "labels": {"role": record.role, "model": record.model}}
        for record in (member.record for member in members)
        if record.metrics_address
    ]


def _worker_json(member: Member, circuit: CircuitReport | None) -> dict[str, Any]:
    record, load, obstacle = member.record, member.load, member.obstacle
    return {
        "id": record.id,
        "role": record.role,
        "pid": record.pid,
        "host": record.host,
        "region": record.region,
        "address": record.address,
        "transfer_address": record.transfer_address,
        "incarnation": record.incarnation,
        "state": member.state,
        "model": record.model,
        "pool": record.pool,
        "exact": member.is_exact,
        "arithmetic": member.arithmetic,
        "identity": identity_fields(record.identity),
        "left_out": member.left_out,
        "unreachable": obstacle.cause if obstacle is not None and member.state is WorkerState.LOST else "",
        "layout": record.layout_fingerprint,
        "tensor_parallel": record.tensor_parallel,
        "pipeline_parallel": record.pipeline_parallel,
        "version": record.version,
        "clock_ahead_s": load.clock_ahead_s,
        "channels": record.channels,
        "pages": {
            "total": load.pages_total,
            "free": load.pages_free,
            "cached": load.pages_cached,
            "reserved": load.pages_reserved,
            "used": load.pages_used,
        },
        "page_tokens": record.page_size,
        "kv_bytes_per_token": record.kv_bytes_per_token,
        "running": load.running,
        "max_running": record.max_running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "speed": {
            "prefill": None if load.prefill_speed is None else dataclasses.asdict(load.prefill_speed),
            "decode": None if load.decode_speed is None else dataclasses.asdict(load.decode_speed),
        },
        "gpu": _gpu_json(member),
        "circuit": None if circuit is None else circuit.as_json(),
        "counts": None if member.session.counts is None else member.session.counts.as_json(),
    }


def _gone_json(gone: Gone) -> dict[str, Any]:
    worker = gone.worker
    return {
        "id": worker.id,
        "role": worker.role,
        "model": worker.model,
        "host": worker.host,
        "address": worker.address,
        "since_unix_s": gone.since_unix_s,
    }


def _gpu_json(member: Member) -> dict[str, Any] | None:
    if member.gpu_facts is None:
        return None
    gpu = member.gpu
    return {"state": gpu.state.value, "weight": gpu.weight, "reasons": gpu.reasons}
