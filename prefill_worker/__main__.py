"""Entry point of a prefill worker with a fixed role."""

import services.runtime.first_process  # first: the imports below take seconds
import services.runtime.quiet_grpc  # noqa: F401 - before gRPC, which reads these variables when it is imported
import worker.extra  # noqa: F401 - before the modules that need its packages
from prefill_worker.role import PREFILL
from services.runtime import process
from worker.startup import run


def main() -> None:
    """Runs a prefill worker with the settings of the command line."""
    run(PREFILL)


if __name__ == "__main__":
    process.run(main)
