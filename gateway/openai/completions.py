"""The completions API: its requests, and the writing of its answers with the offsets of their tokens."""

import itertools
from collections.abc import Sequence
from typing import Annotated, Any

from gateway.limits import MAX_SEQUENCES, prompt_form_error
from gateway.models.tokenizer import ModelTokenizer
from gateway.openai.answers import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
)
from gateway.openai.requests import ChoicesRequest, asked_sampling, check_whole
from gateway.openai.shapes import ABSENT, PROMPT, flag, parameter, said
from gateway.openai.synonyms import agreed_max_tokens, is_unbounded
from gateway.openai.writer import ChoicesWriter, Head, Whole, encode, finite
from gateway.requests.call import Call
from gateway.types import Delta, FinishReason, TokenLogprobs
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import MAX_TOKENS_EVER

DEFAULT_COMPLETION_TOKENS = 16
"""The length of answers when max_tokens is absent, as in OpenAI's API."""


class CompletionRequest(ChoicesRequest, kw_only=True):
    """Body of POST /v1/completions."""

    REQUIRED = ("prompt",)

    max_tokens: Annotated[int | None, parameter("max_tokens", **{ABSENT: DEFAULT_COMPLETION_TOKENS})] = None
    prompt: Annotated[
        Any,
        said(f"A text, token ids, or a list of either: each gets its answers, {MAX_SEQUENCES} in all.", anyOf=PROMPT),
    ] = None
    logprobs: Annotated[int | None, parameter("logprobs")] = None
    best_of: Annotated[int | None, said("Only with the value of `n`.")] = None
    echo: Annotated[
        bool | None,
        flag("The prompt's text comes before the answer; with `logprobs` its tokens' too, but not in a stream."),
    ] = None

    def call(self) -> Call:
        """Returns the call that it asks for. Raises InvalidRequest."""
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            raise InvalidRequest(
                "best_of is only supported with the value of n", field="best_of", code="unsupported_parameter"
            )
        max_tokens = agreed_max_tokens(self, "max_tokens")
        sampling = asked_sampling(self, max_tokens=max_tokens, logprobs=self.logprobs)
        prompt_logprobs_field = "prompt_logprobs"
        if self.echo and self.logprobs is not None:
            check_whole(self, "echo with logprobs", field="echo")
            if self.prompt_logprobs is None or self.logprobs > self.prompt_logprobs:
                sampling.prompt_logprobs, prompt_logprobs_field = self.logprobs, "logprobs"
        if sampling.max_tokens is None and not is_unbounded(self):
            sampling.max_tokens = min(max(DEFAULT_COMPLETION_TOKENS, sampling.min_tokens or 0), MAX_TOKENS_EVER)
        call = self.begun_call("text_completion", sampling)
        call.prompts, call.prompt_logprobs_field = _prompts(self.prompt), prompt_logprobs_field
        return call


