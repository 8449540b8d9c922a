"""`python -m planning.autoscaler`: settings and signals around one autoscaler."""

import os
import socket
import sys
import time
from contextlib import closing

from planning.autoscaler.config import AutoscalerConfig
from planning.autoscaler.decisions import Begin, DecisionLog
from planning.autoscaler.gateways import Gateways
from planning.autoscaler.service import Service
from services.cluster.decision_board import DecisionBoard
from services.cluster.leadership import Leadership
from services.cluster.redis_store import Store
from services.runtime import config, logs, process, service_manager

WARM_S = 300.0
"""Decisions of an earlier life that are older than this say nothing of now."""


def main() -> None:
    """Runs an autoscaler until SIGTERM or SIGINT."""
    process.die_with_parent()
    settings = config.load(AutoscalerConfig, sys.argv[1:], prog="python -m planning.autoscaler")
    logs.setup(settings.log_level, service="autoscaler")
    process.run_async(serve(settings))


async def serve(settings: AutoscalerConfig) -> None:
    """Takes the log of decisions for this process, and decides."""
    begin = Begin(settings=settings.policy, targets=settings.targets)
    with closing(DecisionLog(settings.decisions, begin, since_s=time.time() - WARM_S)) as log:
        await decide(settings, log)


async def decide(settings: AutoscalerConfig, log: DecisionLog) -> None:
    """Decides until a signal comes, after what the log has of earlier lives."""
    gateways = Gateways(settings.gateways, settings.scaled_model, settings.api_key, settings.tls())
    store = None if settings.redis is None else Store(settings.redis, cluster=settings.cluster)
    leadership = None
    if store is not None:
        name = f"{socket.gethostname()[:40]}/{os.getpid()}/{os.urandom(4).hex()}"
        leadership = Leadership(store, store.keys.autoscaler, holder=name, ttl_s=settings.lease)
        await leadership.renew()
        leadership.start()
    service = Service(gateways, settings.make_actor(), log=log, targets=settings.targets, leadership=leadership)
    service.board = None if store is None else DecisionBoard(store)
    with process.stop_signals() as stop:
        service_manager.tell_ready("deciding")
        try:
            await service.run(stop)
        finally:
            if leadership is not None and store is not None:
                await leadership.close()
                await store.close()


if __name__ == "__main__":
    process.run(main)
