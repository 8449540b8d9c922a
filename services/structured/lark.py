"""Forms of answers that are more than one JSON schema, as texts in the grammar library's own language.

That language is Lark's with `%json`, `<[17]>` for the token 17, and lazy terminals, which end as soon as they can
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). Pure: data in, text out.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from services.structured.form import AnswerForm, Reasoning, ToolCalls, ToolFormat
from services.structured.grammar_text import MARK, OWN_START, TOKENS, rule_of_tokens, rules_in

MAX_CALLS = 128
"""In one answer: as many as a conversation may have in one message."""

_MARKS = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA3: (),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]",),
}
CALL_MARKS = {tool_format: marks[0] for tool_format, marks in _MARKS.items() if marks}
"""What begins calls, where something does."""

_BEGIN_THOUGHTS, _END_THOUGHTS = "<think>", "</think>"


def marks_of(form: AnswerForm) -> tuple[str, ...]:
    """The texts around calls and thoughts, each of which may be one token of the model."""
    calls = () if form.tool_calls is None else _MARKS[form.tool_calls.tool_format]
    return calls if form.reasoning is Reasoning.NONE else (*calls, _BEGIN_THOUGHTS, _END_THOUGHTS)


def lark_of(
    form: AnswerForm,
    *,
    mark_token_ids: Mapping[str, int],
    options: Mapping[str, Any],
    eos_token_ids: Collection[int] = (),
    is_forced: bool = True,
) -> str:
    """The grammar. `mark_token_ids` has those marks that are tokens; `options` are for the compiler of JSON schemas.

    `eos_token_ids` are the model's ends, which matter to a form that lists tokens.

    `is_forced`: where only one text is possible, only the tokens that the tokenizer makes of it are allowed.

    Raises ValueError for a schema that is no JSON object, RecursionError, and InvalidRequest for a grammar.
    """
    head = "%llguidance {}" if is_forced else '%llguidance {"no_forcing": true}'
    rules = [head, f"start: {_start(form)}", r"TEXT: /(.|\n)*/"]
    if form.json_schema.startswith(MARK):
        rules += [f"value: {OWN_START}", rules_in(form.json_schema, options)]
    elif form.json_schema.startswith(TOKENS):
        rules.append(f"value: {rule_of_tokens(form.json_schema, eos_token_ids)}")
    elif form.json_schema:
        rules.append(f"value: {_json(form.json_schema, options)}")
    if form.tool_calls is not None:
        rules += _call_rules(form.tool_calls, mark_token_ids, options)
    if form.reasoning is not Reasoning.NONE:
        rules += _thought_rules(form.reasoning, mark_token_ids)
    return "\n".join(rules)


def _start(form: AnswerForm) -> str:
    calls = [] if form.tool_calls is None else ["TEXT calls?" if form.tool_calls.is_optional else "calls"]
    value = " | ".join(calls + (["value"] if form.json_schema else []))
    if form.reasoning is Reasoning.NONE:
        return value
    return f"thoughts ({value})" if form.reasoning is Reasoning.IS_OPEN else f"thoughts? ({value})"


def _call_rules(calls: ToolCalls, mark_token_ids: Mapping[str, int], options: Mapping[str, Any]) -> list[str]:
    marks = [_mark(text, mark_token_ids) for text in _MARKS[calls.tool_format]]
    if calls.tool_format is ToolFormat.HERMES:
        listed = _listed("call", r"\n", calls)
        rules = [f"calls: {listed}", rf'call: {marks[0]} "\n" object "\n" {marks[1]}']
    elif calls.tool_format is ToolFormat.MISTRAL:
        listed = _listed("object", ", ", calls)
        # Some of its tokenizers write a blank before the list, others have no way to.
        rules = [f'calls: {marks[0]} " "? "[" {listed} "]"']
    else:
        # Its templates refuse a message with more than one call.
        rules = ["calls: object"]
    arguments = "parameters" if calls.tool_format is ToolFormat.LLAMA3 else "arguments"
    rules.append("object: " + " | ".join(f"function_{n}" for n in range(len(calls.functions))))
    for n, function in enumerate(calls.functions):
        opening = json.dumps(f'{{"name": {json.dumps(function.name)}, "{arguments}": ')
        rules.append(f'function_{n}: {opening} {_json(function.parameters, options)} "}}"')
    return rules


def _listed(rule: str, separator: str, calls: ToolCalls) -> str:
    return f'{rule} ("{separator}" {rule}){{0,{MAX_CALLS - 1}}}' if calls.is_parallel else rule


def _thought_rules(reasoning: Reasoning, mark_token_ids: Mapping[str, int]) -> list[str]:
    begin = "" if reasoning is Reasoning.IS_OPEN else _mark(_BEGIN_THOUGHTS, mark_token_ids)
    rules = [f"thoughts: {begin} until_end GAP", r"GAP: /\n{0,2}/"]
    if _END_THOUGHTS in mark_token_ids:
        return [*rules, f"until_end: TEXT {_mark(_END_THOUGHTS, mark_token_ids)}"]
    return [*rules, rf'until_end[suffix="{_END_THOUGHTS}"]: /(.|\n)*/']


def _mark(text: str, token_ids: Mapping[str, int]) -> str:
    return f"<[{token_ids[text]}]>" if text in token_ids else json.dumps(text)


def _json(schema: str, options: Mapping[str, Any]) -> str:
    members = json.loads(schema)
    if not isinstance(members, dict):
        raise ValueError("a schema must be an object")
    return "%json " + json.dumps({**members, "x-guidance": options})
