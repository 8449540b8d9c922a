"""`python -m gateway`: settings, telemetry and signals around one gateway."""

import gc
import sys

from gateway.config import GatewayConfig
from gateway.gateway import Gateway
from services.runtime import config, logs, process, rpc, telemetry
from services.runtime.tls import Identity


def main() -> None:
    """Runs a gateway until SIGTERM or SIGINT."""
    process.die_with_parent()
    settings = config.load(GatewayConfig, sys.argv[1:], prog="python -m gateway")
    logs.setup(settings.log_level, service="gateway")
    rpc.set_identity(None if settings.tls is None else Identity(settings.tls, roles=("gateway",)))
    telemetry.setup("gateway", settings.otlp, sample=settings.trace_sample)
    try:
        process.run_async(serve(settings))
    finally:
        telemetry.shutdown()


async def serve(settings: GatewayConfig) -> None:
    """Serves until a signal comes."""
    gateway = Gateway(settings)
    with process.stop_signals() as stop:
        await gateway.start()
        # What was made for good is not looked at again by every full collection, which would stall all streams.
        gc.collect()
        gc.freeze()
        try:
            await stop.wait()
        finally:
            await gateway.stop()


if __name__ == "__main__":
    process.run(main)
