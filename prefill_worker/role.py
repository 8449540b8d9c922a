"""The parts of a prefill worker: its engine and the components around it."""

from collections.abc import Callable
from functools import partial

from kv_transfer.prefixes import SERVICE_NAME as PREFIXES_SERVICE_NAME
from kv_transfer.wire import SERVICE_NAME as LINK_SERVICE_NAME
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.engine_loop import prefill_loop
from prefill_worker.worker import Limits, PrefillWorker, Servicer
from protos import link_pb2_grpc, worker_pb2_grpc
from services.engine.engine import EngineParts
from services.engine.model import EngineWeights
from services.engine.rehearsal import load_rehearsed_engine
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.engines import VLLM
from worker.engine import PrefillEngine, PrefillReport
from worker.loading import LoadedModel
from worker.role import Common, Made, Role
from worker.vllm.loading import VllmModel, VllmSettings, load_vllm

SERVICE_NAME = "tandem.v1.PrefillWorker"
MAX_PROMPTS = 64
"""Maximum number of prompts in a vLLM step."""


def load(settings: PrefillWorkerConfig, kept: EngineWeights | None = None) -> LoadedModel:
    """Loads the model with the configured engine. Reuses the weights in `kept` if given."""
    if settings.engine == VLLM:
        return load_vllm(VllmSettings.of(settings, max_batch=MAX_PROMPTS))
    return load_rehearsed_engine(kept=kept, **settings.engine_settings())


def engine(
    settings: PrefillWorkerConfig, model: EngineParts | VllmModel
) -> Callable[[Callable[[PrefillReport], None]], PrefillEngine]:
    """Returns a factory for the engine of a loaded model."""
    if isinstance(model, VllmModel):
        return partial(model.prefill_engine, clock=SYSTEM_CLOCK)
    return partial(prefill_loop, model, chunk_tokens=settings.chunk_tokens, clock=SYSTEM_CLOCK)


def make(common: Common[PrefillWorkerConfig, PrefillReport, PrefillEngine]) -> Made:
    """Returns the worker of a loaded model and its services."""
    settings = common.settings
    worker = PrefillWorker(
        common.around(),
        common.facts,
        make_engine=common.make_engine,
        limits=Limits(chunk_tokens=settings.chunk_tokens, max_waiting=settings.max_waiting),
    )
    receiver = common.receiver(worker.pulls)
    worker.pulls.attach(receiver)
    servicer, giver = Servicer(worker.sessions), worker.prefix_giver()
    add_services = (
        lambda server: worker_pb2_grpc.add_PrefillWorkerServicer_to_server(servicer, server),
        lambda server: link_pb2_grpc.add_LinkServicer_to_server(receiver, server),
        lambda server: link_pb2_grpc.add_PrefixesServicer_to_server(giver, server),
    )
    said = {"pulls": worker.prefixes is not None, "embeds": common.facts.embeds}
    return Made(worker, add_services, record_fields={**said, "transfer_address": receiver.network_address})


SERVICES = (SERVICE_NAME, LINK_SERVICE_NAME, PREFIXES_SERVICE_NAME)
PREFILL = Role("prefill", PrefillWorkerConfig, SERVICES, load, engine, make)
