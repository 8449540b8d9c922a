"""Starts a prefill worker."""

import services.runtime.quiet_grpc  # noqa: F401 - first: gRPC looks at what it sets when it is imported
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.worker import Limits, PrefillWorker, Servicer
from protos import worker_pb2_grpc
from services.runtime import process
from worker.startup import Common, Made, Role, run

SERVICE_NAME = "tandem.v1.PrefillWorker"


async def make(common: Common[PrefillWorkerConfig]) -> Made:
    """The worker of a loaded model."""
    settings, gpu, publisher = common.settings, common.gpu, common.publisher
    worker = PrefillWorker(
        parts=common.parts,
        links=common.send_links(),
        incarnation=common.incarnation,
        limits=Limits(chunk_tokens=settings.chunk_tokens, max_waiting=settings.max_waiting),
        metrics=common.metrics,
        step_timeout_s=settings.step_timeout,
        gpu=None if gpu is None else gpu.message,
        grammars=common.grammars(),
        on_pages_changed=None if publisher is None else publisher.note,
    )
    servicer = Servicer(worker.sessions)
    return Made(worker, [lambda server: worker_pb2_grpc.add_PrefillWorkerServicer_to_server(servicer, server)])


def main() -> None:
    """Runs a prefill worker with the settings of the command line."""
    run(Role("prefill", PrefillWorkerConfig, [SERVICE_NAME], make))


if __name__ == "__main__":
    process.run(main)
