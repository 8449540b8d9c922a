"""Metadata within its bounds."""

import pytest

from gateway.openai.metadata import (
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    check_metadata,
)
from services.runtime.errors import InvalidRequest


def test_what_is_at_the_bounds_is_taken():
    check_metadata({})
    check_metadata({f"{n:0{MAX_METADATA_KEY_CHARS}}": "é" * MAX_METADATA_VALUE_CHARS for n in range(MAX_METADATA)})


@pytest.mark.parametrize(
    "wrong",
    [
        {str(n): "" for n in range(MAX_METADATA + 1)},
        {"k" * (MAX_METADATA_KEY_CHARS + 1): ""},
        {"k": "v" * (MAX_METADATA_VALUE_CHARS + 1)},
        {"k": "\ud800"},
    ],
)
def test_what_is_beyond_them_is_refused_by_name(wrong):
    with pytest.raises(InvalidRequest) as caught:
        check_metadata(wrong)
    assert caught.value.field == "metadata"
