"""The settings of a decode worker; nothing but `services.runtime.config.load` reads the environment."""

from dataclasses import dataclass
from pathlib import Path

from services.hub.source import model_source
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import choice, integer, size_bytes
from worker.config import WorkerConfig


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
        "from answers that ended (sequences are preempted when that was too few), or those of its max_tokens.",
    )
    swap_memory: int | None = option(
        size_bytes(minimum=0),
        default=None,
        help="Host memory for pages of preempted sequences, where copying them takes less time than computing them "
        "again. 0: they are always computed again. Not given: as much as the KV pool has, at most 1 GiB.",
    )
    speculative: str = option(
        choice("off", "ngram", "draft", "auto"),
        default="off",
        help="Tokens that are proposed and then verified, several in a step, where that pays; answers are the same. "
        "ngram: from what was said before; draft: by --draft-model; auto: both, if a draft model is given.",
    )
    draft_model: Path | None = option(
        model_source(),
        default=None,
        help="Small checkpoint with the model's tokenizer, for --speculative: its folder, or its name, under which it "
        "is downloaded if it is not here.",
    )
    draft_memory: int = option(size_bytes(), default=256 << 20, help="Most memory for the KV cache of the draft model.")
    speculative_depth: int = option(
        integer(1, 64), default=8, help="Most tokens that are proposed for a sequence in a step."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculative == "draft" and self.draft_model is None:
            raise ConfigError("--speculative is draft, which needs --draft-model")
