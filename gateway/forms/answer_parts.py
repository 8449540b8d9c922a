"""The parts of a chat's answers, whichever API shows them: reasoning, calls, and their sizes."""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.forms.tools import names_of
from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tool_calls import MARK, AnswerParser
from services.structured.form import ToolFormat


class AnswerParts:
    """The parts to look for in a call's chat answers: calls of these tools, and reasoning where the template has it.

    `prompts` holds the token ids of each answer's prompt. `is_strict`: some of the tools are; where a token begins
    calls, nothing else does then, because an answer's form keeps only what follows that token to a schema. `is_forced`:
    the answers are calls and nothing else.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        is_strict: bool = False,
        is_forced: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._tool_format = tokenizer.tool_format if tools else None
        self._tool_names = names_of(tools or ())
        self._request_id = request_id
        self._prompts = prompts
        self._is_forced = is_forced and self._tool_format is not None
        self._has_marks = is_strict and bool(tools) and tokenizer.has_call_token
        self.are_looked_for = self._tool_format is not None or tokenizer.has_reasoning

    def parser(self, index: int) -> AnswerParser:
        """Returns a new parser for the text of one answer."""
        return AnswerParser(
            tool_format=self._tool_format,
            names=self._tool_names,
            has_reasoning=self._tokenizer.has_reasoning,
            is_reasoning=self._tokenizer.opens_reasoning(self._prompts[index]),
            is_forced=self._is_forced,
            marks=CallMarks(self._tokenizer) if self._has_marks else None,
        )

    def call_id(self, index: int, number: int) -> str:
        """Returns a call's id, which each writer of the answer makes alike. Mistral's have nine letters and digits."""
        digits = hashlib.sha256(f"{self._request_id}/{index}/{number}".encode()).hexdigest()
        return digits[:9] if self._tool_format is ToolFormat.MISTRAL else f"call_{digits[:24]}"


class CallMarks:
    """Finds in an answer's text the tokens that begin calls; the same text from other tokens is only text."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._token_id, self._mark = tokenizer.call_token
        self._num_chars = 0
        self._starts: deque[int] = deque()
        """Where the marks begin that are not put into a text yet."""
        self._num_read = 0
        self._held = ""

    def put_into(self, text: str, token_ids: Sequence[int]) -> str:
        """Returns the text with MARK for each such token; the beginning of one is held back."""
        for token_id in token_ids:
            shown = self._detokenizer.push((token_id,))
            self._num_chars += len(shown)
            if token_id == self._token_id and shown.endswith(self._mark):
                self._starts.append(self._num_chars - len(self._mark))
        text = self._held + text
        parts, done = [], 0
        while self._starts and (start := self._starts[0] - self._num_read) + len(self._mark) <= len(text):
            parts += [text[done:start], MARK]
            done = start + len(self._mark)
            self._starts.popleft()
        end = self._starts[0] - self._num_read if self._starts else len(text)
        parts.append(text[done:end])
        self._held = text[end:]
        self._num_read += len(text) - len(self._held)
        return "".join(parts)

    def finish(self) -> str:
        """Returns what was held back."""
        return self._held


class ReasoningTokens:
    """Counts the tokens up to where the answer proper begins; none of an answer without reasoning.

    `parser` is one of the answer's own, that has read nothing, for a model that has reasoning.
    """

    def __init__(self, tokenizer: ModelTokenizer, parser: AnswerParser) -> None:
        assert parser.reasoning is not None
        self._detokenizer = tokenizer.detokenizer()
        self._parser = parser.reasoning
        self._num_read = 0
        self._has_reasoning = False
        self._is_over = False

    @property
    def num_tokens(self) -> int:
        """The number so far."""
        return self._num_read if self._has_reasoning else 0

    def push(self, token_ids: Sequence[int]) -> int:
        """Takes the next tokens of the answer; returns how many more are now known to come before the answer proper.

        Those at the beginning become so later, where they may belong to `<think>` or to the answer.
        """
        num_before = self.num_tokens
        for token_id in () if self._is_over else token_ids:
            pieces = self._parser.push(self._detokenizer.push((token_id,)))
            self._has_reasoning = self._has_reasoning or self._parser.is_inside
            self._is_over = bool(pieces) and not self._parser.is_inside
            if self._is_over:
                break
            self._num_read += 1
        return self.num_tokens - num_before
