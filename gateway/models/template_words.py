"""Variables of the chat template that a client sets, such as whether a model is to think. Pure."""

import re
from collections.abc import Mapping, Set
from typing import Any

from gateway.models.chat_template import CONTINUES
from services.runtime.errors import InvalidRequest

MAX_WORDS = 16
OWN = frozenset({"messages", "tools", "add_generation_prompt", CONTINUES, "raise_exception", "strftime_now"})
"""The variables that the gateway sets itself."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TEXT = re.compile(r"[A-Za-z0-9_. -]{0,64}")
"""The characters of a value."""


def template_words_in(words: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Returns the variables, if their values are short plain texts, numbers or flags. Raises InvalidRequest."""
    if len(words) > MAX_WORDS:
        raise InvalidRequest(f"{field} has {len(words)} entries; the most is {MAX_WORDS}", field=field)
    for name, value in words.items():
        if _NAME.fullmatch(name) is None or name in OWN or name.endswith("_token"):
            raise InvalidRequest(
                f"{field} cannot have {name[:64]!r}: messages, tools and special tokens are the template's own",
                field=field,
                code="unsupported_parameter",
            )
        is_plain = isinstance(value, bool | int | float) or (isinstance(value, str) and _TEXT.fullmatch(value))
        if value is not None and not is_plain:
            raise InvalidRequest(
                f"{field}: {name} must be true, false, a number, or a text of at most 64 of A-Z, a-z, 0-9, _ . - and "
                "blanks",
                field=field,
                code="invalid_value",
            )
    return {name: value for name, value in words.items() if value is not None}


def unknown_fields(fields: Mapping[str, str], known: Set[str]) -> list[str]:
    """Returns the members of a request that set variables which the model's template does not read."""
    return [field for name, field in fields.items() if name not in known]
