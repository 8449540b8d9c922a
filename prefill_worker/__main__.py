"""Starts a prefill worker."""

from functools import partial

import services.runtime.first_process  # first: what comes after it takes seconds
import services.runtime.quiet_grpc  # noqa: F401 - before gRPC, which looks at what it sets when it is imported
import worker.extra  # noqa: F401 - before what needs its packages
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.engine_loop import prefill_loop
from prefill_worker.worker import Limits, PrefillWorker, Servicer
from protos import worker_pb2_grpc
from services.engine.rehearsal import load_rehearsed_engine
from services.runtime import process
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.engines import VLLM
from worker.engine import PrefillEngine, PrefillReport
from worker.loading import Loaded
from worker.startup import Common, Made, Role, run
from worker.vllm.loading import VllmSettings, load_vllm

SERVICE_NAME = "tandem.v1.PrefillWorker"
MAX_PROMPTS = 64
"""Most prompts that vLLM computes in a step."""


def load(settings: PrefillWorkerConfig) -> Loaded[PrefillReport, PrefillEngine]:
    """Loads the model with the engine that the settings name."""
    if settings.engine == VLLM:
        model = load_vllm(VllmSettings.of(settings, max_batch=MAX_PROMPTS))
        return Loaded(model, partial(model.prefill_engine, clock=SYSTEM_CLOCK))
    parts = load_rehearsed_engine(**settings.engine_settings())
    return Loaded(parts, partial(prefill_loop, parts, chunk_tokens=settings.chunk_tokens, clock=SYSTEM_CLOCK))


def make(common: Common[PrefillWorkerConfig, PrefillReport, PrefillEngine]) -> Made:
    """The worker of a loaded model."""
    settings = common.settings
    worker = PrefillWorker(
        common.around(),
        common.facts,
        make_engine=common.make_engine,
        limits=Limits(chunk_tokens=settings.chunk_tokens, max_waiting=settings.max_waiting),
    )
    servicer = Servicer(worker.sessions)
    return Made(worker, [lambda server: worker_pb2_grpc.add_PrefillWorkerServicer_to_server(servicer, server)])


def main() -> None:
    """Runs a prefill worker with the settings of the command line."""
    run(Role("prefill", PrefillWorkerConfig, [SERVICE_NAME], load, make))


if __name__ == "__main__":
    process.run(main)
