"""Members of requests that this API has no field for: each is refused by name, or ignored for a reason.

The words are those of OpenAI, vLLM, SGLang, llama.cpp, Ollama and Anthropic, as far as they are sent to the generating
routes. What is served has a field in the types of requests; what stands neither there nor here is ignored, because no
server that we know gives it a meaning. What is ignored is named in a header of the answer. Pure: members in, names out.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.runtime.errors import InvalidRequest

MAX_REPORTED_FIELDS = 16

_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Refused:
    """A member that would change the answer. `instead` says what to do; null and values of `passes` ask nothing."""

    instead: str
    passes: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Harmless:
    """A member that changes nothing, for this reason."""

    because: str


Word = Refused | Harmless

_NO_TOKENS = "tokens cannot be named by their text; use logit_bias or allowed_token_ids"
_NO_SAMPLER = "this server has no such sampler; use temperature, top_k, top_p or min_p"
_NO_LORA = "model chooses an adapter, by its name; /v1/models lists them"
_NO_THINKING = "use reasoning_effort, or enable_thinking in chat_template_kwargs, where the model's template knows them"
_AS_IS = "reasoning comes apart from the answer, as reasoning_content"
_USE_FORMAT = "use response_format"
_NO_PROFILE = "nothing is measured for it"
_OFF = "it belongs to a sampler that is off"
_HERE = "this server places requests itself"
_TEXT_ONLY = "this server reads and writes text only"

_BODY: Mapping[str, Word] = {
    # OpenAI's
    "audio": Refused(_TEXT_ONLY),
    "function_call": Refused("use tool_choice", ("none",)),
    "functions": Refused("use tools", ([],)),
    "metadata": Harmless("nothing is stored that it could be found by"),
    "modalities": Refused(_TEXT_ONLY, (["text"],)),
    "moderation": Refused("this server has no moderation"),
    "prediction": Refused("this server predicts by itself"),
    "prompt_cache_options": Harmless("prompts are cached whatever it says"),
    "prompt_cache_retention": Harmless("prompts are cached while there is room"),
    "reasoning_effort": Refused("use /v1/chat/completions", ("none",)),
    "safety_identifier": Harmless("nobody is told of it"),
    "store": Harmless("chats and responses alone are stored"),
    "suffix": Refused("this server continues texts and does not fill gaps", ("",)),
    "tool_choice": Refused("use /v1/chat/completions", ("none",)),
    "tools": Refused("use /v1/chat/completions", ([],)),
    "verbosity": Refused("use /v1/chat/completions, or text.verbosity of /v1/responses", ("medium",)),
    "web_search_options": Refused("this server runs no tools"),
    # vLLM's
    "add_generation_prompt": Refused("use /v1/chat/completions", (True,)),
    "add_special_tokens": Refused("send token ids as prompt", (True,)),
    "bad_words": Refused(_NO_TOKENS, ([],)),
    "chat_template": Refused("the model's own template is used; use /v1/completions with a prompt of your own"),
    "chat_template_kwargs": Refused("use /v1/chat/completions", ({},)),
    "continue_final_message": Refused("use /v1/chat/completions", (False,)),
    "documents": Refused("put them into messages", ([],)),
    "early_stopping": Refused("there is no beam search", (False,)),
    "echo": Refused("use /v1/completions", (False,)),
    "guided_decoding_backend": Harmless("there is one, which keeps to every form"),
    "guided_whitespace_pattern": Refused("white space between parts of JSON is short, and cannot be chosen"),
    "include_reasoning": Refused(_AS_IS, (True,)),
    "include_stop_str_in_output": Refused("the answer ends before the stop text", (False,)),
    "kv_transfer_params": Refused(_HERE),
    "length_penalty": Refused("there is no beam search", (1,)),
    "logits_processors": Refused("no code of clients runs here", ([],)),
    "logprob_token_ids": Refused("use logprobs or top_logprobs"),
    "mm_processor_kwargs": Refused(_TEXT_ONLY, ({},)),
    "prompt_embeds": Refused("send a text or token ids"),
    "repetition_detection": Refused("use max_tokens or repetition_penalty"),
    "request_id": Harmless("requests are named by the header X-Request-Id"),
    "return_tokens_as_token_ids": Refused("use /v1/chat/completions", (False,)),
    "skip_special_tokens": Refused("special tokens are not shown; use return_token_ids", (True,)),
    "spaces_between_special_tokens": Refused("special tokens are not shown", (True,)),
    "thinking_token_budget": Refused(_NO_THINKING),
    "truncate_prompt_tokens": Refused("use /v1/chat/completions"),
    "truncation_side": Refused("the end of a prompt is what is kept", ("left",)),
    "use_beam_search": Refused("there is no beam search; use n", (False,)),
    "vllm_xargs": Refused("there are no extensions that read it", ({},)),
    # SGLang's
    "bootstrap_host": Refused(_HERE),
    "bootstrap_port": Refused(_HERE),
    "bootstrap_room": Refused(_HERE),
    "custom_logit_processor": Refused("no code of clients runs here"),
    "custom_params": Refused("no code of clients runs here", ({},)),
    "data_parallel_rank": Harmless(_HERE),
    "lora_path": Refused(_NO_LORA),
    "no_stop_trim": Refused("the answer ends before the stop text", (False,)),
    "return_hidden_states": Refused("use logprobs; hidden states stay on the workers", (False,)),
    "rid": Harmless("requests are named by the header X-Request-Id"),
    "sampling_params": Refused("write its members into the body itself"),
    "separate_reasoning": Refused(_AS_IS, (True,)),
    "session_params": Refused("send the conversation so far as messages"),
    "stop_regex": Refused("use stop, or regex for the form of all of the answer", ([],)),
    "stream_reasoning": Refused(_AS_IS, (True,)),
    # llama.cpp's
    "cache_prompt": Harmless("prompts are cached whatever it says"),
    "dry_allowed_length": Harmless(_OFF),
    "dry_base": Harmless(_OFF),
    "dry_multiplier": Refused(_NO_SAMPLER, (0,)),
    "dry_penalty_last_n": Harmless(_OFF),
    "dry_sequence_breakers": Harmless(_OFF),
    "dynatemp_exponent": Harmless(_OFF),
    "dynatemp_range": Refused(_NO_SAMPLER, (0,)),
    "grammar_lazy": Refused("the grammar holds from the first token", (False,)),
    "grammar_triggers": Refused("the grammar holds from the first token", ([],)),
    "id_slot": Harmless(_HERE),
    "image_data": Refused(_TEXT_ONLY, ([],)),
    "input_extra": Refused("put it into the prompt", ([],)),
    "input_prefix": Refused("put it into the prompt", ("",)),
    "input_suffix": Refused("this server continues texts and does not fill gaps", ("",)),
    "lora": Refused(_NO_LORA, ([],)),
    "min_keep": Refused(_NO_SAMPLER, (0, 1)),
    "mirostat": Refused(_NO_SAMPLER, (0,)),
    "mirostat_eta": Harmless(_OFF),
    "mirostat_tau": Harmless(_OFF),
    "n_discard": Harmless("no prompt is cut"),
    "n_indent": Refused("use grammar", (0,)),
    "n_keep": Harmless("no prompt is cut"),
    "n_probs": Refused("use logprobs", (0,)),
    "no_repeat_ngram_size": Refused("use repetition_penalty or frequency_penalty", (0,)),
    "parse_tool_calls": Refused("calls are always looked for where there are tools", (True,)),
    "penalize_nl": Refused("penalties count for every token", (True,)),
    "post_sampling_probs": Refused("log-probabilities are those before sampling", (False,)),
    "preserved_tokens": Refused("special tokens are not shown", ([],)),
    "reasoning_format": Refused(_AS_IS, ("auto", "deepseek")),
    "repeat_last_n": Refused("penalties count for prompt and answer as a whole", (-1,)),
    "response_fields": Refused("the answer has all of its members", ([],)),
    "return_progress": Refused("nothing is sent before the first token", (False,)),
    "return_tokens": Refused("use return_token_ids", (False,)),
    "samplers": Refused(_NO_SAMPLER, ([],)),
    "slot_id": Harmless(_HERE),
    "t_max_predict_ms": Refused("use max_tokens", (0, -1)),
    "tfs_z": Refused(_NO_SAMPLER, (1,)),
    "timings_per_token": Harmless(_NO_PROFILE),
    "top_a": Refused(_NO_SAMPLER, (0,)),
    "top_n_sigma": Refused(_NO_SAMPLER, (-1, 0)),
    "typ_p": Refused(_NO_SAMPLER, (1,)),
    "typical_p": Refused(_NO_SAMPLER, (1,)),
    "xtc_probability": Refused(_NO_SAMPLER, (0,)),
    "xtc_threshold": Harmless(_OFF),
    # Ollama's
    "context": Refused("send the conversation so far as messages", ([],)),
    "format": Refused(_USE_FORMAT, ("",)),
    "images": Refused(_TEXT_ONLY, ([],)),
    "keep_alive": Harmless("models stay loaded"),
    "num_ctx": Harmless("the context is the model's own"),
    "options": Refused("write its members into the body itself", ({},)),
    "raw": Refused("use /v1/completions", (False,)),
    "template": Refused("use /v1/completions with a prompt of your own", ("",)),
    "think": Refused(_NO_THINKING),
    # Anthropic's, and those of several that have no other home
    "anthropic_version": Harmless("this is no version of that API"),
    "betas": Harmless("this is no version of that API"),
    "cache_control": Harmless("prompts are cached whatever it says"),
    "container": Refused("this server runs no tools"),
    "context_management": Harmless("the conversation is used as it was sent"),
    "diagnostics": Harmless("nothing is told of caches but how much was found"),
    "inference_geo": Harmless("requests run where this server is"),
    "enable_thinking": Refused("use /v1/chat/completions, or chat_template_kwargs of /tokenize and /apply-template"),
    "mcp_servers": Refused("this server runs no tools", ([],)),
    "output_config": Refused(_USE_FORMAT, ({},)),
    "speed": Harmless("there is one speed"),
    "user_profile_id": Harmless("nobody is told of it"),
    "workspace_id": Harmless("keys say which tenant a request is of"),
    "output_format": Refused(_USE_FORMAT),
    "reasoning": Refused("use /v1/chat/completions", ({}, {"effort": "none"})),
    "system": Refused('use a message with the role "system"', ("", [])),
    "thinking": Refused(_NO_THINKING),
    "thinking_budget": Refused(_NO_THINKING),
}

_MESSAGE: Mapping[str, Word] = {
    "annotations": Harmless("they say nothing to a model"),
    "audio": Refused(_TEXT_ONLY),
    "cache_control": Harmless("prompts are cached whatever it says"),
    "function_call": Refused("use tool_calls"),
    "images": Refused(_TEXT_ONLY, ([],)),
    "refusal": Refused("write it as content", ("",)),
}
_ITEM: Mapping[str, Word] = {
    **_MESSAGE,
    "partial": Refused("use /v1/chat/completions", (False,)),
    "prefix": Refused("use /v1/chat/completions", (False,)),
}
_PART: Mapping[str, Word] = {
    "annotations": Harmless("they say nothing to a model"),
    "cache_control": Harmless("prompts are cached whatever it says"),
    "prompt_cache_breakpoint": Harmless("prompts are cached whatever it says"),
}
_STRUCTURED: Mapping[str, Word] = {
    "disable_additional_properties": Refused("say additionalProperties in the schema", (False,)),
    "disable_any_whitespace": Refused("white space between parts of JSON is short, and cannot be chosen", (False,)),
    "disable_fallback": Harmless("there is nothing to fall back to"),
    "whitespace_pattern": Refused("white space between parts of JSON is short, and cannot be chosen"),
}
_TOOL: Mapping[str, Word] = {"cache_control": Harmless("prompts are cached whatever it says")}
_REASONING: Mapping[str, Word] = {
    "enabled": Refused(_NO_THINKING),
    "exclude": Refused(_AS_IS, (False,)),
    "max_tokens": Refused(_NO_THINKING),
}

WORDS: Mapping[str, Mapping[str, Word]] = {
    "": _BODY,
    "messages": _MESSAGE,
    "messages.content": _PART,
    "structured_outputs": _STRUCTURED,
    "tools": _TOOL,
    "reasoning": _REASONING,
    "input": _ITEM,
    "input.content": _PART,
}
"""The members by the place of the object that has them; the first place is the body itself."""

INNER_FIELDS: Mapping[str, frozenset[str]] = {
    "response_format": frozenset(
        {"type", "json_schema", "schema", "grammar", "pattern", "structures", "triggers", "format"}
    ),
    "response_format.json_schema": frozenset({"name", "schema", "strict", "description"}),
    "stream_options": frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"}),
    "structured_outputs": frozenset({"json", "json_object", "regex", "choice", "grammar", "structural_tag"}),
    "messages": frozenset(
        {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "prefix", "partial"}
    ),
    "messages.content": frozenset({"type", "text"}),
    "messages.tool_calls": frozenset({"id", "type", "function"}),
    "messages.tool_calls.function": frozenset({"name", "arguments"}),
    "tools": frozenset({"type", "function"}),
    "reasoning": frozenset({"effort", "summary", "generate_summary"}),
    "conversation": frozenset({"id"}),
    "text": frozenset({"format", "verbosity"}),
    "text.format": frozenset({"type", "name", "schema", "strict", "description"}),
    "input": frozenset(
        {"type", "role", "content", "id", "status", "call_id", "name", "arguments", "output", "summary"}
        | {"encrypted_content", "phase", "namespace"}
    ),
    "input.content": frozenset({"type", "text", "logprobs"}),
}
"""The members that are read of objects without a type. The model is shown all those of `tools.function`."""


def ignored_members(members: Mapping[str, Any], fields: tuple[str, ...]) -> list[str]:
    """Returns the names of ignored members of a body whose type has these fields; inner ones as `messages.name`.

    Raises InvalidRequest for those that would change the answer.
    """
    known = _known(fields)
    ignored: list[str] = []
    if not members.keys() <= known:
        ignored += _ignored_in("", {name: value for name, value in members.items() if name not in known})
    places = _places_of(known)
    for name in places.keys() & members.keys() & known:
        value = members[name]
        _look_into(places[name], [value] if isinstance(value, dict) else value, ignored)
    if not ignored:
        return ignored
    shown = dict.fromkeys(name for name in ignored if _FIELD_NAME.fullmatch(name))
    return list(shown)[:MAX_REPORTED_FIELDS]


@functools.cache
def _known(fields: tuple[str, ...]) -> frozenset[str]:
    return frozenset(fields)


@functools.cache
def _places_of(fields: frozenset[str]) -> Mapping[str, "_Place"]:
    """Returns the objects without a type in a body with these fields, which tell whose API it is of."""
    return {**_PLACES, **(_OF_MESSAGES if "output_config" in fields else _OF_RESPONSES if "input" in fields else {})}


def _look_into(place: "_Place", values: Any, ignored: list[str]) -> None:
    if type(values) is not list:
        return
    for number, value in enumerate(values):
        if type(value) is not dict:
            continue
        if not value.keys() <= place.fields:
            unread = {
                name: inner for name, inner in value.items() if name not in place.fields and inner not in (None, [], {})
            }
            ignored += _ignored_in(place.name, unread, number)
        for name, inner_place in place.inner:
            inner = value.get(name)
            if type(inner) is list or type(inner) is dict:
                _look_into(inner_place, [inner] if type(inner) is dict else inner, ignored)


def _ignored_in(place: str, unread: Mapping[str, Any], number: int = 0) -> list[str]:
    words = WORDS.get(place, {})
    ignored = []
    for name, value in unread.items():
        word = words.get(name)
        shown = f"{place}.{name}" if place else name
        if not isinstance(word, Refused):
            ignored.append(shown)
        elif value is not None and value not in word.passes:
            if place in _LISTS:
                shown = f"{place}[{number}].{name}"
            raise InvalidRequest(
                f"{shown} is not supported by this server: {word.instead}", field=shown, code="unsupported_parameter"
            )
    return ignored


_LISTS = frozenset({"messages", "tools", "input"})
_WITH_INNER = frozenset(place for place in INNER_FIELDS if "." not in place)


@dataclass(frozen=True)
class _Place:
    """One kind of inner object: its name, the members that are read, and the objects in it."""

    name: str
    fields: frozenset[str]
    inner: tuple[tuple[str, "_Place"], ...] = ()


def _place(name: str) -> _Place:
    inner = [one for one in INNER_FIELDS if one.rpartition(".")[0] == name]
    return _Place(name, INNER_FIELDS[name], tuple((one.rpartition(".")[2], _place(one)) for one in inner))


_PLACES = {name: _place(name) for name in _WITH_INNER}
_OWN_TOOL = frozenset({"type", "name", "description", "parameters", "strict"})
_OF_RESPONSES = {"tools": _Place("tools", _OWN_TOOL | {"tools"}, (("tools", _Place("tools.tools", _OWN_TOOL)),))}
"""Objects of /v1/responses that have members of their own."""
_BLOCK = frozenset(
    {"type", "text", "thinking", "signature", "data", "id", "name", "input", "tool_use_id", "content", "source"}
)
_BLOCKS = _Place("messages.content", _BLOCK, (("content", _Place("messages.content", _BLOCK)),))
_OF_MESSAGES = {
    "messages": _Place("messages", frozenset({"role", "content"}), (("content", _BLOCKS),)),
    "system": _Place("messages.content", _BLOCK),
    "tools": _Place("tools", frozenset({"type", "name", "description", "input_schema", "strict"})),
    "tool_choice": _Place("tool_choice", frozenset({"type", "name", "disable_parallel_tool_use"})),
    "thinking": _Place("thinking", frozenset({"type", "budget_tokens"})),
    "output_config": _Place("output_config", frozenset({"effort", "format"})),
    "output_format": _Place("output_format", frozenset({"type", "schema", "name", "strict"})),
    "metadata": _Place("metadata", frozenset({"user_id"})),
}
"""Objects of /v1/messages, where `output_config.format` is what `output_format` is."""
