"""The form that a call's answers must have: its schema, the calls that must be made, and where the model may think."""

from collections.abc import Sequence

from gateway.forms.tools import called_functions, names_of
from gateway.models.tokenizer import ModelTokenizer
from gateway.requests.call import Call
from services.structured.form import AnswerForm, Reasoning, ToolCalls


def answer_form(
    call: Call, tokenizer: ModelTokenizer, prompt_token_ids: Sequence[int], *, schema: str
) -> AnswerForm | None:
    """Returns the form of the call's answers, as this model writes calls and thoughts; None: they may be any text.

    Calls that must be made leave no room for anything else. A schema beside tools leaves the choice to the model, as it
    has it without a schema. Strict tools are kept to where a token begins calls, which tells them from text. Raises
    InvalidRequest for tools whose arguments cannot be made to have a form. `schema` is what the call asks for, as it
    travels.
    """
    schema = "" if call.must_call else schema
    calls = None
    if call.tools and tokenizer.tool_format is not None:
        is_optional = not schema and not call.must_call
        names = call.must_call or names_of(call.tools)
        if not is_optional or (call.strict_tools and tokenizer.has_call_token):
            functions = called_functions(call.tools, names, strict=call.strict_tools if is_optional else names)
            calls = ToolCalls(tokenizer.tool_format, functions, call.parallel_tool_calls, is_optional)
    if not schema and calls is None:
        return None
    # The other API shows an answer as it is.
    thinks = call.messages is not None and tokenizer.has_reasoning
    return AnswerForm(schema, calls, _reasoning(tokenizer, prompt_token_ids) if thinks else Reasoning.NONE)


def _reasoning(tokenizer: ModelTokenizer, prompt_token_ids: Sequence[int]) -> Reasoning:
    return Reasoning.IS_OPEN if tokenizer.opens_reasoning(prompt_token_ids) else Reasoning.MAY_COME
