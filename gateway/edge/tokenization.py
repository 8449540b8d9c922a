"""Tokens without an answer, over HTTP: of a text, of a conversation, of a response's input, and back to text."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.access.door import FrontDoor
from gateway.access.keys import ApiKey
from gateway.anthropic.answers import CountedTokens
from gateway.anthropic.request import MessagesRequest
from gateway.anthropic.request import own_words as anthropic_words
from gateway.forms.tools import offered_tools
from gateway.http.bodies import Bodies
from gateway.http.exchange import Exchange
from gateway.limits import check_text_to_count, check_token_ids
from gateway.models.catalog import ServedModel
from gateway.models.conversation import encode_conversation
from gateway.models.template_words import template_words_in
from gateway.openai.chat import ChatRequest, end_of_prompt
from gateway.openai.requests import DetokenizeRequest, TokenizeRequest, parse, parse_members
from gateway.openai.responses_request import ResponsesRequest, own_words
from gateway.requests.call import Call
from gateway.requests.lifecycle import Requests
from services.runtime.errors import InvalidRequest


class Tokenization:
    """The endpoints that generate nothing; each request counts as one of its tenant's all the same."""

    def __init__(self, requests: Requests, *, door: FrontDoor, bodies: Bodies) -> None:
        self._requests = requests
        self._door = door
        self._bodies = bodies

    async def count_input(self, exchange: Exchange, key: ApiKey) -> None:
        """Answers how many tokens the input of a response would have."""
        with own_words(), self._bodies.claim(key.tenant) as claim:
            call = await self._bodies.read(claim, exchange.read_body, _stateless_call)
            model = await self._let_in(exchange, key, call.model)
            token_ids = await self._encode_to_count(model, call.messages or (), call.tools, key.tenant)
        document = {"object": "response.input_tokens", "input_tokens": len(token_ids)}
        await exchange.answer(200, msgspec.json.encode(document))

    async def count_chat(self, exchange: Exchange, key: ApiKey) -> None:
        """Answers how many tokens the prompt of a chat would have, as llama.cpp does."""
        with self._bodies.claim(key.tenant) as claim:
            call = await self._bodies.read(claim, exchange.read_body, lambda body: parse(body, ChatRequest)[0].call())
            model = await self._let_in(exchange, key, call.model)
            token_ids = await self._encode_to_count(
                model, call.messages or (), call.tools, key.tenant, more=call.template_words
            )
        await exchange.answer(200, msgspec.json.encode(CountedTokens(input_tokens=len(token_ids))))

    async def count_message(self, exchange: Exchange, key: ApiKey) -> None:
        """Answers how many tokens a conversation of Anthropic's API would have."""
        with anthropic_words(), self._bodies.claim(key.tenant) as claim:
            call = await self._bodies.read(
                claim, exchange.read_body, lambda body: parse(body, MessagesRequest)[0].counted_call()
            )
            model = await self._let_in(exchange, key, call.model)
            token_ids = await self._encode_to_count(
                model, call.messages or (), call.tools, key.tenant, more=call.template_words
            )
        await exchange.answer(200, msgspec.json.encode(CountedTokens(input_tokens=len(token_ids))))

    async def tokenize(self, exchange: Exchange, key: ApiKey) -> None:
        """Answers the token ids of a text, or of a conversation as an answer to it would be generated."""
        with self._bodies.claim(key.tenant) as claim:
            request, tools, words = await self._bodies.read(claim, exchange.read_body, _read_tokenize)
            model = await self._let_in(exchange, key, request.model)
            if request.messages is None:
                token_ids = await self._tokens_of_text(request, model, key.tenant)
            else:
                token_ids = await self._encode_to_count(model, request.messages, tools, key.tenant, more=words)
        max_tokens = self._requests.limits(model).context_length_tokens
        document: dict[str, Any] = {"count": len(token_ids), "max_model_len": max_tokens, "tokens": token_ids}
        if request.return_token_strs:
            document["token_strs"] = [model.tokenizer.token_name(token_id) for token_id in token_ids]
        if request.with_pieces:
            document["tokens"] = [{"id": one, "piece": _piece(model, one)} for one in token_ids]
        await exchange.answer(200, msgspec.json.encode(document))

    async def apply_template(self, exchange: Exchange, key: ApiKey) -> None:
        """Answers the text of a conversation as an answer to it would be generated."""
        with self._bodies.claim(key.tenant) as claim:
            request, tools, words = await self._bodies.read(claim, exchange.read_body, _read_tokenize)
            if request.messages is None:
                raise InvalidRequest("messages is missing", field="messages", code="missing_required_parameter")
            model = await self._let_in(exchange, key, request.model)
            token_ids = await self._encode_to_count(model, request.messages, tools, key.tenant, more=words)
            text = await model.tokenizer.decode_long(token_ids, skip_special_tokens=False, tenant=key.tenant)
        await exchange.answer(200, msgspec.json.encode({"prompt": text}))

    async def detokenize(self, exchange: Exchange, key: ApiKey) -> None:
        """Answers the text of token ids, special ones shown."""
        with self._bodies.claim(key.tenant) as claim:
            request, _ = await self._bodies.read(
                claim, exchange.read_body, lambda body: parse_members(body, DetokenizeRequest)
            )
            model = await self._let_in(exchange, key, request.model)
            token_ids = request.tokens
            if token_ids is None:
                raise InvalidRequest("tokens is missing", field="tokens", code="missing_required_parameter")
            check_token_ids(token_ids, model.limits, field_name="tokens")
            text = await model.tokenizer.decode_long(token_ids, skip_special_tokens=False, tenant=key.tenant)
        # The second name is llama.cpp's.
        await exchange.answer(200, msgspec.json.encode({"prompt": text, "content": text}))

    async def _let_in(self, exchange: Exchange, key: ApiKey, name: str | None) -> ServedModel:
        """Charges the tenant for a request and returns the model that it names.

        Raises PermissionDenied, RateLimited or NotFound.
        """
        catalog = self._requests.catalog
        self._door.check_model(key, catalog.name_of(name), asked=name)
        ticket = self._door.ticket(key.tenant)
        if ticket is not None:
            await ticket.charge_request()
        exchange.add_limits(ticket)
        return catalog.resolve(name)

    async def _tokens_of_text(self, request: TokenizeRequest, model: ServedModel, tenant: str) -> list[int]:
        assert request.prompt is not None
        check_text_to_count(request.prompt, field_name="prompt", max_chars=self._requests.catalog.max_tokenize_chars)
        adds_special = request.add_special_tokens is not False
        return await model.tokenizer.encode(request.prompt, add_special_tokens=adds_special, tenant=tenant)

    async def _encode_to_count(
        self,
        model: ServedModel,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None,
        tenant: str,
        *,
        more: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation that is only counted, so that no model's context bounds it."""
        most = self._requests.catalog.max_tokenize_chars
        try:
            return await encode_conversation(model.tokenizer, messages, tools, max_chars=most, more=more, tenant=tenant)
        except InvalidRequest as error:
            if error.code != "context_length_exceeded":
                raise
            raise InvalidRequest(
                f"{error.field} must have at most {most} characters", field=error.field, code="string_above_max_length"
            ) from error


def _read_tokenize(body: bytes) -> tuple[TokenizeRequest, list[dict[str, Any]] | None, Mapping[str, Any]]:
    """Returns the request, the tools that go with its messages, and variables of the chat template."""
    request, _ = parse_members(body, TokenizeRequest)
    if request.content is not None:
        if request.prompt is not None or request.add_special_tokens is not None:
            raise InvalidRequest("content is another name of prompt, with add_special", field="content")
        request.prompt, request.add_special_tokens = request.content, request.add_special is True
    elif request.add_special is not None:
        raise _misplaced("add_special", "content", "other members")
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is needed", field="prompt", code="invalid_value")
    if request.messages is None:
        for name in _OF_CHATS:
            if getattr(request, name):
                raise _misplaced(name, "messages", "prompt")
        if request.add_generation_prompt is False:
            raise _misplaced("add_generation_prompt", "messages", "prompt")
        return request, None, {}
    if request.add_special_tokens:
        # Templates write the special tokens themselves; a second set would be another prompt than is used.
        raise _misplaced("add_special_tokens", "prompt", "messages")
    words = template_words_in(request.chat_template_kwargs or {}, "chat_template_kwargs")
    prompt_end = end_of_prompt(
        request.messages,
        continues=request.continue_final_message,
        has_generation_prompt=request.add_generation_prompt,
    )
    return request, offered_tools(request.tools, None), {**words, **prompt_end}


def _piece(model: ServedModel, token_id: int) -> str | list[int]:
    """Returns the text of a token; its bytes where they are not whole characters."""
    tokenizer = model.tokenizer
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode() or tokenizer.token_name(token_id)
    except UnicodeDecodeError:
        return list(data)


_OF_CHATS = ("tools", "continue_final_message", "chat_template_kwargs")


def _misplaced(name: str, place: str, other: str) -> InvalidRequest:
    return InvalidRequest(f"{name} goes with {place}, not with {other}", field=name, code="unsupported_parameter")


def _stateless_call(body: bytes) -> Call:
    request, _ = parse(body, ResponsesRequest)
    request.check_stateless()
    return request.call()
