"""The models of a worker process, one of which is awake: has pages and is served.

The weights of those that were awake last may stay in memory, asleep, so that waking them takes no reading. All others
are on disk only. Knows no role by name, and not which model is wanted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from services.hub.models import local_model
from services.runtime.identity import AnswerIdentity
from services.runtime.model_facts import ModelFacts, read_model_facts
from services.structured.grammar import grammar_library
from worker.config import WorkerConfig
from worker.loading import KeptWeights, LoadedModel
from worker.role import AnyRole

C = TypeVar("C", bound=WorkerConfig)


@dataclass(frozen=True, slots=True)
class AwakeModel:
    """A model with its pages, and what follows from it. `settings` are those of a worker that has only this model."""

    name: str
    settings: WorkerConfig
    loaded: LoadedModel
    facts: ModelFacts
    identity: AnswerIdentity


class Models:
    """The models in `folders`, by name. Beside the awake one, the weights of at most `max_asleep` stay in memory.

    All methods may take long, and run one at a time.
    """

    def __init__(self, settings: WorkerConfig, folders: Mapping[str, Path], *, max_asleep: int = 0) -> None:
        self._settings = settings
        self._folders = folders
        self._max_asleep = max_asleep
        self._awake: AwakeModel | None = None
        self._asleep: dict[str, tuple[KeptWeights, ModelFacts]] = {}
        """Those that were awake last come last."""

    @property
    def awake(self) -> AwakeModel:
        """The model that is awake, while one is."""
        assert self._awake is not None, "no model is awake"
        return self._awake

    @property
    def asleep(self) -> tuple[str, ...]:
        """Names of the models whose weights are in memory without pages."""
        return tuple(self._asleep)

    def check(self, name: str) -> None:
        """Raises ModelError for a model whose folder cannot be served."""
        if name not in self._asleep:
            read_model_facts(local_model(self._folders[name]))

    def wake(self, role: AnyRole, name: str) -> None:
        """Gives a model new pages, from its kept weights or from disk. Raises ModelError or ConfigError.

        No other one is awake.
        """
        settings = replace(self._settings, model=local_model(self._folders[name]), model_name=name)
        weights, facts = self._asleep.pop(name, (None, None))
        facts = facts or read_model_facts(settings.model)
        loaded = role.load(settings, weights)
        try:
            identity = loaded.identity(vocabulary=facts.vocabulary, grammars=grammar_library())
        except BaseException:
            loaded.close()
            raise
        self._awake = AwakeModel(name, settings, loaded, facts, identity)

    def lay_down(self, wanted: str) -> None:
        """Keeps the weights of the awake model, which nobody uses any longer, or closes it where they may not be kept.

        Its pages are free once the caller has forgotten them. Weights of the model that is `wanted` next stay too.
        """
        model, self._awake = self.awake, None
        weights = model.loaded.weights if self._max_asleep else None
        if weights is None:
            model.loaded.close()
            return
        self._asleep[model.name] = (weights, model.facts)
        oldest_first = [name for name in self._asleep if name != wanted]
        for name in oldest_first[: -self._max_asleep]:
            self._asleep.pop(name)[0].close()

    def close(self) -> None:
        """Closes what is awake, and forgets what is asleep."""
        if self._awake is not None:
            self._awake.loaded.close()
        for weights, _ in self._asleep.values():
            weights.close()
        self._asleep.clear()
