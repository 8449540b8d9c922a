"""A cheap model and a stronger one under a name of their own: which of them answers a request. Knows no request's life.

stronger at once   a long prompt, or what the operator's classifier says of the text
stronger after it  an answer of the cheap model that fails a check
cheap              everything else
"""

import asyncio
import importlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.runtime.errors import ConfigError

CLASSIFIER_S = 1.0
"""How long the classifier may take; then the cheap model begins."""
CLASSIFIER_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$(?!\n)"

Classifier = Callable[[str], bool]
"""Says of a request's text whether the stronger model should answer it. It is called on a thread."""
CheckName = Literal["finished", "json"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tier:
    """What clients ask for by `name`. `stronger` is the name of the model that answers in place of the cheap one.

    `checks` and `pattern`, which has to be found in the text, are for complete answers of the cheap model; a prompt of
    `long_prompt_chars` characters or more, and a text of which `classifier` says so, begin with the stronger one.
    """

    name: str
    stronger: str
    long_prompt_chars: int | None = None
    classifier: Classifier | None = None
    checks: tuple[CheckName, ...] = ()
    pattern: re.Pattern[str] | None = None

    @property
    def has_check(self) -> bool:
        """Whether answers of the cheap model are looked at before a client sees them."""
        return bool(self.checks) or self.pattern is not None

    async def why_stronger(self, texts: Sequence[str]) -> str:
        """Returns why the stronger model should begin: `long_prompt`, `classifier`, or empty: it should not."""
        if self.long_prompt_chars is not None and sum(map(len, texts)) >= self.long_prompt_chars:
            return "long_prompt"
        if self.classifier is None:
            return ""
        try:
            async with asyncio.timeout(CLASSIFIER_S):
                is_hard = await asyncio.to_thread(self.classifier, "\n".join(texts))
        except Exception as error:  # noqa: BLE001 - the operator's own code may raise anything, and an answer is due
            found = {"tier": self.name, "error": f"{type(error).__name__}: {error}"[:200]}
            logger.warning("a classifier of requests failed, and the cheap model begins", extra=found)
            return ""
        return "classifier" if is_hard else ""

    def failed_check(self, text: str, finish_reason: str) -> str:
        """Returns which check a complete answer fails: `finished`, `json`, `pattern`; empty: none."""
        if "finished" in self.checks and finish_reason != "stop":
            return "finished"
        if "json" in self.checks and not _is_json(text):
            return "json"
        return "pattern" if self.pattern is not None and self.pattern.search(text) is None else ""


def load_classifier(place: str) -> Classifier:
    """Returns the function that `module:name` names. Raises ConfigError."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{place!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{place!r} is no function")
    classifier: Classifier = found
    return classifier


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    except RecursionError:
        return False
    return True
