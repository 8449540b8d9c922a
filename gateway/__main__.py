"""`python -m gateway`: settings, telemetry and signals around one gateway."""

import gc
import sys

import services.runtime.first_process  # first: what comes after it takes seconds
import services.runtime.quiet_grpc  # noqa: F401 - before gRPC, which looks at what it sets when it is loaded
from gateway.assembly import Gateway
from gateway.config import GatewayConfig
from services.hub.models import with_local_model
from services.runtime import config, heap, logs, process, rpc, service_manager, telemetry
from services.runtime.membership import Member
from services.runtime.tls import Identity

COLLECT_AFTER = (10_000, 100, 10)
"""New objects, and collections of these, before the collector looks at them. With Python's 700, 10 and 10 it takes a
tenth of a busy gateway's time, mostly to find that requests under way are still in use. A collection
after 50,000 new objects took up to 146 ms of CPU time in a cluster of 4,000 workers. A pause may take at most 50 ms."""


def main() -> None:
    """Runs a gateway until SIGTERM or SIGINT."""
    process.die_with_parent()
    settings = with_local_model(config.load(GatewayConfig, sys.argv[1:], prog="python -m gateway"))
    logs.setup(settings.log_level, service="gateway")
    process.be_nice(settings.nice)
    heap.give_back_free_memory()
    rpc.set_identity(None if settings.tls is None else Identity(settings.tls, roles=("gateway",)))
    if settings.secrets is not None:
        rpc.set_member(Member(settings.secrets, "gateway"))
    telemetry.setup("gateway", settings.otlp, sample=settings.trace_sample)
    try:
        process.run_async(serve(settings))
    finally:
        telemetry.shutdown()


async def serve(settings: GatewayConfig) -> None:
    """Serves until a signal comes."""
    gateway = Gateway(settings, secrets=settings.secrets)
    with process.stop_signals() as stop:
        await gateway.start()
        # What was made for good is not looked at again by every full collection, which would stall all streams.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        service_manager.tell_ready("listening")
        try:
            await stop.wait()
        finally:
            await gateway.stop()


if __name__ == "__main__":
    process.run(main)
