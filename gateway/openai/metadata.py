"""Metadata that clients give to what is stored for them: at most 16 short texts by short names."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from gateway.limits import check_text
from gateway.models.conversation import refuse
from services.runtime.errors import InvalidRequest

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

Metadata = dict[
    Annotated[str, Meta(extra_json_schema={"maxLength": MAX_METADATA_KEY_CHARS})],
    Annotated[str, Meta(extra_json_schema={"maxLength": MAX_METADATA_VALUE_CHARS})],
]


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises InvalidRequest for more, or longer ones, than may be kept."""
    if len(metadata) > MAX_METADATA:
        refuse("metadata", f"an object with at most {MAX_METADATA} members")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            rule = f"{MAX_METADATA_KEY_CHARS} characters, their values at most {MAX_METADATA_VALUE_CHARS}"
            raise InvalidRequest(f"names in metadata have at most {rule}", field="metadata", code="invalid_value")
        check_text(key, field_name="metadata")
        check_text(value, field_name="metadata")
