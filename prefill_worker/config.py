"""The settings of a prefill worker; nothing but `services.runtime.config.load` reads the environment."""

from dataclasses import dataclass

from services.runtime.config import option
from services.runtime.kinds import integer
from worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PrefillWorkerConfig(WorkerConfig):
    """A prefill worker: computes prompts and streams their KV pages to decode workers."""

    max_waiting: int = option(
        integer(1), default=1024, help="Prompts that may wait for their turn; with one more, requests are refused."
    )
