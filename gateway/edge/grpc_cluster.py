"""The public gRPC service `Cluster`, for operators: the workers of the cluster, and what is changed in it by hand."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict

from msgspec import structs

from gateway.access.door import FrontDoor
from gateway.edge.grpc_context import Context, authenticate
from gateway.edge.pages import located, region_of
from gateway.requests.lifecycle import Requests
from gateway.requests.turns import TurnsState
from gateway.topology.member import Member
from gateway.topology.members import Topology
from gateway.topology.presence import Gone
from gateway.topology.troubles import Troubles
from protos import cluster_pb2, cluster_pb2_grpc
from services.cluster.placements import PlacementWriter
from services.runtime import rpc
from services.runtime.errors import InvalidRequest, PermissionDenied, Unauthenticated
from services.runtime.interceptor import caller_roles
from services.runtime.tls import OPERATOR
from services.runtime.worker_state import WorkerState
from services.scheduling.disaggregation import PREFILL_CHOICES, PrefillChoice
from services.scheduling.gpu_judgement import GpuState

CLUSTER_SERVICE = "tandem.v1.Cluster"
WATCH_INTERVAL_S = 0.5

logger = logging.getLogger(__name__)

_ROLES = {"prefill": cluster_pb2.WORKER_ROLE_PREFILL, "decode": cluster_pb2.WORKER_ROLE_DECODE}
_STATES = {state: cluster_pb2.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in WorkerState}
_GPU_STATES = {
    GpuState.OK: cluster_pb2.GPU_STATE_OK,
    GpuState.DEGRADED: cluster_pb2.GPU_STATE_DEGRADED,
    GpuState.OUT: cluster_pb2.GPU_STATE_OUT,
}
_PREFILL_CHOICES: "Mapping[PrefillChoice, cluster_pb2.PrefillChoice.ValueType]" = {
    "auto": cluster_pb2.PREFILL_CHOICE_AUTO,
    "local": cluster_pb2.PREFILL_CHOICE_LOCAL,
    "remote": cluster_pb2.PREFILL_CHOICE_REMOTE,
}


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """Shows operators the cluster, and takes workers out of it."""

    def __init__(
        self,
        requests: Requests,
        topology: Topology,
        *,
        door: FrontDoor,
        troubles: Troubles,
        placements: PlacementWriter,
    ) -> None:
        self._door = door
        self._troubles = troubles
        self._requests = requests
        self._topology = topology
        self._placements = placements

    async def GetTopology(self, request: cluster_pb2.GetTopologyRequest, context: Context) -> cluster_pb2.Topology:
        """Returns the topology now."""
        self._check_operator(context)
        return self._snapshot()

    async def WatchTopology(
        self, request: cluster_pb2.WatchTopologyRequest, context: Context
    ) -> AsyncGenerator[cluster_pb2.Topology, None]:
        """Yields the topology now and after each change, at most once in WATCH_INTERVAL_S."""
        self._check_operator(context)
        last: cluster_pb2.Topology | None = None
        async with contextlib.aclosing(self._topology.changes()) as changes:
            async for _ in changes:
                snapshot = self._snapshot()
                if snapshot != last:
                    last = snapshot
                    yield snapshot
                await asyncio.sleep(WATCH_INTERVAL_S)

    async def Drain(self, request: cluster_pb2.DrainRequest, context: Context) -> cluster_pb2.DrainResponse:
        """Takes a worker out of rotation."""
        self._check_operator(context)
        member = self._topology.drain(request.worker_id)
        return cluster_pb2.DrainResponse(state=_STATES[member.state])

    async def SetPrefill(
        self, request: cluster_pb2.SetPrefillRequest, context: Context
    ) -> cluster_pb2.SetPrefillResponse:
        """Chooses where prompts are computed from now on."""
        who = self._check_operator(context)
        chosen = next((name for name, value in _PREFILL_CHOICES.items() if value == request.choice), None)
        if chosen is None:
            raise InvalidRequest(f"choice must be one of {', '.join(PREFILL_CHOICES)}", field="choice")
        before, self._requests.prefill_choice = self._requests.prefill_choice, chosen
        logger.info("an operator chose where prompts are computed", extra={"who": who, "before": before, "now": chosen})
        return cluster_pb2.SetPrefillResponse(before=_PREFILL_CHOICES[before])

    async def Locate(self, request: cluster_pb2.LocateRequest, context: Context) -> cluster_pb2.Location:
        """Returns where a request is, whichever gateway takes care of it."""
        self._check_operator(context)
        placement = await located(self._placements, request.request_id)
        return cluster_pb2.Location(
            state=placement.shown_state,
            attempt=placement.attempt,
            gateway=placement.gateway,
            prefill_worker=placement.prefill_worker,
            decode_worker=placement.decode_worker,
            began_unix_s=placement.began_unix_ns / 1e9,
            prefill_region=region_of(self._topology, placement.prefill_worker),
            decode_region=region_of(self._topology, placement.decode_worker),
        )

    def _check_operator(self, context: Context) -> str:
        """Returns the caller's name for the log, or its tenant's.

        Raises Unauthenticated or PermissionDenied unless the caller has an operator's certificate or an admin's key.

        Where there are neither keys nor a CA, everybody is an operator.
        """
        identity, roles = rpc.identity(), caller_roles(context)
        if roles is not None:
            if OPERATOR not in roles:
                raise PermissionDenied(f"the caller's certificate does not have the role {OPERATOR}")
            return "a certificate"
        if identity is not None and identity.is_mutual and self._door.is_open:
            raise Unauthenticated(f"this needs a certificate with the role {OPERATOR}, shown at --operator-port")
        key = authenticate(self._door, context)
        self._door.check_admin(key)
        return key.name or key.tenant or "anybody"

    def _snapshot(self) -> cluster_pb2.Topology:
        counts = cluster_pb2.RequestCounts(queued=self._requests.num_queued, running=self._requests.num_running)
        return cluster_pb2.Topology(
            workers=map(_worker, self._topology.members()),
            requests=counts,
            troubles=(cluster_pb2.Trouble(**asdict(trouble)) for trouble in self._troubles.all()),
            gone=(_gone(gone) for gone in self._topology.presence.gone),
            prefill=_PREFILL_CHOICES[self._requests.prefill_choice],
            pools=(cluster_pb2.Pool(**structs.asdict(pool)) for pool in self._topology.pools),
            turns=_turns(self._requests.turns.state),
        )


def _worker(member: Member) -> cluster_pb2.Worker:
    record, load = member.record, member.load
    return cluster_pb2.Worker(
        id=record.id,
        role=_ROLES[record.role],
        pid=record.pid,
        host=record.host,
        address=record.address,
        incarnation=record.incarnation,
        state=_STATES[member.state],
        model=record.model,
        exact=member.is_exact,
        arithmetic=member.arithmetic,
        pages=cluster_pb2.PageCounts(
            total=load.pages_total,
            free=load.pages_free,
            cached=load.pages_cached,
            reserved=load.pages_reserved,
            used=load.pages_used,
        ),
        running=load.running,
        waiting=load.waiting,
        gpu=_gpu(member),
        tensor_parallel=record.tensor_parallel,
        pipeline_parallel=record.pipeline_parallel,
        left_out=member.left_out,
        identity=record.identity,
        pool=record.pool,
        region=record.region,
    )


def _turns(state: TurnsState) -> cluster_pb2.Turns:
    groups = (cluster_pb2.TurnGroup(**structs.asdict(group)) for group in state.groups)
    switch_s: dict[str, float] = {where: seconds for where, seconds in state.switch_s.items()}
    return cluster_pb2.Turns(models=state.models, groups=groups, switch_s=switch_s)


def _gone(gone: Gone) -> cluster_pb2.GoneWorker:
    worker = gone.worker
    return cluster_pb2.GoneWorker(
        id=worker.id,
        role=_ROLES[worker.role],
        model=worker.model,
        host=worker.host,
        address=worker.address,
        since_unix_s=gone.since_unix_s,
    )


def _gpu(member: Member) -> cluster_pb2.GpuHealth | None:
    if member.gpu_facts is None:
        return None
    gpu = member.gpu
    return cluster_pb2.GpuHealth(state=_GPU_STATES[gpu.state], weight=gpu.weight, reasons=gpu.reasons)
