"""A model's own sampling: values of generation_config.json for requests without them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.limits import ModelLimits, check_sampling
from gateway.types import AskedSampling
from services.runtime.errors import InvalidRequest, ModelError
from services.runtime.model_facts import read_json_object
from services.runtime.sampling import PARAMETERS

FILE = "generation_config.json"
AUTO, NONE = "auto", "none"
FIELDS = tuple(parameter.name for parameter in PARAMETERS.values() if parameter.has_model_default)
"""The values that are used. Lengths are not: they would cut answers that other servers do not cut."""

_ANYTHING = ModelLimits(vocab_size=2**31 - 1, context_length_tokens=2**31 - 1)


def read_defaults(model_folder: Path, wanted: str) -> dict[str, float]:
    """Returns a model's defaults; `wanted` is AUTO (its own file, if it has one), NONE, or a folder with such a file.

    Raises ModelError for a value that no request may have, and for a folder without the file.
    """
    if wanted == NONE:
        return {}
    folder = model_folder if wanted == AUTO else Path(wanted).expanduser()
    values = read_json_object(folder, FILE, is_required=wanted != AUTO)
    defaults = {name: values[name] for name in FIELDS if values.get(name) is not None}
    try:
        check_sampling(AskedSampling(**defaults), _ANYTHING)
    except InvalidRequest as error:
        raise ModelError(f"{folder}/{FILE}: {error.message}; correct it, or give --generation-config none") from error
    return defaults


def with_defaults(asked: AskedSampling, defaults: Mapping[str, float]) -> AskedSampling:
    """Returns what a client asked for, completed."""
    missing: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(asked, name) is None}
    return msgspec.structs.replace(asked, **missing) if missing else asked
