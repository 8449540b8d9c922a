"""The settings of a decode worker; nothing but `services.runtime.config.load` reads the environment."""

from dataclasses import dataclass

from services.runtime.config import integer, option
from services.runtime.worker_config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class DecodeWorkerConfig(WorkerConfig):
    """A decode worker: takes KV pages in and generates tokens for all its requests at once."""

    max_batch: int = option(integer(1, 4096), default=64, help="Most sequences that one step computes.")
    max_admitted: int | None = option(
        integer(1),
        default=None,
        help="Requests that may hold or await a place in the batch; with one more, requests are refused. "
        "Not given: twice --max-batch.",
    )
