"""Starts a prefill worker."""

import services.runtime.quiet_grpc  # noqa: F401 - first: gRPC looks at what it sets when it is imported
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.engine_loop import prefill_loop
from prefill_worker.worker import Limits, PrefillWorker, Servicer
from protos import worker_pb2_grpc
from services.runtime import process
from services.runtime.clock import SYSTEM_CLOCK
from worker.startup import Common, Made, Role, run

SERVICE_NAME = "tandem.v1.PrefillWorker"


async def make(common: Common[PrefillWorkerConfig]) -> Made:
    """The worker of a loaded model."""
    settings, parts = common.settings, common.parts
    worker = PrefillWorker(
        common.around(),
        common.facts,
        make_engine=lambda on_report: prefill_loop(
            parts, chunk_tokens=settings.chunk_tokens, clock=SYSTEM_CLOCK, on_report=on_report
        ),
        limits=Limits(chunk_tokens=settings.chunk_tokens, max_waiting=settings.max_waiting),
    )
    servicer = Servicer(worker.sessions)
    return Made(worker, [lambda server: worker_pb2_grpc.add_PrefillWorkerServicer_to_server(servicer, server)])


def main() -> None:
    """Runs a prefill worker with the settings of the command line."""
    run(Role("prefill", PrefillWorkerConfig, [SERVICE_NAME], make))


if __name__ == "__main__":
    process.run(main)
