"""The types of answers have every member that is written, and take no other."""

import msgspec
import pytest

from gateway.openai import answers
from gateway.openai.answers import Exact, TokenUsage

TYPES = [kind for kind in vars(answers).values() if isinstance(kind, type) and issubclass(kind, Exact)]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_each_type_is_exact_and_described(kind):
    assert kind.__struct_config__.forbid_unknown_fields
    assert kind.__doc__
    (_, found) = msgspec.json.schema_components([kind])
    assert found[kind.__name__]["additionalProperties"] is False


def test_what_is_unset_is_not_written():
    usage = TokenUsage(
        prompt_tokens=1,
        completion_tokens=2,
        total_tokens=3,
        prompt_tokens_details=answers.PromptTokensDetails(cached_tokens=0),
    )
    assert b"completion_tokens_details" not in msgspec.json.encode(usage)
