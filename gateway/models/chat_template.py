"""A model's chat template: compiled in a sandbox, and what can be told from its source."""

import json
from datetime import datetime
from typing import Any, Protocol, cast

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.runtime.errors import ModelError


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
