"""Answers of OpenAI's Responses API: output items, and the events from which a client builds them.

Knows the spelling of the API and nothing of serving it. The items are a function of the answer's text, and so is the
place of each event among them, whichever tokens came together on their way: a stream that another gateway resumes
continues with the first character that its client does not have.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.forms.answer_parts import AnswerParts, ReasoningTokens
from gateway.forms.tools import forced_names, offered_tools, strict_names
from gateway.models.answer_pieces import Arguments, CallStart, Piece, Reasoning
from gateway.models.tokenizer import ModelTokenizer
from gateway.named.journal import event_id_error
from gateway.openai.answers import (
    ChatTokenLogprob,
    CompletionTokensDetails,
    InputTokensDetails,
    Response,
    ResponseUsage,
)
from gateway.openai.responses_request import ResponsesRequest, in_own_words
from gateway.openai.responses_tools import own_names
from gateway.openai.writer import Head, PartsWriter, Whole, shown_logprobs
from gateway.types import FinishReason, TokenLogprobs, Usage

_MARK = re.compile(r"(.*);(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})")
"""The id of an event: the journal's, the event's number, and its place."""

MESSAGE = "message"
REASONING = "reasoning"
FUNCTION_CALL = "function_call"
_ID_PREFIXES = {MESSAGE: "msg", REASONING: "rs", FUNCTION_CALL: "fc"}
_DELTA_EVENTS = {
    MESSAGE: "response.output_text.delta",
    REASONING: "response.reasoning_text.delta",
    FUNCTION_CALL: "response.function_call_arguments.delta",
}


class Item(msgspec.Struct, kw_only=True):
    """One item of the output while it grows. `texts` are parts of its text, reasoning or arguments."""

    kind: str
    id: str
    index: int
    name: str = ""
    namespace: str = ""
    call_id: str = ""
    status: str = "in_progress"
    texts: list[str] = msgspec.field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = msgspec.field(default_factory=list)
    """Log-probabilities of a message's tokens, where they are asked for."""

    @property
    def text(self) -> str:
        """Its whole text."""
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        """Returns the content part with the text of a message or of reasoning."""
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def document(self) -> dict[str, Any]:
        """Returns the item as it is now."""
        document: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == FUNCTION_CALL:
            named = {"namespace": self.namespace, "name": self.name} if self.namespace else {"name": self.name}
            return {**document, "call_id": self.call_id, **named, "arguments": self.text}
        content = [self.part()] if self.texts or self.status != "in_progress" else []
        if self.kind == REASONING:
            return {**document, "summary": [], "content": content}
        return {**document, "role": "assistant", "content": content}


