"""The parts of a chat's answers: reasoning, and the tokens that begin calls."""

import pytest

from gateway.forms.answer_parts import AnswerParts, CallMarks, ReasoningTokens
from gateway.models.model_files import read_model_files
from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tool_calls import MARK
from services.structured.form import ToolFormat
from tests.gateway.test_chat_tools import CLOCK, folder_of

__all__ = ["folder_of"]  # a fixture


def test_tokens_of_reasoning_are_counted_however_they_come(folder_of):
    folder, tokenizer = folder_of("thinks")
    model = ModelTokenizer(read_model_files(folder))

    def count(text, size):
        parser = AnswerParts(model, None, request_id="a", prompts=[[5]]).parser(0)
        counter = ReasoningTokens(model, parser)
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        for first in range(0, len(token_ids), size):
            counter.push(token_ids[first : first + size])
        return counter.num_tokens, len(token_ids)

    for size in (1, 2, 7, 1000):
        assert count("No, 2 < 3.", size)[0] == 0
        unended = count("<think>\nHm, 2 <", size)
        assert unended[0] == unended[1] > 0
        assert count("<think>Hm.</think>\nYes <think>again</think>", size) == count(
            "<think>Hm.</think>\nYes <think>again</think>", 1
        )
        assert 0 < count("<think>Hm.</think>\nYes", size)[0] < count("<think>Hm.</think>\nYes", size)[1]


@pytest.mark.parametrize("kind", ["hermes", "thinks"])
def test_only_tokens_before_the_answer_are_counted(folder_of, kind):
    folder, tokenizer = folder_of("thinks")
    model = ModelTokenizer(read_model_files(folder))
    model.tool_format = ToolFormat.HERMES if kind == "hermes" else None
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    thought = "<think>\nHm.\n</think>\n\n"
    plain = [("", "\nYes"), ("", "<b>Yes"), ("", "<thin")]
    for before, said in [*plain, (thought, "<b>Yes"), (thought, call), (thought, "")]:
        parser = AnswerParts(model, [CLOCK], request_id="a", prompts=[[5]]).parser(0)
        counter = ReasoningTokens(model, parser)
        parts = [tokenizer.encode(part, add_special_tokens=False).ids for part in (before, said)]
        token_ids = [token_id for part in parts for token_id in part]
        num_counted = sum(counter.push([token_id]) for token_id in token_ids)
        assert num_counted == counter.num_tokens
        assert tokenizer.decode(token_ids[:num_counted]) == before, (before, said)


def test_ids_of_calls_differ_and_are_alike_for_every_writer(folder_of):
    model = ModelTokenizer(read_model_files(folder_of("mistral")[0]))

    def ids(request_id):
        parts = AnswerParts(model, [CLOCK], request_id=request_id, prompts=[[5]])
        return [parts.call_id(index, number) for index in (0, 1) for number in (0, 1)]

    assert ids("a") == ids("a")
    assert len({*ids("a"), *ids("b")}) == 8
    assert {(len(call_id), call_id.isalnum()) for call_id in ids("a")} == {(9, True)}


class OneMark:
    """A tokenizer one of whose tokens begins calls; the others are characters."""

    call_token = (0, "<call>")

    def detokenizer(self):
        return self

    def push(self, token_ids):
        return "".join("<call>" if token_id == 0 else chr(token_id) for token_id in token_ids)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_only_a_token_begins_calls(size):
    token_ids = [*map(ord, "a<call>b"), 0, *map(ord, "c<ca")]
    marks = CallMarks(OneMark())
    shown = ""
    for start in range(0, len(token_ids), size):
        part = token_ids[start : start + size]
        shown += marks.put_into(OneMark().push(part), part)
    assert shown + marks.finish() == f"a<call>b{MARK}c<ca"
