"""Starts a decode worker: settings, lease, model, server; it lives until it is told to leave or its engine fails."""

import asyncio
import contextlib
import gc
import logging
import sys

import services.runtime.quiet_grpc  # noqa: F401 - first: gRPC looks at what it sets when it is loaded
from decode_worker.config import DecodeWorkerConfig
from decode_worker.speculation import Speculator
from decode_worker.worker import DecodeWorker, Limits, Servicer
from kv_transfer.protocol.counters import Counters
from kv_transfer.receiving import LinkReceiver
from kv_transfer.sending import SendLinks
from kv_transfer.wire import SERVICE_NAME as LINK_SERVICE_NAME
from kv_transfer.wire import LinkIdentity
from protos import link_pb2_grpc, worker_pb2_grpc
from services.cluster.prefix_index import PrefixPublisher
from services.cluster.registry import WorkerLease, WorkerRecord, named_channels, new_incarnation
from services.engine.engine import EngineParts
from services.engine.rehearsal import load_rehearsed_engine
from services.engine.speculation.draft import load_draft
from services.runtime import config, process, rpc
from services.runtime.clock import SYSTEM_CLOCK, THREAD_CLOCK
from services.runtime.errors import ConfigError
from services.runtime.model_facts import read_model_facts
from services.structured.grammar import Grammars, grammar_library
from worker.gpu import GpuWatch, watch_gpu
from worker.host import channel_tls, held, load_or_stop, on_this_loop, run_service, serve_until_drained
from worker.metrics import WorkerMetrics

SERVICE_NAME = "tandem.v1.DecodeWorker"

MAX_DEFAULT_SWAP_BYTES = 1 << 30

logger = logging.getLogger(__name__)


def main() -> None:
    """Runs a decode worker with the settings of the command line."""
    settings = config.load(DecodeWorkerConfig, sys.argv[1:], prog="python -m decode_worker")
    run_service(settings, "decode-worker", serve)


async def serve(settings: DecodeWorkerConfig, stop: asyncio.Event) -> None:
    """Loads, serves and drains one worker."""
    incarnation = new_incarnation()
    with held(_lease(settings, incarnation, stop)) as lease, held(_publisher(settings, lease)) as publisher:
        await _serve(settings, incarnation, lease, publisher, stop)


async def _serve(
    settings: DecodeWorkerConfig,
    incarnation: str,
    lease: WorkerLease | None,
    publisher: PrefixPublisher | None,
    stop: asyncio.Event,
) -> None:
    parts = await load_or_stop(lambda: load_rehearsed_engine(**settings.engine_settings()), lease, stop)
    with contextlib.closing(parts), held(watch_gpu(parts.gpu_uuid)) as gpu:
        facts = await load_or_stop(lambda: read_model_facts(settings.model), lease, stop)
        identity = parts.identity(vocabulary=facts.vocabulary, grammars=grammar_library())
        speculator = await load_or_stop(lambda: _speculator(settings, parts), lease, stop)
        metrics = WorkerMetrics(worker_id=settings.id)
        worker, receiver = _worker(
            settings, incarnation, parts, identity.numerics, metrics, lease, publisher, gpu, speculator
        )
        metrics.serve(settings, worker.load)
        server = rpc.make_server([SERVICE_NAME, LINK_SERVICE_NAME], with_reflection=False, incarnation=incarnation)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(Servicer(worker.sessions), server.server)
        link_pb2_grpc.add_LinkServicer_to_server(receiver, server.server)
        address = settings.address(await server.start(settings.host, settings.port))
        if lease is not None:
            lease.update(
                address=address,
                max_running=settings.max_batch,
                facts=facts,
                **parts.record_fields(identity),
                **worker.load().record_fields(),
            )
        # What was loaded for good is not looked at again by every full collection, which would hold up a step.
        gc.collect()
        gc.freeze()
        logger.info("ready", extra={"address": address, "pages": parts.pool.num_pages})
        await serve_until_drained(worker, server, lease, stop, drain_timeout_s=settings.drain_timeout)


