"""What a worker reports of itself: load, GPU, links. Numbers with which no policy can calculate are dropped."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from protos import cluster_pb2, worker_pb2
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.gpu_facts import GpuFacts
from services.scheduling.links import MAX_PEERS, PeerLink, PeerLinks
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's load as it reported it last. Pages are counts; `waiting_tokens` wait for computation."""

    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_reserved: int = 0
    pages_used: int = 0
    pages_promised: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    pages_promised_by_class: tuple[int, ...] = ()
    """By service class from 0 on: pages that its requests are expected to need, including those they have."""
    running_by_class: tuple[int, ...] = ()
    """By service class from 0 on: requests that it has taken, begun or not."""
    num_preempted: int = 0
    """Preemptions of sequences since the worker started."""
    context_tokens: int = 0
    """Context length of its batch: the tokens of all its sequences."""
    prefill_speed: PrefillSpeed | None = None
    """Its speed with prompts; None, like the other speeds, until it has measured something."""
    decode_speed: DecodeSpeed | None = None
    link_speed: LinkSpeed | None = None
    is_draining: bool = False
    clock_ahead_s: float | None = None
    """Its clock's lead over this machine's when it reported, less the time the message took; None: unknown."""


def read_load(load: worker_pb2.WorkerLoad) -> WorkerLoad:
    """Returns the load that a message reports."""
    pages = load.pages
    return WorkerLoad(
        pages_total=pages.total,
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_reserved=pages.reserved,
        pages_used=pages.used,
        pages_promised=load.promised_pages,
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        pages_promised_by_class=tuple(load.promised_pages_by_class),
        running_by_class=tuple(load.running_by_class),
        num_preempted=load.num_preempted,
        context_tokens=load.context_tokens,
        prefill_speed=_read_prefill_speed(load),
        decode_speed=_read_decode_speed(load),
        link_speed=_read_link_speed(load),
        is_draining=load.state == cluster_pb2.WORKER_STATE_DRAINING,
        clock_ahead_s=load.unix_ms / 1e3 - SYSTEM_CLOCK.unix_ns() / 1e9 if load.unix_ms else None,
    )


def _read_prefill_speed(load: worker_pb2.WorkerLoad) -> PrefillSpeed | None:
    speed = load.prefill_speed
    numbers = (speed.overhead_s, speed.s_per_token, speed.s_per_token_squared)
    return PrefillSpeed(*numbers) if load.HasField("prefill_speed") and _are_sane(numbers) else None


def _read_decode_speed(load: worker_pb2.WorkerLoad) -> DecodeSpeed | None:
    speed = load.decode_speed
    numbers = (speed.overhead_s, speed.s_per_sequence, speed.s_per_context_token)
    return DecodeSpeed(*numbers) if load.HasField("decode_speed") and _are_sane(numbers) else None


def _read_link_speed(load: worker_pb2.WorkerLoad) -> LinkSpeed | None:
    numbers = (load.link_speed.latency_s, load.link_speed.bytes_per_s)
    return LinkSpeed(*numbers) if load.HasField("link_speed") and _are_sane(numbers) and numbers[1] > 0 else None


def read_links(before: PeerLinks, told: Iterable[worker_pb2.PeerLink]) -> PeerLinks:
    """Returns the links of `before`, updated with those of a message; at most MAX_PEERS, the newest."""
    links: dict[str, PeerLink] = dict(before)
    for link in told:
        numbers = (link.speed.latency_s, link.speed.bytes_per_s)
        if link.HasField("speed") and _are_sane(numbers) and numbers[1] > 0:
            links.pop(link.worker_id, None)  # the newest report is the last to be forgotten
            links[link.worker_id] = PeerLink(*numbers, link.underway_bytes)
    for worker_id in list(links)[: max(0, len(links) - MAX_PEERS)]:
        del links[worker_id]
    return PeerLinks(links)


def read_gpu(gpu: worker_pb2.GpuFacts) -> GpuFacts:
    """Returns the facts of a worker's GPU; what it does not report is None."""
    said: dict[str, Any] = {field.name: value for field, value in gpu.ListFields()}
    temperatures = {
        name: said[name] for name in ("temperature_c", "slowdown_c") if name in said and math.isfinite(said[name])
    }
    return GpuFacts(
        **temperatures,
        num_uncorrected=said.get("num_uncorrected"),
        is_remap_pending=said.get("is_remap_pending"),
        has_remap_failed=said.get("has_remap_failed"),
        throttle_reasons=frozenset(gpu.throttle_reasons),
        free_bytes=said.get("free_bytes"),
        total_bytes=said.get("total_bytes"),
        xids=frozenset(gpu.xids),
        is_lost=gpu.is_lost,
    )


def _are_sane(numbers: tuple[float, ...]) -> bool:
    """Whether a policy can calculate with these numbers: a worker's report is not trusted."""
    return all(math.isfinite(number) and number >= 0 for number in numbers)
