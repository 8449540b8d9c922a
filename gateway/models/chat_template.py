"""A model's chat template: compiled in a sandbox, and what can be told from its source."""

import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol, cast

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.runtime.errors import ModelError

CONTINUES = "continue_final_message"
"""The variable that asks for an answer that continues the last message; `render_continued` reads it, no template."""


class Template(Protocol):
    """A compiled template."""

    def render(self, **variables: Any) -> str:
        """Returns its text for these variables. Raises TemplateError, or what the template provokes."""
        ...


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def names_in(source: str) -> frozenset[str]:
    """Returns the names that a chat template reads and does not set itself."""
    try:
        environment = _environment()
        return frozenset(meta.find_undeclared_variables(environment.parse(source))) - environment.globals.keys()
    except TemplateError:
        return frozenset()


def compile_template(source: str) -> Template:
    """Returns the template. Raises ModelError where it is not valid Jinja."""
    try:
        return cast(Template, _environment().from_string(source))
    except TemplateError as error:
        raise ModelError(f"the model's chat template is not valid Jinja: {error.message}") from error


def render_continued(template: Template, variables: Mapping[str, Any]) -> str:
    """Returns the text of a conversation up to the end of its last message's content, which the answer continues.

    Raises ValueError where the template does not show that content once, as it is.
    """
    mark = f"\ue000{secrets.token_hex(8)}\ue001"
    *before, last = variables["messages"]
    messages = [*before, {**last, "content": last["content"] + mark}]
    text = template.render(**{**variables, "messages": messages, "add_generation_prompt": False})
    shown, found, rest = text.partition(mark)
    if not found or mark in rest:
        raise ValueError("the template does not show the message once")
    return shown


def reads_tools(source: str) -> bool:
    """Returns whether a valid template reads the tools."""
    return any(name.name == "tools" for name in _environment().parse(source).find_all(nodes.Name))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Returns JSON as templates expect it: unlike that of jinja2's own filter, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