class CompletionWriter(ChoicesWriter):
    """Writes /v1/completions; `text_offset` of log-probabilities counts characters of the answer.

    With `echo` a prompt's text comes before its answers: as the client wrote it, or what its token ids stand for.
    """

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    chunk_type = CompletionChunk
    id_prefix = "cmpl"

    def __init__(
        self, tokenizer: ModelTokenizer, request: CompletionRequest, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(tokenizer, request, head=head, prompts=prompts)
        self._num_chars: dict[int, int] = {}
        self._echoed = _prompts(request.prompt) if request.echo else []
        self._num_logprobs = request.logprobs or 0
        self._num_choices = request.n or 1

    def whole(self, answers: Sequence[Whole]) -> bytes:
        """Returns the body; the first answer to a prompt has its log-probabilities, which the others show too."""
        for answer in answers:
            first = answers[answer.index - answer.index % self._num_choices]
            answer.prompt_logprobs, answer.prompt_candidates = first.prompt_logprobs, first.prompt_candidates
        choices = [self._whole_choice(answer) for answer in answers]
        usage = self._whole_usage(answers)
        return encode(Completion(**self._head, object="text_completion", choices=choices, usage=usage))

    def skip(self, index: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Counts these tokens' characters, after which offsets continue."""
        self._num_chars[index] = sum(len(self._tokenizer.token_text(token_id)) for token_id in token_ids)

    def opening(self, index: int) -> bytes:
        """Returns the event with the prompt, where it is echoed."""
        text = self._echo(index)
        if not text:
            return b""
        choice = CompletionChunkChoice(index=index, text=text, logprobs=None, finish_reason=None)
        return self._event(choice, self._no_usage_yet(index))

    def _echo(self, index: int) -> str:
        if not self._echoed:
            return ""
        prompt = self._echoed[index // self._num_choices]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

    def _whole_choice(self, answer: Whole) -> CompletionChoice:
        return CompletionChoice(
            index=answer.index,
            text=self._echo(answer.index) + answer.text,
            logprobs=self._whole_logprobs(answer),
            finish_reason=answer.finish_reason,
            prompt_logprobs=self._prompt_logprobs(answer),
            token_ids=self._shown_ids(answer.token_ids),
            prompt_token_ids=self._shown_prompt(answer.index),
        )

    def _text_choice(self, index: int, delta: Delta) -> CompletionChunkChoice:
        choice = CompletionChunkChoice(
            index=index,
            text=delta.text,
            logprobs=self._logprobs(index, delta.token_ids, delta.logprobs),
            finish_reason=None,
            token_ids=self._shown_ids(delta.token_ids),
        )
        if self._has_token_ids and delta.first_index == 0:
            choice.prompt_token_ids = self._shown_prompt(index)
        return choice

    def _last_choice(self, index: int, finish_reason: FinishReason) -> CompletionChunkChoice:
        return CompletionChunkChoice(index=index, text="", logprobs=None, finish_reason=finish_reason)

    def _whole_logprobs(self, answer: Whole) -> CompletionLogprobs | None:
        """Returns those of the prompt too where it is echoed, with nothing for its first token."""
        if not self._echoed or answer.logprobs is None:
            return self._logprobs(answer.index, answer.token_ids, answer.logprobs)
        first, *rest = answer.prompt_token_ids
        told = [] if answer.prompt_logprobs is None else answer.prompt_logprobs.entries()
        entries = [TokenLogprobs(entry.logprob, entry.top[: self._num_logprobs]) for entry in told]
        first_text = self._tokenizer.token_text(first)
        # The token that begins a text is not in what the client wrote.
        is_shown = self._echo(answer.index).startswith(first_text)
        self._num_chars[answer.index] = len(first_text) if is_shown else 0
        shown = self._logprobs(answer.index, [*rest, *answer.token_ids], [*entries, *answer.logprobs])
        assert shown is not None
        return CompletionLogprobs(
            tokens=[self._shown_token(first), *shown.tokens],
            token_logprobs=[None, *shown.token_logprobs],
            top_logprobs=[None, *shown.top_logprobs],
            text_offset=[0, *shown.text_offset],
        )

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs] | None
    ) -> CompletionLogprobs | None:
        if entries is None:
            return None
        lengths = [len(self._tokenizer.token_text(token_id)) for token_id in token_ids]
        texts = [self._shown_token(token_id) for token_id in token_ids]
        offsets = list(itertools.accumulate(lengths, initial=self._num_chars.get(index, 0)))
        self._num_chars[index] = offsets.pop()
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[finite(entry.logprob) for entry in entries],
            top_logprobs=[
                {self._shown_token(token_id): finite(logprob) for token_id, logprob in entry.top}
                | {text: finite(entry.logprob)}
                for text, entry in zip(texts, entries, strict=True)
            ],
            text_offset=offsets,
        )


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Returns the prompts of a text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise prompt_form_error()
    kinds = set(map(type, prompt))
    if kinds == {str} or kinds == {list}:
        return prompt
    if str in kinds or list in kinds:
        raise prompt_form_error()
    return [prompt]
