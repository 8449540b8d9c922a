"""A file of step times measured at a running cluster, and the profile that it becomes.

`tandem profile` writes it, with the measurements themselves, so that they can be fitted anew. Times are what a client
saw: the gateway's own time is in them.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planning.simulator.fitting import fitted
from planning.simulator.laws import LinearLaw
from planning.simulator.profiles import Profile
from services.runtime.errors import ConfigError
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed

FORMAT = "tandem-step-times/1"
REMOTE, LOCAL = "remote", "local"


@dataclass(frozen=True, slots=True)
class PromptTime:
    """A prompt: its tokens, seconds to the first token, and from there to the second one.

    `way` says where it was computed: `remote`, at a prefill worker; `local`, at a decode worker; empty: unknown.
    """

    tokens: int
    first_s: float
    second_s: float
    way: str = ""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Steps of a batch: sequences, tokens of their contexts together, seconds of a step."""

    sequences: int
    context_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of one kind of worker; `kv_tokens` 0 and `max_batch` 0: unknown."""

    name: str
    prompts: Sequence[PromptTime]
    steps: Sequence[StepTime]
    kv_bytes_per_token: int
    kv_tokens: int
    max_batch: int

    @property
    def profile(self) -> Profile:
        """The law that is closest to the measurements, with its errors, and the link between the workers."""
        steps = fitted(
            [(1.0, float(one.sequences), float(one.context_tokens)) for one in self.steps],
            [one.step_s for one in self.steps],
        )
        decode = DecodeSpeed(*steps.factors)
        laws, outside_s, errors = list[LinearLaw](), list[float](), list[str]()
        for way, words in ((REMOTE, "prompts"), (LOCAL, "prompts at decode workers")):
            rows = self._prompts_of(way)
            prompts = fitted(
                [(1.0, float(one.tokens), float(one.tokens) ** 2) for one in rows], [one.first_s for one in rows]
            )
            start_s, token_s, pair_s = prompts.factors
            # A step of hardly any tokens takes what a step of one sequence does; the rest is not spent in the worker.
            step_s = min(start_s, decode.step_s(1, 0))
            laws.append(LinearLaw(PrefillSpeed(step_s, token_s, pair_s), decode, decode))
            outside_s.append(start_s - step_s)
            if way == REMOTE or rows[0].way == LOCAL:
                errors.append(f"{words}: {prompts}")
        return Profile(
            self.name,
            laws[0],
            self.kv_bytes_per_token,
            (*errors, f"decode steps: {steps}"),
            self._link(decode),
            laws[1],
            (outside_s[0], outside_s[1]),
        )

    def _prompts_of(self, way: str) -> Sequence[PromptTime]:
        """Returns the prompts that were computed in a way, or all where none is known to have been."""
        return [one for one in self.prompts if one.way == way] or self.prompts

    def _link(self, decode: DecodeSpeed) -> LinkSpeed:
        """What the second token waits for beyond its step: a latency, and a time for each byte of pages."""
        rows = self._prompts_of(REMOTE)
        waits = [(one.tokens, max(0.0, one.second_s - decode.step_s(1, one.tokens))) for one in rows]
        positive = [(tokens, wait_s) for tokens, wait_s in waits if wait_s > 0]
        if len(positive) < 2 or self.kv_bytes_per_token == 0:
            return LinkSpeed(sum(wait_s for _, wait_s in waits) / len(waits), math.inf)
        latency_s, token_s = fitted(
            [(1.0, float(tokens)) for tokens, _ in positive], [wait_s for _, wait_s in positive]
        ).factors
        return LinkSpeed(latency_s, self.kv_bytes_per_token / token_s if token_s > 0 else math.inf)

    def document(self) -> dict[str, Any]:
        """Returns the file's content."""
        return {"format": FORMAT, **asdict(self)}


def read_measured(file: Path) -> Measured:
    """Reads a file of step times. Raises ConfigError naming file and field."""
    try:
        document: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ConfigError(f"{file} has the format {document['format']!r:.50}, not {FORMAT}")
        found = Measured(
            name=str(document["name"]),
            prompts=[_prompt(one) for one in document["prompts"]],
            steps=[_step(one) for one in document["steps"]],
            kv_bytes_per_token=int(document["kv_bytes_per_token"]),
            kv_tokens=int(document["kv_tokens"]),
            max_batch=int(document["max_batch"]),
        )
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    except KeyError as error:
        raise ConfigError(f"{file}: the field {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is not a file of step times: {error}") from None
    ways = Counter(one.way for one in found.prompts)
    if min(ways.values(), default=0) < 3 or len(found.steps) < 3:
        raise ConfigError(f"{file} has fewer than 3 measurements of prompts, in one of their ways, or of steps")
    return found


def _prompt(row: Mapping[str, Any]) -> PromptTime:
    second_s, way = max(0.0, float(row["second_s"])), str(row.get("way", ""))
    return PromptTime(int(row["tokens"]), _positive(row["first_s"]), second_s, way)


def _step(row: Mapping[str, Any]) -> StepTime:
    return StepTime(int(row["sequences"]), _positive(row["context_tokens"]), _positive(row["step_s"]))


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value!r:.20} is no time")
    return number
