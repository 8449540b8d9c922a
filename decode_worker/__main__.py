"""Starts a decode worker, which keeps its role."""

import services.runtime.first_process  # first: what comes after it takes seconds
import services.runtime.quiet_grpc  # noqa: F401 - before gRPC, which looks at what it sets when it is imported
import worker.extra  # noqa: F401 - before what needs its packages
from decode_worker.role import DECODE
from services.runtime import process
from worker.startup import run


def main() -> None:
    """Runs a decode worker with the settings of the command line."""
    run(DECODE)


if __name__ == "__main__":
    process.run(main)
