"""The settings of a worker that changes its role: those of both roles, and which of them it has."""

from dataclasses import dataclass
from pathlib import Path

from decode_worker.config import DecodeWorkerConfig
from prefill_worker.config import PrefillWorkerConfig
from services.runtime.config import option
from services.runtime.engines import VLLM
from services.runtime.errors import ConfigError
from services.runtime.kinds import choice, path


@dataclass(frozen=True, kw_only=True)
class DualWorkerConfig(PrefillWorkerConfig, DecodeWorkerConfig):
    """A worker of either role, which changes it while it runs: its weights and its pages stay where they are."""

    role: str = option(choice("prefill", "decode"), help="What it is, unless --role-file says otherwise.")
    role_file: Path | None = option(
        path(),
        default=None,
        help="File with the word prefill or decode, which is looked at again and again: when it says so, the worker "
        "finishes or hands over what it has and changes its role. Not given, or no such file: it has its --role.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == VLLM:
            raise ConfigError(
                "--engine is vllm, which computes for one role only: start python -m prefill_worker or decode_worker"
            )
