"""Variables that a client sets in the chat template."""

import pytest

from gateway.models.template_words import MAX_WORDS, template_words_in, unknown_fields
from services.runtime.errors import InvalidRequest


def test_short_plain_values_are_taken():
    words = {"enable_thinking": True, "effort": "low", "budget": 7, "share": 0.5}
    assert template_words_in({**words, "absent": None}, "chat_template_kwargs") == words


@pytest.mark.parametrize(
    "words",
    [
        {"messages": []},
        {"tools": "x"},
        {"add_generation_prompt": [1]},
        {"a": {"b": 1}},
        {"a": "<|end|>"},
        {"a": "x" * 10_000},
        {f"a{n}": 1 for n in range(MAX_WORDS + 1)},
    ],
)
def test_others_are_refused_by_name(words):
    with pytest.raises(InvalidRequest) as refused:
        template_words_in(words, "chat_template_kwargs")
    assert refused.value.field.startswith("chat_template_kwargs")


def test_members_that_the_template_does_not_read_are_named():
    fields = {"enable_thinking": "enable_thinking", "effort": "reasoning_effort"}
    assert set(unknown_fields(fields, {"effort"})) == {"enable_thinking"}
