"""What form an answer must have, as data: decided by a gateway, kept in journals, sent to workers.

Knows no grammar: `services.structured` makes one of it.
"""

from dataclasses import dataclass
from enum import StrEnum

from protos import worker_pb2
from services.runtime.errors import InvalidRequest


class ToolFormat(StrEnum):
    """How a model writes calls; named after the models that do."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"


class Reasoning(StrEnum):
    """Whether thoughts come before the answer, between `<think>` and `</think>`."""

    NONE = ""
    MAY_COME = "may_come"
    IS_OPEN = "is_open"
    """The prompt ends with `<think>`."""


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """A tool that may be called; `parameters` is the JSON schema of its arguments, as text, without white space."""

    name: str
    parameters: str


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """One call of one of these functions or, with `is_parallel` and where the format has lists of calls, several."""

    tool_format: ToolFormat
    functions: tuple[CalledFunction, ...]
    is_parallel: bool = True
    is_optional: bool = False
    """Text comes first, or instead. Only where the mark that begins calls is a token: the same text of other tokens may
    come as well, and a reader of the answer takes it for text."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """JSON that keeps to `json_schema`, or calls; where both are set either of them, and at least one is.

    The schema is JSON text, or a grammar or list of tokens that `services.structured.grammar_text` wrote, which no JSON
    begins as. Equal
    forms are equal values on all machines, so a form is the key of what is made of it.
    """

    json_schema: str = ""
    tool_calls: ToolCalls | None = None
    reasoning: Reasoning = Reasoning.NONE

    @property
    def may_be_text(self) -> bool:
        """Whether anything but calls is free."""
        return self.tool_calls is not None and self.tool_calls.is_optional

    @property
    def is_calls_only(self) -> bool:
        """Whether nothing but calls and thoughts can come."""
        return self.tool_calls is not None and not self.tool_calls.is_optional and not self.json_schema

    @property
    def num_bytes(self) -> int:
        """Bytes of all schemas and names."""
        functions = () if self.tool_calls is None else self.tool_calls.functions
        texts = [self.json_schema, *(text for one in functions for text in (one.name, one.parameters))]
        return sum(len(text.encode()) for text in texts)


def write_form(form: AnswerForm | None, message: worker_pb2.SequenceSpec) -> None:
    """Puts a form into a message; None: any text will do."""
    if form is None:
        return
    message.json_schema = form.json_schema
    message.reasoning = form.reasoning
    if form.tool_calls is not None:
        message.tool_calls.tool_format = form.tool_calls.tool_format
        message.tool_calls.is_parallel = form.tool_calls.is_parallel
        message.tool_calls.is_optional = form.tool_calls.is_optional
        for function in form.tool_calls.functions:
            message.tool_calls.functions.add(name=function.name, parameters=function.parameters)


def read_form(message: worker_pb2.SequenceSpec) -> AnswerForm | None:
    """The form in a message. Raises InvalidRequest for one that is not known here."""
    try:
        reasoning = Reasoning(message.reasoning)
        calls = _read_calls(message.tool_calls) if message.HasField("tool_calls") else None
    except ValueError as error:
        raise InvalidRequest("this form of answers is not known here", field="tool_calls") from error
    if not message.json_schema and calls is None:
        return None
    return AnswerForm(message.json_schema, calls, reasoning)


def _read_calls(message: worker_pb2.ToolCallForm) -> ToolCalls:
    functions = tuple(CalledFunction(function.name, function.parameters) for function in message.functions)
    if not functions:
        raise InvalidRequest("there is no function to call", field="tool_calls")
    return ToolCalls(ToolFormat(message.tool_format), functions, message.is_parallel, message.is_optional)
