"""The parts of a decode worker: its engine and the components around it."""

from collections.abc import Callable
from functools import partial

from decode_worker.config import DecodeWorkerConfig
from decode_worker.engine_loop import decode_loop
from decode_worker.features import StepFeature
from decode_worker.mask_pace import PacedMasks
from decode_worker.speculation import Speculation, Speculator
from decode_worker.worker import DecodeWorker, Limits, Servicer
from kv_transfer.prefixes import SERVICE_NAME as PREFIXES_SERVICE_NAME
from kv_transfer.wire import SERVICE_NAME as LINK_SERVICE_NAME
from protos import link_pb2_grpc, worker_pb2_grpc
from services.engine.engine import EngineParts
from services.engine.model import EngineWeights
from services.engine.rehearsal import load_rehearsed_engine
from services.engine.speculation.draft import load_draft
from services.runtime.clock import SYSTEM_CLOCK, THREAD_CLOCK
from services.runtime.engines import VLLM
from worker.engine import DecodeEngine, DecodeReport
from worker.loading import LoadedModel
from worker.role import Common, Made, Role
from worker.vllm.loading import VllmModel, VllmSettings, load_vllm

SERVICE_NAME = "tandem.v1.DecodeWorker"
MAX_DEFAULT_SWAP_BYTES = 1 << 30


def load(settings: DecodeWorkerConfig, kept: EngineWeights | None = None) -> LoadedModel:
    """Loads the model with the configured engine. Reuses the weights in `kept` if given."""
    if settings.engine == VLLM:
        return load_vllm(VllmSettings.of(settings, max_batch=settings.max_batch))
    return load_rehearsed_engine(kept=kept, **settings.engine_settings())


def engine(
    settings: DecodeWorkerConfig, model: EngineParts | VllmModel
) -> Callable[[Callable[[DecodeReport], None]], DecodeEngine]:
    """Returns a factory for the engine of a loaded model. The native engine includes speculation if configured."""
    if isinstance(model, VllmModel):
        return partial(model.decode_engine, clock=SYSTEM_CLOCK)
    features: list[StepFeature] = [PacedMasks()]
    speculator = _speculator(settings, model)
    if speculator is not None:
        features.append(Speculation(speculator))
    return partial(
        decode_loop,
        model,
        max_batch=settings.max_batch,
        chunk_tokens=settings.chunk_tokens,
        swap_bytes=_swap_bytes(settings, model),
        clock=SYSTEM_CLOCK,
        features=features,
    )


def make(common: Common[DecodeWorkerConfig, DecodeReport, DecodeEngine]) -> Made:
    """Returns the worker of a loaded model and the services that receive pages for it."""
    settings = common.settings
    worker = DecodeWorker(
        common.around(),
        common.facts,
        make_engine=common.make_engine,
        limits=Limits(
            max_admitted=settings.max_admitted or _max_admitted(settings),
            is_optimistic=settings.admission == "expected",
        ),
    )
    receiver = common.receiver(worker.arrivals)
    worker.arrivals.attach(receiver)
    servicer, giver = Servicer(worker.sessions), worker.prefix_giver()
    add_services = (
        lambda server: worker_pb2_grpc.add_DecodeWorkerServicer_to_server(servicer, server),
        lambda server: link_pb2_grpc.add_LinkServicer_to_server(receiver, server),
        lambda server: link_pb2_grpc.add_PrefixesServicer_to_server(giver, server),
    )
    said = {"max_running": settings.max_batch, "pulls": worker.prefixes is not None}
    return Made(worker, add_services, record_fields={**said, "transfer_address": receiver.network_address})


def _max_admitted(settings: DecodeWorkerConfig) -> int:
    # vLLM allocates no blocks for a request while its batch is full. With a higher limit, requests whose prompt was
    # computed elsewhere would wait here.
    return settings.max_batch if settings.engine == VLLM else 2 * settings.max_batch


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


SERVICES = (SERVICE_NAME, LINK_SERVICE_NAME, PREFIXES_SERVICE_NAME)
DECODE = Role("decode", DecodeWorkerConfig, SERVICES, load, engine, make)
