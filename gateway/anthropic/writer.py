"""Answers of Anthropic's Messages API: content blocks, and the events from which a client builds them.

Knows the spelling of the API and nothing of serving it. A block is a run of pieces of one kind, or one call.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.anthropic.answers import AnthropicMessage, MessageUsage, StopReason, ThinkingTokens
from gateway.anthropic.errors import error_event
from gateway.anthropic.request import MessagesRequest
from gateway.anthropic.turns import chat_tool_choice
from gateway.forms.answer_parts import AnswerParts, ReasoningTokens
from gateway.forms.tools import forced_names, offered_tools, strict_names
from gateway.models.answer_pieces import Arguments, CallStart, Piece, Reasoning
from gateway.models.conversation import completed_object
from gateway.models.tokenizer import ModelTokenizer
from gateway.named.journal import event_id_error
from gateway.openai.writer import Head, PartsWriter, Whole, encode
from gateway.types import FinishReason, TokenLogprobs, Usage

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"


class Block(msgspec.Struct, kw_only=True):
    """One content block while it grows. `texts` are parts of its text, thoughts or arguments."""

    kind: str
    name: str = ""
    call_id: str = ""
    texts: list[str] = msgspec.field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Returns the block as it is now."""
        text = "".join(self.texts)
        if self.kind == TOOL_USE:
            arguments = (completed_object(text) if text else None) or {}
            return {"type": TOOL_USE, "id": self.call_id, "name": self.name, "input": arguments}
        return {"type": TEXT, "text": text} if self.kind == TEXT else _thoughts(text)

    def delta(self, text: str) -> dict[str, Any]:
        """Returns what an event says of its next part."""
        if self.kind == TOOL_USE:
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.kind}_delta", self.kind: text}


def _thoughts(text: str) -> dict[str, Any]:
    # Nothing is signed: thoughts that come back are text like any other.
    return {"type": THINKING, "thinking": text, "signature": ""}


class MessagesWriter(PartsWriter):
    """Writes /v1/messages. Each request has one answer."""

    object_name = "message"
    end = b""
    id_headers = (b"x-request-id", b"request-id")
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self, tokenizer: ModelTokenizer, request: MessagesRequest, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None:
        choice, is_parallel = chat_tool_choice(request.tool_choice)
        chat_tools = request.chat_tools()
        tools = offered_tools(chat_tools, choice)
        parts = AnswerParts(
            tokenizer,
            tools,
            request_id=head.request_id,
            prompts=prompts,
            is_strict=bool(strict_names(chat_tools)),
            is_forced=bool(forced_names(tools, choice)),
        )
        self._head = head
        self._call_id = parts.call_id
        self._parser = parts.parser(0)
        self._is_parallel = is_parallel is not False
        self._reasoning = ReasoningTokens(tokenizer, parts.parser(0)) if tokenizer.has_reasoning else None
        self._stop_texts = tuple(request.stop_sequences or ()) or _texts(request.stop)
        self._whole_text = tokenizer.detokenizer() if self._stop_texts else None
        self._texts: list[str] = []
        """All text of the tokens so far, where a stop text may be in it."""
        self._num_chars = 0
        """The number of characters of the answer."""
        self._num_prompt_tokens = len(prompts[0])
        self._blocks: list[Block] = []
        self._is_open = False
        self._events: list[bytes] = []

    @staticmethod
    def journal_event_id(event_id: str) -> str:
        """Raises InvalidRequest: events have no ids here."""
        raise event_id_error("streams of this endpoint cannot be resumed")

    def whole(self, answers: Sequence[Whole]) -> bytes:
        """Returns the body of an answer that is not streamed."""
        (answer,) = answers
        self._read(answer.token_ids, answer.text, answer.logprobs)
        self._finish()
        reason, stop_text = self._stop_reason(answer.finish_reason)
        return encode(self._message(self._usage(answer.usage), reason, stop_text))

    def opening(self, index: int) -> bytes:
        """Returns the event that announces the message."""
        usage = MessageUsage(input_tokens=self._num_prompt_tokens, output_tokens=0)
        self._event("message_start", message=self._message(usage, None, None))
        return self._written()

    def with_ids(self, event: bytes, *, before: str, after: str) -> bytes:
        """Returns the events as they are: no client of this API asks for the rest of a stream."""
        return event

    def error(self, error_object: Mapping[str, Any]) -> bytes:
        """Returns the event with the error."""
        return b"event: error\ndata: %b\n\n" % error_event(error_object)

    def _read(self, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        if self._reasoning is not None:
            self._reasoning.push(token_ids)
        if self._whole_text is not None:
            self._texts.append(self._whole_text.push(token_ids))
        self._num_chars += len(text)
        self._take(self._parser.push(text, token_ids))

    def _take(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, CallStart | Arguments) and piece.index and not self._is_parallel:
                # The client asked for one call at a time and gets the first; the model was not told of the wish.
                continue
            if isinstance(piece, CallStart):
                call_id = self._call_id(0, piece.index).replace("call_", "toolu_")
                self._begin(Block(kind=TOOL_USE, name=piece.name, call_id=call_id))
            elif piece.text:
                kind = TOOL_USE if isinstance(piece, Arguments) else THINKING if isinstance(piece, Reasoning) else TEXT
                if not self._is_open or self._blocks[-1].kind != kind:
                    self._begin(Block(kind=kind))
                block = self._blocks[-1]
                block.texts.append(piece.text)
                self._event("content_block_delta", index=len(self._blocks) - 1, delta=block.delta(piece.text))

    def _begin(self, block: Block) -> None:
        self._close()
        self._blocks.append(block)
        self._is_open = True
        self._event("content_block_start", index=len(self._blocks) - 1, content_block=block.document())

    def _close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._event("content_block_stop", index=len(self._blocks) - 1)

    def _finish(self) -> None:
        """Ends the answer; one without any text is an empty block, as clients look at the first."""
        self._take(self._parser.finish())
        if not self._blocks:
            self._begin(Block(kind=TEXT))
        self._close()

    def _end(self, finish_reason: FinishReason, usage: Usage) -> None:
        self._finish()
        reason, stop_text = self._stop_reason(finish_reason)
        shown = self._usage(usage)
        shown.service_tier = msgspec.UNSET
        self._event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop_text}, usage=shown)
        self._event("message_stop")

    def _stop_reason(self, finish_reason: FinishReason) -> tuple[StopReason, str | None]:
        """Returns why the answer ended, and the stop text that ended it."""
        if finish_reason == "length":
            return "max_tokens", None
        behind = "".join(self._texts)[self._num_chars :]
        for stop_text in self._stop_texts:
            if behind.startswith(stop_text):
                return "stop_sequence", stop_text
        return ("tool_use" if self._parser.num_complete_calls else "end_turn"), None

    def _usage(self, usage: Usage) -> MessageUsage:
        shown = MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
        )
        if self._reasoning is not None:
            shown.output_tokens_details = ThinkingTokens(thinking_tokens=self._reasoning.num_tokens)
        return shown

    def _message(self, usage: MessageUsage, reason: StopReason | None, stop_text: str | None) -> AnthropicMessage:
        return AnthropicMessage(
            id=f"msg_{self._head.request_id}",
            model=self._head.model,
            content=[block.document() for block in self._blocks],
            stop_reason=reason,
            stop_sequence=stop_text,
            usage=usage,
        )

    def _event(self, kind: str, **members: Any) -> None:
        data = encode({"type": kind, **members})
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def _written(self) -> bytes:
        """Returns the events since the last time."""
        events, self._events = self._events, []
        return b"".join(events)


def _texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) and stop else tuple(stop or ())
