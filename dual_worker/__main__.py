"""Entry point of a worker that can change its role."""

import sys

import services.runtime.first_process  # first: the imports below take seconds
import services.runtime.quiet_grpc  # noqa: F401 - before gRPC, which reads these variables when it is imported
import worker.extra  # noqa: F401 - before the modules that need its packages
from decode_worker.role import DECODE
from dual_worker.config import DualWorkerConfig
from prefill_worker.role import PREFILL
from services.runtime import config, process
from worker.role import AnyRole
from worker.startup import run_lives


def main() -> None:
    """Runs a worker of either role with the settings of the command line."""
    settings = config.load(DualWorkerConfig, sys.argv[1:], prog="python -m dual_worker")
    roles: list[AnyRole] = [PREFILL, DECODE]
    if settings.role == DECODE.name:
        roles.reverse()
    run_lives(
        settings,
        roles,
        role_file=settings.role_file,
        other_models=settings.other_models,
        model_file=settings.model_file,
        max_asleep=settings.models_asleep,
    )


if __name__ == "__main__":
    process.run(main)
