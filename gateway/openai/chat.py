"""The chat API: its requests, and the writing of its answers with the calls and the reasoning in them."""

import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import UNSET, UnsetType

from gateway.forms.answer_parts import AnswerParts, ReasoningTokens
from gateway.forms.tools import forced_names, is_named, offered_tools, strict_names
from gateway.limits import MAX_MESSAGES, check_are_objects
from gateway.models.answer_pieces import CallStart, Content, Piece, Reasoning
from gateway.models.chat_template import CONTINUES
from gateway.models.template_words import MAX_WORDS, template_words_in
from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tool_calls import AnswerParser
from gateway.openai.answers import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFinishReason,
    ChatLogprobs,
    CompletionTokensDetails,
    FunctionDelta,
    MessageDelta,
    TokenUsage,
    ToolCall,
    ToolCallDelta,
)
from gateway.openai.metadata import MAX_METADATA, Metadata, check_metadata
from gateway.openai.requests import TOOLS, ChoicesRequest, EffortOption, asked_sampling
from gateway.openai.shapes import MESSAGE, PREFIXES, TOOL_CHOICE, flag, list_of, said, synonym
from gateway.openai.synonyms import agreed_max_tokens
from gateway.openai.writer import ChoicesWriter, Head, Whole, encode, shown_logprobs
from gateway.requests.call import Call
from gateway.types import Delta, FinishReason, TokenLogprobs, Usage
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import check_parameter

PARALLEL = flag("False: one call, or with `auto` the first of an answer.", default=True)
TEMPLATE_WORDS = said(
    "Told to the chat template, such as `enable_thinking`: short texts, numbers, flags. Those that it has no "
    "name for are ignored by name.",
    maxProperties=MAX_WORDS,
)
ENABLE_THINKING = said("As in `chat_template_kwargs`.")
CONTINUE = flag("The answer continues the last message, an assistant's, which does not come again.")
GENERATION_PROMPT = said(
    "False: the prompt ends with the last message, without the beginning of the assistant's next. Absent: it has that, "
    "unless the last message is continued."
)


def end_of_prompt(
    messages: Sequence[Any], *, continues: bool | None, has_generation_prompt: bool | None
) -> dict[str, Any]:
    """Returns the variables of the chat template that say where a prompt ends. Raises InvalidRequest.

    DeepSeek's and Mistral's `prefix` of the last message, and Kimi's `partial`, ask for what `continues` does.
    """
    for number, message in enumerate(messages):
        if isinstance(message, dict) and not message.keys().isdisjoint(PREFIXES):
            continues = _is_prefix(message, f"messages[{number}]", is_last=number == len(messages) - 1) or continues
    if continues and has_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message cannot both be true",
            field="continue_final_message",
            code="invalid_value",
        )
    if continues:
        return {CONTINUES: True}
    return {"add_generation_prompt": False} if has_generation_prompt is False else {}


def _is_prefix(message: Mapping[str, Any], name: str, *, is_last: bool) -> bool:
    is_prefix = False
    for word in PREFIXES:
        value = message.get(word)
        if not isinstance(value, bool | None) or (value and not is_last):
            raise InvalidRequest(
                f"{name}.{word} must be true or false, and true in the last message only",
                field=f"{name}.{word}",
                code="invalid_value",
            )
        is_prefix = is_prefix or bool(value)
    return is_prefix