def _speculator(settings: DecodeWorkerConfig, parts: EngineParts) -> Speculator | None:
    if settings.speculative == "off":
        return None
    draft = None
    if settings.speculative != "ngram" and settings.draft_model is not None:
        draft = load_draft(
            settings.draft_model, parts, page_size=settings.page_size, memory_bytes=settings.draft_memory
        )
    computes_here = parts.model.device.type == "cpu" and parts.ranks is None
    return Speculator(
        clock=THREAD_CLOCK if computes_here else SYSTEM_CLOCK,
        uses_ngrams=settings.speculative != "draft",
        draft=draft,
        max_depth=settings.speculative_depth,
    )


def _swap_bytes(settings: DecodeWorkerConfig, parts: EngineParts) -> int:
    if settings.swap_memory is not None:
        return settings.swap_memory
    return min(parts.pool.num_pages * parts.pool.layout.page_bytes, MAX_DEFAULT_SWAP_BYTES)


def _lease(settings: DecodeWorkerConfig, incarnation: str, stop: asyncio.Event) -> WorkerLease | None:
    if settings.redis is None:
        return None
    leave = on_this_loop(lambda _: stop.set())
    record = WorkerRecord(role="decode", **settings.record_fields(incarnation=incarnation))
    lease = WorkerLease(
        settings.redis, cluster=settings.cluster, record=record, on_lost=leave, secrets=settings.secrets
    )
    lease.start()
    return lease


def _publisher(settings: DecodeWorkerConfig, lease: WorkerLease | None) -> PrefixPublisher | None:
    """Says which pages can be found here; from the start on, so that those of an earlier life are forgotten."""
    if settings.redis is None or lease is None:
        return None
    publisher = PrefixPublisher(settings.redis, cluster=settings.cluster, record=lease.record)
    publisher.start()
    return publisher


def _worker(
    settings: DecodeWorkerConfig,
    incarnation: str,
    parts: EngineParts,
    numerics: str,
    metrics: WorkerMetrics,
    lease: WorkerLease | None,
    publisher: PrefixPublisher | None,
    gpu: GpuWatch | None,
    speculator: Speculator | None,
) -> tuple[DecodeWorker, LinkReceiver]:
    max_admitted = settings.max_admitted or 2 * settings.max_batch
    identity = LinkIdentity(
        settings.id,
        incarnation,
        parts.fingerprint,
        parts.model.exact,
        arithmetic=numerics,
        tensor_parallel=parts.parallelism.tensor,
        pipeline_parallel=parts.parallelism.pipeline,
    )
    transports = (settings.transport,)
    counters = Counters()
    metrics.watch_faults(counters.snapshot)
    if parts.tier is not None:
        metrics.watch_host_tier(parts.tier.stats)
    if gpu is not None:
        metrics.watch_gpu(gpu.use)
    worker = DecodeWorker(
        parts=parts,
        links=SendLinks(
            identity=identity,
            pool=parts.pool,
            generations=parts.allocator,
            transports=transports,
            counters=counters,
            tls=channel_tls(settings),
            on_channels=None if lease is None else lambda channels: lease.update(channels=named_channels(channels)),
        ),
        incarnation=incarnation,
        limits=Limits(
            max_batch=settings.max_batch,
            max_admitted=max_admitted,
            chunk_tokens=settings.chunk_tokens,
            swap_bytes=_swap_bytes(settings, parts),
            is_optimistic=settings.admission == "expected",
        ),
        metrics=metrics,
        step_timeout_s=settings.step_timeout,
        gpu=None if gpu is None else gpu.message,
        grammars=Grammars(settings.model / "tokenizer.json", vocab_size=parts.model_config.vocab_size),
        on_pages_changed=None if publisher is None else publisher.note,
        speculator=speculator,
    )
    try:
        receiver = LinkReceiver(
            identity=identity,
            pool=parts.pool,
            generations=parts.allocator,
            target=worker,
            transports=transports,
            host=settings.host,
            port=settings.transfer_port,
            advertise_host=settings.advertise_host,
            advertise_port=settings.advertise_transfer_port,
            counters=counters,
            tls=channel_tls(settings),
        )
    except OSError as error:
        raise ConfigError(
            f"--transfer-port is {settings.transfer_port}, which cannot be listened on: {error}"
        ) from error
    worker.attach(receiver)
    return worker, receiver


if __name__ == "__main__":
    process.run(main)
