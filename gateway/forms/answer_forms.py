"""The form that a call's answers must have: its schema, the calls that must be made, and where the model may think."""

from collections.abc import Sequence

from gateway.forms.tools import called_functions, names_of
from gateway.limits import check_with_form
from gateway.models.catalog import ServedModel
from gateway.models.tokenizer import ModelTokenizer
from gateway.requests.call import Call
from services.runtime.bounds import invalid_value
from services.runtime.errors import InvalidRequest
from services.structured.compiler import FormChecks
from services.structured.form import AnswerForm, Reasoning, ToolCalls
from services.structured.grammar import UnusableSchema
from services.structured.grammar_text import TOKENS, largest_token_in


class AnswerForms:
    """The forms of calls, each compiled once to see that answers can be made to have it."""

    def __init__(self) -> None:
        self._checks = FormChecks()

    async def form_of(self, call: Call, model: ServedModel, prompt_token_ids: Sequence[int]) -> AnswerForm | None:
        """Returns the form that the call's answers must have, checked for this model; None: they may be any text.

        Raises InvalidRequest for a form that answers cannot be made to have, Overloaded where too many are checked.
        """
        schema = await self._schema(call) if call.sampling.json_schema else ""
        form = answer_form(call, model.tokenizer, prompt_token_ids, schema=schema)
        if form is not None:
            await self._check_form(form, call, model)
        return form

    async def _schema(self, call: Call) -> str:
        """Returns the schema that the answer must keep to, as it travels. Raises InvalidRequest."""
        try:
            return await self._checks.written(call.sampling.json_schema, tenant=call.tenant)
        except InvalidRequest as error:
            name = call.sampling.form_field
            raise InvalidRequest(f"{name} cannot be used: {error.message}", field=name, code=error.code) from error

    async def _check_form(self, form: AnswerForm, call: Call, model: ServedModel) -> None:
        """Raises InvalidRequest unless answers of this model can be made to have the form."""
        if form.json_schema.startswith(TOKENS):
            num_tokens = model.limits.vocab_size
            if (largest := largest_token_in(form.json_schema)) >= num_tokens:
                raise invalid_value(call.sampling.form_field, largest, f"token ids in [0, {num_tokens})")
        asked_by = "tool_choice" if call.must_call else "tools" if form.may_be_text else call.sampling.form_field
        check_with_form(
            call.sampling,
            form.num_bytes,
            prefix=call.field_prefix,
            field_name=asked_by,
            may_be_text=form.may_be_text,
        )
        if not model.eos_token_ids:
            raise InvalidRequest("the model has no token that ends an answer", field=asked_by)
        try:
            await self._checks.check(form, tenant=call.tenant)
        except UnusableSchema as error:
            what, field_name, reason = await self._find_unusable(form, error, call)
            raise InvalidRequest(
                f"{what} cannot be used: {reason.message}", field=field_name, code=reason.code
            ) from error

    async def _find_unusable(
        self, form: AnswerForm, error: UnusableSchema, call: Call
    ) -> tuple[str, str, UnusableSchema]:
        """Returns the schema of a form that cannot be used, the member that holds it, and the reason."""
        field_name = call.sampling.form_field
        what = f"the schema in {field_name}" if form.json_schema.startswith("{") else field_name
        if form.tool_calls is None:
            return what, field_name, error
        schemas = [(what, field_name, form.json_schema)] if form.json_schema else []
        for function in form.tool_calls.functions:
            schemas.append((f"the schema of the parameters of {function.name}", "tools", function.parameters))
        for what, field_name, schema in schemas:
            try:
                await self._checks.check(AnswerForm(schema), tenant=call.tenant)
            except UnusableSchema as reason:
                return what, field_name, reason
        return "the schemas of tools, taken together,", "tools", error


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
    # Where tokens are listed, thoughts have no others either.
    thinks = call.messages is not None and tokenizer.has_reasoning and not schema.startswith(TOKENS)
    return AnswerForm(schema, calls, _reasoning(tokenizer, prompt_token_ids) if thinks else Reasoning.NONE)


def _reasoning(tokenizer: ModelTokenizer, prompt_token_ids: Sequence[int]) -> Reasoning:
    return Reasoning.IS_OPEN if tokenizer.opens_reasoning(prompt_token_ids) else Reasoning.MAY_COME
