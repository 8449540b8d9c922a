"""The settings of a worker that changes its role or its model: those of both roles, and which it has."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_worker.config import DecodeWorkerConfig
from prefill_worker.config import PrefillWorkerConfig
from services.runtime.adapters import folders_by_name
from services.runtime.config import option
from services.runtime.engines import VLLM
from services.runtime.errors import ConfigError
from services.runtime.kinds import choice, integer, path


@dataclass(frozen=True, kw_only=True)
class DualWorkerConfig(PrefillWorkerConfig, DecodeWorkerConfig):
    """A worker of either role, which changes it while it runs: its weights and its pages stay where they are.

    It may also have one of several models at a time, which changes while it runs.
    """

    role: str = option(choice("prefill", "decode"), help="What it is, unless --role-file says otherwise.")
    role_file: Path | None = option(
        path(),
        default=None,
        help="File with the word prefill or decode, which is looked at again and again: when it says so, the worker "
        "finishes or hands over what it has and changes its role. Not given, or no such file: it has its --role.",
    )

    other_models: Mapping[str, Path] | None = option(
        folders_by_name(),
        default=None,
        help="Models that it can have instead of --model: what each is called in the cluster, and its folder.",
    )
    model_file: Path | None = option(
        path(),
        default=None,
        help="File with the name of the model that it is to have, which is looked at again and again. Workers with the "
        "same file change their model together. Not given, or no such file: it has its --model.",
    )
    models_asleep: int = option(
        integer(0, 64),
        default=1,
        help="Models whose weights stay in memory beside those of the present one; others are read from disk again. On "
        "a GPU none stay.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.other_models and self.draft_model is not None:
            raise ConfigError("--other-models and --draft-model are both given; a draft is of one model")
        if self.other_models and self.model_file is None:
            raise ConfigError("--other-models is given without --model-file, which says when it is to have one of them")
        if self.engine == VLLM:
            raise ConfigError(
                "--engine is vllm, which computes for one role only: start python -m prefill_worker or decode_worker"
            )

    def record_fields(self, *, incarnation: str) -> dict[str, Any]:
        """What is known of the worker before its model is loaded, as fields of a WorkerRecord."""
        group = self.model_file.stem if self.other_models and self.model_file is not None else ""
        return {**super().record_fields(incarnation=incarnation), "group": group}
