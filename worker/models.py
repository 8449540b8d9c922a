"""The models of a worker process. One of them is loaded: it has pages and serves requests.

The weights of recently loaded models may stay in memory ("sleeping"), so that loading them again does not read the
disk. All others are only on disk. Does not depend on the role. The caller decides which model is wanted.
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
    """A loaded model with its pages and derived properties. `settings` describe a worker with only this model."""

    name: str
    settings: WorkerConfig
    loaded: LoadedModel
    facts: ModelFacts
    identity: AnswerIdentity


class Models:
    """The models in `folders`, by name. Up to `max_asleep` models sleep in memory in addition to the loaded one.

    All methods may block for long. Call one at a time.
    """

    def __init__(self, settings: WorkerConfig, folders: Mapping[str, Path], *, max_asleep: int = 0) -> None:
        self._settings = settings
        self._folders = folders
        self._max_asleep = max_asleep
        self._awake: AwakeModel | None = None
        self._asleep: dict[str, tuple[KeptWeights, ModelFacts]] = {}
        """In the order of last use, the latest last."""

    @property
    def awake(self) -> AwakeModel:
        """Returns the loaded model. Call it only while a model is loaded."""
        assert self._awake is not None, "no model is awake"
        return self._awake

    @property
    def asleep(self) -> tuple[str, ...]:
        """Returns the names of sleeping models, whose weights are in memory without pages."""
        return tuple(self._asleep)

    def check(self, name: str) -> None:
        """Raises ModelError if the folder of a model cannot be served."""
        if name not in self._asleep:
            read_model_facts(local_model(self._folders[name]))

    def wake(self, role: AnyRole, name: str) -> None:
        """Loads a model with new pages, from its sleeping weights or from disk. No other model may be loaded.

        Raises ModelError or ConfigError.
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
        """Puts the loaded model to sleep, or closes it if its weights may not stay in memory. It must be unused.

        Its pages are freed once the caller drops its references. The sleeping weights of `wanted` are retained too.
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
        """Closes the loaded model and discards sleeping ones."""
        if self._awake is not None:
            self._awake.loaded.close()
        for weights, _ in self._asleep.values():
            weights.close()
        self._asleep.clear()
