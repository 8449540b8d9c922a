"""The settings of a decode worker; nothing but `services.runtime.config.load` reads the environment."""

from dataclasses import dataclass

from services.runtime.config import choice, integer, option, size_bytes
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
    admission: str = option(
        choice("expected", "worst_case"),
        default="expected",
        help="What a request is counted for when it asks for room: the pages that it is expected to need, as learned "
        "from answers that ended (sequences give way to others when that was too few), or those of its max_tokens.",
    )
    swap_memory: int | None = option(
        size_bytes(minimum=0),
        default=None,
        help="Host memory for pages of sequences that gave way, where copying them takes less time than computing them "
        "again. 0: they are always computed again. Not given: as much as the KV pool has, at most 1 GiB.",
    )
