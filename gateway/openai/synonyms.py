"""Members of requests in the words of other servers than OpenAI's, and members that mean the same."""

import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from gateway.forms.response_format import MAX_ALLOWED_TOKENS, form_in
from gateway.openai.shapes import STRUCTURED_OUTPUTS, TOKEN_ID, StopTexts, list_of, said, synonym
from gateway.types import AskedSampling
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import SamplingMembers, check_parameter
from services.structured.grammar_text import MAX_CHOICES

Value = TypeVar("Value")


class Synonyms(SamplingMembers, kw_only=True):
    """Members in the words of vLLM, SGLang, llama.cpp, Ollama and Anthropic. None means absent."""

    max_new_tokens: Annotated[int | None, synonym("max_tokens", "SGLang's name of `max_tokens`.")] = None
    n_predict: Annotated[
        int | None,
        synonym("max_tokens", "llama.cpp's name of `max_tokens`; below 0: what fits into the context.", minimum=-2),
    ] = None
    num_predict: Annotated[
        int | None,
        synonym("max_tokens", "Ollama's name of `max_tokens`; below 0: what fits into the context.", minimum=-2),
    ] = None
    max_tokens_to_sample: Annotated[int | None, synonym("max_tokens", "An older name of `max_tokens`.")] = None
    min_new_tokens: Annotated[int | None, synonym("min_tokens", "SGLang's name of `min_tokens`.")] = None
    repeat_penalty: Annotated[
        float | None,
        synonym("repetition_penalty", "llama.cpp's name of `repetition_penalty`."),
    ] = None
    stop_sequences: Annotated[StopTexts | None, said("Anthropic's name of `stop`.")] = None
    regex: Annotated[str | None, said("The answer matches this regular expression as a whole.", minLength=1)] = None
    ebnf: Annotated[str | None, said("SGLang's name of `grammar`.")] = None
    grammar: Annotated[
        str | None,
        said(
            "The answer keeps to this grammar, in llguidance's form of Lark, or in that of llama.cpp and XGrammar, "
            "whose rules have `::=`."
        ),
    ] = None
    json_schema: Annotated[Any, said("The answer keeps to this JSON schema: an object, or the text of one.")] = None
    structured_outputs: Annotated[
        Any,
        said(
            "vLLM's object with one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`.",
            anyOf=STRUCTURED_OUTPUTS,
        ),
    ] = None
    structural_tag: Annotated[
        Any,
        said("SGLang's name of `response_format` of the type `structural_tag`: an object, or the JSON text of one."),
    ] = None
    guided_json: Annotated[Any, said("vLLM's older name of `json_schema`.")] = None
    guided_regex: Annotated[str | None, said("vLLM's older name of `regex`.", minLength=1)] = None
    guided_choice: Annotated[
        list[Any] | None,
        said("The answer is one of these texts.", **list_of({"type": "string", "minLength": 1}, MAX_CHOICES)),
    ] = None
    guided_grammar: Annotated[str | None, said("vLLM's older name of `grammar`.")] = None
    allowed_token_ids: Annotated[
        list[Any] | None,
        said(
            "The answer has no tokens but these. It ends where the model ends it, if one of its ends is among them, "
            "else at `max_tokens` or a stop text.",
            items=TOKEN_ID,
            minItems=1,
            maxItems=MAX_ALLOWED_TOKENS,
        ),
    ] = None


_MAX_TOKENS_WORDS = ("max_new_tokens", "n_predict", "num_predict", "max_tokens_to_sample")
_NO_BOUND: Mapping[str, tuple[int, ...]] = {"n_predict": (-1, -2), "num_predict": (-1, -2)}
"""The values with which llama.cpp and Ollama ask for as many tokens as fit."""
_FORM_WORDS = (
    *("response_format", "regex", "ebnf", "grammar", "json_schema", "structured_outputs", "structural_tag"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids"),
)

_others_words = operator.attrgetter(*_MAX_TOKENS_WORDS, "min_new_tokens", "repeat_penalty", "stop_sequences")
_NO_OTHERS_WORDS = (None,) * (len(_MAX_TOKENS_WORDS) + 3)
_forms_asked = operator.attrgetter(*_FORM_WORDS)
_NO_FORM = (None,) * len(_FORM_WORDS)
"""Nearly all requests have none of these words; one comparison finds that."""


def is_unbounded(request: Synonyms) -> bool:
    """Returns whether a member asks for as many tokens as fit."""
    return any(getattr(request, name) in values for name, values in _NO_BOUND.items())


def agreed_max_tokens(request: Synonyms, *names: str) -> int | None:
    """Returns the value of the members of these names and of their synonyms. Raises InvalidRequest where two differ."""
    given: dict[str, int] = {}
    has_others = _others_words(request) != _NO_OTHERS_WORDS
    for name in (*names, *_MAX_TOKENS_WORDS) if has_others else names:
        value = getattr(request, name)
        if value is not None and value not in _NO_BOUND.get(name, ()):
            if name != "max_tokens":  # which is checked under its own name when the call is accepted
                check_parameter("max_tokens", value, name)
            given[name] = value
    if given and has_others and is_unbounded(request):
        raise InvalidRequest("one member bounds the answer and another asks for no bound", field=next(iter(given)))
    return _agreed(given)


def _agreed(given: Mapping[str, Value]) -> Value | None:
    """Returns the value of members that mean the same, or None without any. Raises InvalidRequest where two differ."""
    if not given:
        return None
    first, *others = given
    for name in others:
        if given[name] != given[first]:
            raise InvalidRequest(f"{first} and {name} mean the same and differ", field=name, code="invalid_value")
    return given[first]


def add_synonyms(asked: AskedSampling, request: Synonyms) -> None:
    """Adds the parameters of sampling that have other servers' names, checked under the names that the client used."""
    if _others_words(request) == _NO_OTHERS_WORDS:
        return
    for name, other in (("min_tokens", "min_new_tokens"), ("repetition_penalty", "repeat_penalty")):
        value = getattr(request, other)
        if value is not None:
            check_parameter(name, value, other)
            known = getattr(asked, name)
            setattr(asked, name, _agreed({other: value} if known is None else {name: known, other: value}))


def stop_texts(stop: str | Sequence[str] | None, request: Synonyms) -> Sequence[str]:
    """Returns the texts that end the answer. Raises InvalidRequest where `stop` and its synonym differ."""
    if stop is None and request.stop_sequences is None:
        return ()
    # An empty text asks for nothing, as elsewhere.
    texts = [stop] if isinstance(stop, str) and stop else stop or None
    asked = {"stop": texts, "stop_sequences": request.stop_sequences}
    return _agreed({name: value for name, value in asked.items() if value is not None}) or ()


def form_asked(request: Synonyms) -> tuple[str, str]:
    """Returns the form of the answer as `form_in` gives it, and the member that asks for it. Raises InvalidRequest."""
    forms = _forms_asked(request)
    return ("", "response_format") if forms == _NO_FORM else form_in(dict(zip(_FORM_WORDS, forms, strict=True)))
