"""How a model embeds texts, by the files that sentence-transformers writes beside a checkpoint, or why it does not."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.types import Pooling
from services.runtime.errors import InvalidRequest, ModelError
from services.runtime.model_facts import read_json_object, read_text

MODULES = "modules.json"
EMBEDDINGS = AUTO, ON, MATRYOSHKA, OFF = "auto", "on", "matryoshka", "off"
"""Which models embed texts."""

_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
"""The poolings that are computed, by what `pooling_mode` and `pooling_mode_…` call them."""


@dataclass(frozen=True, slots=True)
class EmbeddingRule:
    """How a text becomes a vector of `num_dimensions` numbers.

    `shorter` are the numbers of dimensions that it may be cut to; None: any.
    """

    pooling: Pooling
    is_normalized: bool
    num_dimensions: int
    shorter: frozenset[int] | None = frozenset()

    def cut_to(self, num_dimensions: int | None) -> "EmbeddingRule":
        """Returns the rule of vectors with this many dimensions; None: all. Raises InvalidRequest."""
        most = self.num_dimensions
        if num_dimensions is None or num_dimensions == most:
            return self
        if not 0 < num_dimensions < most or (self.shorter is not None and num_dimensions not in self.shorter):
            sizes = ", ".join(map(str, sorted({most, *(self.shorter or ())})))
            rule = f"at most {most}" if self.shorter is None else f"one of {sizes}"
            raise InvalidRequest(
                f"dimensions must be {rule}: the model's vectors cannot be cut otherwise",
                field="dimensions",
                code="invalid_value",
            )
        # One that was cut is as long as one that was not.
        return replace(self, num_dimensions=num_dimensions, is_normalized=True)


class _NotComputed(Exception):
    """Says why a checkpoint's embeddings are not computed."""


def read_rule(folder: Path, choice: str) -> EmbeddingRule | str:
    """Returns how the model of a folder embeds texts, or the reason for which it does not. `choice`: --embeddings.

    Without sentence-transformers' files a vector is the state of the last token, normalized. Raises ModelError.
    """
    if choice == OFF:
        return "embeddings are switched off here (--embeddings off)"
    if choice == AUTO and not (folder / MODULES).is_file():
        return f"the checkpoint was not trained to embed texts: it has no {MODULES}, and --embeddings on is not given"
    config = read_json_object(folder, "config.json")
    width = config.get("hidden_size")
    if type(width) is not int or width < 1:
        return "config.json has no hidden_size"
    shorter = None if choice == MATRYOSHKA else _shorter(config)
    try:
        pooling, is_normalized = _pooling(folder, width)
    except _NotComputed as reason:
        return str(reason)
    return EmbeddingRule(pooling, is_normalized, width, shorter)


def _shorter(config: Mapping[str, Any]) -> frozenset[int] | None:
    """Returns the numbers of dimensions that vectors may be cut to, as vLLM reads them; None: any."""
    named = config.get("matryoshka_dimensions")
    if isinstance(named, list):
        return frozenset(size for size in named if type(size) is int)
    return None if config.get("is_matryoshka") is True else frozenset()


def _pooling(folder: Path, width: int) -> tuple[Pooling, bool]:
    """Returns the pooling, and whether vectors are divided by their length. Raises _NotComputed or ModelError."""
    if not (folder / MODULES).is_file():
        return "last", True
    found: Pooling | None = None
    is_normalized = False
    for kind, place in _modules(folder):
        if kind == "Pooling":
            found = _pooling_of(read_json_object(folder, f"{place}/config.json"), width)
        elif kind == "Normalize":
            is_normalized = True
        elif kind != "Transformer":
            raise _NotComputed(f"its {MODULES} has a module {kind}, which is not computed here")
    return found or "last", is_normalized


def _modules(folder: Path) -> Sequence[tuple[str, str]]:
    """Returns the kind and the folder of each module, in their order."""
    try:
        listed = json.loads(read_text(folder, MODULES))
        modules = [(str(one["type"]).rpartition(".")[2], str(one.get("path", ""))) for one in listed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{folder}/{MODULES} is not a list of modules; download the model again") from error
    for _, place in modules:
        # A name with a folder in it could point anywhere on this machine.
        if Path(place).name != place:
            raise ModelError(f"{folder}/{MODULES} names the folder {place!r}, which is not one of this model's")
    return modules


def _pooling_of(config: Mapping[str, Any], width: int) -> Pooling:
    """Returns the one pooling that is on. Raises _NotComputed."""
    prefix = "pooling_mode_"
    named = [name.removeprefix(prefix) for name, is_on in config.items() if name.startswith(prefix) and is_on is True]
    if isinstance(config.get("pooling_mode"), str):
        named = [config["pooling_mode"]]
    pooling = _POOLINGS.get(named[0]) if len(named) == 1 else None
    if pooling is None:
        said = " and ".join(named) or "none"
        raise _NotComputed(f"its vectors are pooled by {said}; only the last token and the mean are computed here")
    if config.get("word_embedding_dimension", config.get("embedding_dimension", width)) != width:
        raise _NotComputed("its pooling has another number of dimensions than its hidden states")
    return pooling