class ResponsesWriter(PartsWriter):
    """Writes /v1/responses. Each request has one answer.

    Events are numbered without gaps in each client's stream. An event's place counts the events before it, a delta as
    many times as it has characters, so it does not depend on how the text was divided into deltas.
    """

    object_name = "response"
    end = b""

    def __init__(
        self, tokenizer: ModelTokenizer, request: ResponsesRequest, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None:
        tools = offered_tools(request.chat_tools(), request.chat_tool_choice())
        is_strict = bool(strict_names(request.chat_tools()))
        parts = AnswerParts(
            tokenizer,
            tools,
            request_id=head.request_id,
            prompts=prompts,
            is_strict=is_strict,
            is_forced=bool(forced_names(tools, request.chat_tool_choice())),
        )
        self._request_id = head.request_id
        self._head = response_head(request, head)
        self._call_id = parts.call_id
        self._own_names = own_names(request.tools or ())
        self._parser = parts.parser(0)
        self._is_parallel = request.parallel_tool_calls is not False
        self._reasoning = ReasoningTokens(tokenizer, parts.parser(0)) if tokenizer.has_reasoning else None
        self._tokenizer = tokenizer
        self._unshown: list[ChatTokenLogprob] = []
        """Log-probabilities of tokens whose text is held back."""
        self._items: list[Item] = []
        self._open: Item | None = None
        self._place = 1
        """The last event's place; the two events of the opening are sent unless the client has them."""
        self._number = -1
        self._has_place = -1
        """The place up to which the client has everything."""
        self._events: list[tuple[str, bytes]] = []
        """Events that are not written yet, each with its number and place."""
        self._marks: list[str] = []
        """The numbers and places of the events that were written last."""

    @staticmethod
    def journal_event_id(event_id: str) -> str:
        """Returns the id without number and place."""
        return _parse_mark(event_id)[0]

    def go_on_after(self, event_id: str) -> None:
        """Skips the stream up to the event with this id, which the client has."""
        _, self._number, self._has_place = _parse_mark(event_id)

    def whole(self, answers: Sequence[Whole]) -> bytes:
        """Returns the body of an answer that is not streamed."""
        (answer,) = answers
        self._has_place = sys.maxsize  # nobody reads events
        self._read(answer.token_ids, answer.text, answer.logprobs)
        self._finish(answer.finish_reason)
        return _encode(self._ended(answer.finish_reason, answer.usage))

    def opening(self, index: int) -> bytes:
        """Returns the events that announce the response."""
        self._place = -1
        for kind in ("created", "in_progress"):
            self._event(f"response.{kind}", response=self._document("in_progress"))
        return self._written()

    def with_ids(self, event: bytes, *, before: str, after: str) -> bytes:
        """Returns the events with ids; only the last one's id stands for all that the journal's next id does."""
        blocks = event.split(b"\n\n")[:-1]
        ids = [before] * (len(blocks) - 1) + [after]
        return b"".join(
            b"%b\nid: %b;%b\n\n" % (block, event_id.encode(), mark.encode())
            for block, event_id, mark in zip(blocks, ids, self._marks, strict=True)
        )

    def error(self, error_object: Mapping[str, Any]) -> bytes:
        """Returns the events with the error and with the response as far as it has come."""
        error = error_object["error"]
        self._has_place = -1
        message, param = in_own_words(error["message"]), error["param"] and in_own_words(error["param"])
        self._event("error", code=error["code"], message=message, param=param)
        if self._open is not None:
            self._open.status = "incomplete"
        code = "rate_limit_exceeded" if error["type"] == "rate_limit_error" else "server_error"
        failed = self._document("failed", error={"code": code, "message": message}, store=False)
        self._event("response.failed", response=failed)
        return self._written()

    def _read(self, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        num_reasoning = 0 if self._reasoning is None else self._reasoning.push(token_ids)
        if logprobs is not None:
            self._unshown += shown_logprobs(self._tokenizer, token_ids, logprobs)
            del self._unshown[:num_reasoning]
        self._take(self._parser.push(text, token_ids))

    def _take(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, CallStart | Arguments) and piece.index and not self._is_parallel:
                # The client asked for one call at a time and gets the first; the model was not told of the wish.
                continue
            if isinstance(piece, CallStart):
                self._begin(FUNCTION_CALL, name=piece.name, call_id=self._call_id(0, piece.index))
            elif piece.text:
                self._add(piece)

    def _add(self, piece: Any) -> None:
        kind = FUNCTION_CALL if isinstance(piece, Arguments) else REASONING if isinstance(piece, Reasoning) else MESSAGE
        item = self._open if self._open is not None and self._open.kind == kind else self._begin(kind)
        item.texts.append(piece.text)
        at = self._at(item)
        if kind == MESSAGE:
            at["logprobs"] = self._show_logprobs(item)
        num_lacking = self._place + len(piece.text) - self._has_place
        shown = piece.text[-num_lacking:] if 0 < num_lacking < len(piece.text) else piece.text
        self._event(_DELTA_EVENTS[kind], length=len(piece.text), **at, delta=shown)

    def _begin(self, kind: str, *, name: str = "", call_id: str = "") -> Item:
        self._close(is_cut=False)
        index = len(self._items)
        digits = hashlib.sha256(f"{self._request_id}/{index}".encode()).hexdigest()
        item_id = f"{_ID_PREFIXES[kind]}_{digits[:24]}"
        namespace, name = self._own_names.get(name, ("", name))
        item = Item(kind=kind, id=item_id, index=index, name=name, namespace=namespace, call_id=call_id)
        self._open = item
        self._items.append(item)
        self._event("response.output_item.added", output_index=index, item=item.document())
        if kind != FUNCTION_CALL:
            self._event("response.content_part.added", **self._at(item), part=item.part())
        return item

    def _close(self, *, is_cut: bool) -> None:
        """Ends the open item. `is_cut`: the answer ends here although the model had more to say."""
        item, self._open = self._open, None
        if item is None:
            return
        text, at = item.text, self._at(item)
        if item.kind == FUNCTION_CALL:
            is_cut = not _is_json(text)
            self._event("response.function_call_arguments.done", **at, name=item.name, arguments=text)
        else:
            if item.kind == MESSAGE:
                self._show_logprobs(item)
                self._event("response.output_text.done", **at, logprobs=item.logprobs, text=text)
            else:
                self._event("response.reasoning_text.done", **at, text=text)
            self._event("response.content_part.done", **at, part=item.part())
        item.status = "incomplete" if is_cut else "completed"
        self._event("response.output_item.done", output_index=item.index, item=item.document())

    def _end(self, finish_reason: FinishReason, usage: Usage) -> None:
        self._finish(finish_reason)
        response = self._ended(finish_reason, usage)
        self._event(f"response.{response.status}", response=response)

    def _finish(self, finish_reason: str) -> None:
        """Ends the answer; one without any text is an empty message."""
        self._take(self._parser.finish())
        if not self._items:
            self._begin(MESSAGE)
        self._close(is_cut=finish_reason != "stop")

    def _ended(self, finish_reason: str, usage: Usage) -> Response:
        num_reasoning = 0 if self._reasoning is None else self._reasoning.num_tokens
        shown = _usage(usage, num_reasoning_tokens=num_reasoning)
        if finish_reason == "stop":
            return self._document("completed", usage=shown)
        return self._document("incomplete", usage=shown, incomplete_details={"reason": "max_output_tokens"})

    def _document(self, status: str, **more: Any) -> Response:
        output = [item.document() for item in self._items]
        return msgspec.structs.replace(self._head, status=status, output=output, **more)

    def _at(self, item: Item) -> dict[str, Any]:
        """Returns the members that say where in the output an event belongs."""
        at = {"item_id": item.id, "output_index": item.index}
        return at if item.kind == FUNCTION_CALL else {**at, "content_index": 0}

    def _show_logprobs(self, item: Item) -> list[ChatTokenLogprob]:
        """Returns those that came since the last time, which belong to this message."""
        shown, self._unshown = self._unshown, []
        item.logprobs += shown
        return shown

    def _event(self, kind: str, *, length: int = 1, **members: Any) -> None:
        self._place += length
        if self._place <= self._has_place:
            return
        self._number += 1
        data = _encode({"type": kind, "sequence_number": self._number, **members})
        event = b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
        self._events.append((f"{self._number}.{self._place}", event))

    def _written(self) -> bytes:
        """Returns the events since the last time."""
        events, self._events = self._events, []
        self._marks = [mark for mark, _ in events]
        return b"".join(event for _, event in events)


def response_head(request: ResponsesRequest, head: Head) -> Response:
    """Returns the response before its output; members without a meaning here are repeated."""
    reasoning = request.reasoning
    return Response(
        id=f"resp_{head.request_id}",
        object="response",
        created_at=head.created_unix_s,
        status="in_progress",
        background=bool(request.background),
        conversation=None if request.conversation_id is None else {"id": request.conversation_id},
        error=None,
        incomplete_details=None,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=head.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": reasoning and reasoning.effort, "summary": None},
        safety_identifier=request.safety_identifier,
        service_tier="default",
        store=bool(request.store),
        system_fingerprint=head.system_fingerprint,
        temperature=1.0 if request.temperature is None else request.temperature,
        text={"format": request.shown_format()},
        tool_choice=request.shown_tool_choice(),
        tools=request.shown_tools(),
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        truncation="disabled",
        usage=None,
        user=request.user,
    )


def _usage(usage: Usage, *, num_reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        # Pages are cached unasked and cost nothing, so nothing counts as written.
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens, cache_write_tokens=0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _parse_mark(event_id: str) -> tuple[str, int, int]:
    """Returns the journal's id, number and place. Raises InvalidRequest for what `with_ids` cannot have written."""
    found = _MARK.fullmatch(event_id)
    if found is None:
        raise event_id_error("it is no id of an event of this endpoint")
    return found[1], int(found[2]), int(found[3])


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


_encode = msgspec.json.Encoder().encode
