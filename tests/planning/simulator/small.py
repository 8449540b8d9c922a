"""Small clusters and traces."""

from collections.abc import Sequence

from planning.simulator.cluster import ClusterSpec
from planning.simulator.jobs import FCFS, WorkerSpec
from planning.simulator.laws import LinearLaw
from planning.simulator.traces import Trace, TraceRequest
from services.scheduling.disaggregation import DisaggregationSettings
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed
from services.scheduling.routing.price import RoutingSettings

PREFILL = PrefillSpeed(0.01, 1e-4, 1e-9)
DECODE = DecodeSpeed(0.01, 1e-4, 1e-7)


def worker_spec(
    *,
    num_pages: int = 10_000,
    page_size: int = 16,
    prefill: PrefillSpeed = PREFILL,
    decode: DecodeSpeed = DECODE,
    chunk_tokens: int = 10**9,
    max_batch: int = 256,
    eviction: str = "lru-leaf-first",
    link: LinkSpeed | None = None,
    chunking: str = FCFS,
) -> WorkerSpec:
    return WorkerSpec(
        num_pages=num_pages,
        page_size=page_size,
        law=LinearLaw(prefill, decode, decode),
        link=link or LinkSpeed(0.001, 1e9),
        kv_bytes_per_token=1000,
        chunk_tokens=chunk_tokens,
        max_batch=max_batch,
        chunking=chunking,
        eviction=eviction,
    )


def cluster_spec(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    prefill: WorkerSpec | None = None,
    decode: WorkerSpec | None = None,
    local_prefill_tokens: int | None = 0,
    max_waiting: int = 100_000,
    max_queue_wait_s: float = float("inf"),
    queue_strategy: str = "fcfs",
) -> ClusterSpec:
    return ClusterSpec(
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill=prefill or worker_spec(),
        decode=decode or worker_spec(),
        max_sequence_tokens=1_000_000,
        max_waiting=max_waiting,
        max_queue_wait_s=max_queue_wait_s,
        queue_strategy=queue_strategy,
        routing=RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=local_prefill_tokens)),
    )


def trace_of(requests: Sequence[TraceRequest], block_tokens: int = 0) -> Trace:
    return Trace("test", "csv", block_tokens, tuple(sorted(requests, key=lambda request: request.arrival_s)))