class ChatRequest(ChoicesRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    REQUIRED = ("messages",)

    messages: Annotated[list[Any] | None, said("The conversation.", **list_of(MESSAGE, MAX_MESSAGES))] = None
    max_completion_tokens: Annotated[int | None, synonym("max_tokens", "The newer name of `max_tokens`.")] = None
    logprobs: Annotated[bool | None, flag("Log-probabilities of the answer's tokens.")] = None
    top_logprobs: Annotated[
        int | None, synonym("logprobs", "This many likeliest tokens at each place; needs `logprobs`.")
    ] = None
    tools: Annotated[list[Any] | None, TOOLS] = None
    tool_choice: Annotated[
        Any,
        said(
            "`required`, a function, or some of them: the answer is calls whose arguments keep to `parameters`.",
            anyOf=TOOL_CHOICE,
        ),
    ] = None
    parallel_tool_calls: Annotated[bool | None, PARALLEL] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, TEMPLATE_WORDS] = None
    enable_thinking: Annotated[bool | None, ENABLE_THINKING] = None
    reasoning_effort: Annotated[
        str | None,
        said("As in `chat_template_kwargs`; `none` is `enable_thinking` false, where the template knows that."),
    ] = None
    reasoning: Annotated[EffortOption | None, said("`effort` is `reasoning_effort`.")] = None
    verbosity: Annotated[str | None, said("As in `chat_template_kwargs`; `medium` asks for nothing.")] = None
    continue_final_message: Annotated[bool | None, CONTINUE] = None
    add_generation_prompt: Annotated[bool | None, GENERATION_PROMPT] = None
    store: Annotated[bool | None, flag("The answer is kept for `--stored-answer-s`, to be fetched by its id.")] = None
    metadata: Annotated[
        Metadata | None,
        said("Kept with an answer that is stored, which can be found by it.", maxProperties=MAX_METADATA),
    ] = None

    def call(self) -> Call:
        """Returns the call that it asks for. Raises InvalidRequest."""
        if self.messages is None:
            raise InvalidRequest("messages is missing", field="messages", code="missing_required_parameter")
        check_are_objects(self.messages)
        max_tokens = agreed_max_tokens(self, "max_tokens", "max_completion_tokens")
        check_metadata(self.metadata or {})
        tools = offered_tools(self.tools, self.tool_choice)
        words, fields = self._template_words()
        sampling = asked_sampling(self, max_tokens=max_tokens, logprobs=self._num_logprobs())
        call = self.begun_call("chat", sampling)
        call.messages, call.prompt_field = self.messages, "messages"
        prompt_end = end_of_prompt(
            self.messages,
            continues=self.continue_final_message,
            has_generation_prompt=self.add_generation_prompt,
        )
        call.template_words, call.template_fields = {**words, **prompt_end}, fields
        call.tools = tools
        call.must_call = forced_names(tools, self.tool_choice)
        call.strict_tools = strict_names(self.tools) if tools else frozenset()
        call.parallel_tool_calls = self.parallel_tool_calls is not False and not is_named(self.tool_choice)
        return call

    def left_out(self) -> list[str]:
        """Returns what is ignored of an answer that is not to be kept."""
        return ["metadata"] if self.metadata and not self.store else []

    def _template_words(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the variables for the chat template, and the member that gives each. Raises InvalidRequest."""
        if _told_to_template(self) == _NOTHING_TOLD:
            return {}, {}
        words = template_words_in(self.chat_template_kwargs or {}, "chat_template_kwargs")
        fields = {name: f"chat_template_kwargs.{name}" for name in words}
        for name, field, value, asks_nothing in (
            ("enable_thinking", "enable_thinking", self.enable_thinking, None),
            ("reasoning_effort", "reasoning_effort", self.reasoning_effort, "none"),
            ("reasoning_effort", "reasoning.effort", self.reasoning and self.reasoning.effort, "none"),
            ("verbosity", "verbosity", self.verbosity, "medium"),
        ):
            if value is not None and value != asks_nothing:
                checked = template_words_in({name: value}, field)
                if words.setdefault(name, value) != checked[name]:
                    raise InvalidRequest(f"{field} is said twice, and differs", field=field, code="invalid_value")
                fields.setdefault(name, field)
        if "none" in (self.reasoning_effort, self.reasoning and self.reasoning.effort):
            words.setdefault("enable_thinking", False)  # not among `fields`: a model that never thinks ignores nothing
        return words, fields

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        check_parameter("logprobs", self.top_logprobs, "top_logprobs")
        if not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        return self.top_logprobs


_TOLD = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "reasoning", "verbosity")
_told_to_template = operator.attrgetter(*_TOLD)
_NOTHING_TOLD = (None,) * len(_TOLD)


class ChatWriter(ChoicesWriter):
    """Writes /v1/chat/completions, with the calls and the reasoning that are found in the answers' text."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    chunk_type = ChatCompletionChunk
    id_prefix = "chatcmpl"

    def __init__(
        self, tokenizer: ModelTokenizer, request: ChatRequest, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(tokenizer, request, head=head, prompts=prompts)
        tools = offered_tools(request.tools, request.tool_choice)
        is_strict = bool(strict_names(request.tools))
        self._parts = AnswerParts(
            tokenizer,
            tools,
            request_id=head.request_id,
            prompts=prompts,
            is_strict=is_strict,
            is_forced=bool(forced_names(tools, request.tool_choice)),
        )
        self._is_parallel = request.parallel_tool_calls is not False
        self._parsers: dict[int, AnswerParser] = {}
        self._reasoning: dict[int, ReasoningTokens] = {}

    def skip(self, index: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Reads the text, as what is found next depends on all of it."""
        if self._parts.are_looked_for:
            self._count_reasoning(index, token_ids)
            self._parser(index).push(text, token_ids)

    def opening(self, index: int) -> bytes:
        """Returns the event that names the role."""
        choice = self._choice(index, MessageDelta(role="assistant", content=""))
        event = self._event(choice, self._no_usage_yet(index))
        if not self._has_token_ids:
            return event
        return event.removesuffix(b"}\n\n") + b',"prompt_token_ids":%b}\n\n' % encode(self._shown_prompt(index))

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """Returns the event for a delta; what the parser holds back comes with the reason of the end."""
        if not self._parts.are_looked_for:
            return super().chunk(index, delta, usage)
        self._count_reasoning(index, delta.token_ids)
        parser = self._parser(index)
        shown = self._shown(index, parser.push(delta.text, delta.token_ids))
        parts = []
        if shown != MessageDelta() or delta.logprobs or (self._has_token_ids and delta.token_ids):
            parts.append(self._event(self._delta_choice(index, delta, shown), usage))
        if delta.finish_reason is not None:
            shown = self._shown(index, parser.finish())
            reason = _finish_reason(delta.finish_reason, parser)
            parts.append(self._event(self._choice(index, shown, reason), usage))
        return b"".join(parts)

    def whole(self, answers: Sequence[Whole]) -> bytes:
        """Returns the body of an answer that is not streamed. All answers have the same prompt."""
        return encode(
            ChatCompletion(
                **self._head,
                object="chat.completion",
                choices=[self._whole_choice(answer) for answer in answers],
                usage=self._whole_usage(answers),
                prompt_logprobs=self._prompt_logprobs(answers[0]),
                prompt_token_ids=self._shown_prompt(0),
            )
        )

    def _whole_choice(self, answer: Whole) -> ChatChoice:
        message = AssistantMessage(role="assistant", content=answer.text, refusal=None)
        finish_reason: ChatFinishReason = answer.finish_reason
        if self._parts.are_looked_for:
            self._count_reasoning(answer.index, answer.token_ids)
            parser = self._parts.parser(answer.index)
            pieces = [*parser.push(answer.text, answer.token_ids), *parser.finish()]
            message = self._message(answer.index, pieces)
            finish_reason = _finish_reason(answer.finish_reason, parser)
        return ChatChoice(
            index=answer.index,
            message=message,
            logprobs=self._logprobs(answer.token_ids, answer.logprobs),
            finish_reason=finish_reason,
            token_ids=self._shown_ids(answer.token_ids),
        )

    def _text_choice(self, index: int, delta: Delta) -> ChatChunkChoice:
        return self._delta_choice(index, delta, MessageDelta(content=delta.text))

    def _delta_choice(self, index: int, delta: Delta, shown: MessageDelta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=shown,
            logprobs=self._logprobs(delta.token_ids, delta.logprobs),
            finish_reason=None,
            token_ids=self._shown_ids(delta.token_ids),
        )

    def _last_choice(self, index: int, finish_reason: FinishReason) -> ChatChunkChoice:
        return self._choice(index, MessageDelta(), finish_reason)

    def _choice(self, index: int, shown: MessageDelta, reason: ChatFinishReason | None = None) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=shown, logprobs=None, finish_reason=reason)

    def _parser(self, index: int) -> AnswerParser:
        if index not in self._parsers:
            self._parsers[index] = self._parts.parser(index)
        return self._parsers[index]

    def _count_reasoning(self, index: int, token_ids: Sequence[int]) -> None:
        if self._tokenizer.has_reasoning:
            if index not in self._reasoning:
                self._reasoning[index] = ReasoningTokens(self._tokenizer, self._parts.parser(index))
            self._reasoning[index].push(token_ids)

    def _usage(self, usages: Sequence[tuple[Usage, Sequence[int]]]) -> TokenUsage:
        shown = super()._usage(usages)
        if self._tokenizer.has_reasoning:
            num_tokens = sum(counter.num_tokens for counter in self._reasoning.values())
            shown.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=num_tokens)
        return shown

    def _message(self, index: int, pieces: Sequence[Piece]) -> AssistantMessage:
        """Returns the message that all pieces of an answer make."""
        shown = self._shown(index, pieces)
        calls: list[ToolCall] | UnsetType = UNSET
        if shown.tool_calls:
            calls = [_whole_call(call) for call in shown.tool_calls]
        return AssistantMessage(
            role="assistant",
            content=shown.content if shown.content is not UNSET else None if calls else "",
            refusal=None,
            reasoning_content=shown.reasoning_content,
            tool_calls=calls,
        )

    def _shown(self, index: int, pieces: Sequence[Piece]) -> MessageDelta:
        """Returns what the pieces add to the message, with the new part of each call."""
        shown = MessageDelta()
        calls: dict[int, ToolCallDelta] = {}
        for piece in pieces:
            if isinstance(piece, Content):
                shown.content = (shown.content or "") + piece.text
            elif isinstance(piece, Reasoning):
                shown.reasoning_content = (shown.reasoning_content or "") + piece.text
            elif piece.index and not self._is_parallel:
                # The client asked for one call at a time and gets the first; the model was not told of the wish.
                continue
            elif isinstance(piece, CallStart):
                function = FunctionDelta(name=piece.name, arguments="")
                call_id = self._parts.call_id(index, piece.index)
                calls[piece.index] = ToolCallDelta(index=piece.index, id=call_id, type="function", function=function)
            else:
                call = calls.setdefault(
                    piece.index, ToolCallDelta(index=piece.index, function=FunctionDelta(arguments=""))
                )
                call.function.arguments += piece.text
        if calls:
            shown.tool_calls = list(calls.values())
        return shown

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        if entries is None:
            return None
        shown = shown_logprobs(self._tokenizer, token_ids, entries, shows_ids=self._shows_ids)
        return ChatLogprobs(content=shown, refusal=None)


def _whole_call(call: ToolCallDelta) -> ToolCall:
    """Returns a call all parts of which have arrived."""
    name, call_id = call.function.name, call.id
    assert name is not UNSET
    assert call_id is not UNSET
    function = CalledFunction(name=name, arguments=call.function.arguments)
    return ToolCall(id=call_id, type="function", function=function)


def _finish_reason(reason: FinishReason, parser: AnswerParser) -> ChatFinishReason:
    """Returns `tool_calls` for an answer that calls, unless it was cut."""
    return "tool_calls" if reason == "stop" and parser.num_complete_calls else reason
