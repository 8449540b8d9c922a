"""`LLM` and `AsyncLLM`: prompts in, answers out, in this process. The second is the first one's inside."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np

from gateway.models.answer_text import AnswerText
from gateway.models.embedding import AUTO, EMBEDDINGS, read_rule
from gateway.models.model_files import read_model_files
from gateway.models.tokenizer import ModelTokenizer
from prefill_worker.embeddings import EmbeddingWish
from services.engine.steps.sequence import Pooling, Sampling
from services.engine.steps.step import NonFiniteLogits, NothingAllowed, PooledState
from services.hub.models import local_model
from services.hub.source import model_source
from services.runtime import extras
from services.runtime.errors import ConfigError, InvalidRequest, ModelError, TandemError
from services.structured.compiler import FormChecks, GrammarCompiler
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars, GrammarState
from tandem.engine import Listener, LocalEngine, worker_settings
from tandem.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, TokenLogprob
from tandem.params import SamplingParams
from worker.engine import Advance

Prompt = str | Sequence[int]
"""A text, or the token ids of one."""
Message = Mapping[str, Any]
DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
IN_FLIGHT_PER_PLACE = 2
"""Prompts that the engine knows of for each place in its batch; others of a long list wait outside of it."""

T = TypeVar("T")


class _Answer:
    """One answer as its tokens come."""

    def __init__(self, index: int, text: AnswerText, *, has_logprobs: bool) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.logprobs: list[TokenLogprob] | None = [] if has_logprobs else None
        self._decoded = text

    @property
    def has_ended(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def push(self, advance: Advance) -> bool:
        """Takes what a step brought; returns whether a text has ended the answer, which the engine does not know.

        Raises ModelError for logits that are no numbers, and NothingAllowed where its form leaves no token.
        """
        if isinstance(advance.outcome, NothingAllowed):
            raise advance.outcome
        if isinstance(advance.outcome, NonFiniteLogits):
            raise ModelError("the model's answer is not finite: its weights or its dtype do not fit")
        for token in advance.tokens:
            taken = self._decoded.push([token.token_id])
            self.text += taken.text
            if taken.num_tokens:
                self.token_ids.append(token.token_id)
                if self.logprobs is not None and token.logprob is not None:
                    self.logprobs.append(TokenLogprob(token.token_id, token.logprob, dict(token.top)))
            if taken.is_stopped:
                self.finish_reason = "stop"
                return advance.finish_reason is None
        if advance.finish_reason is not None:
            self.text += self._decoded.finish()
            self.finish_reason = advance.finish_reason
        return False

    def output(self) -> CompletionOutput:
        """The answer as it stands."""
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        return CompletionOutput(self.index, self.text, tuple(self.token_ids), self.finish_reason, logprobs)


_News = asyncio.Queue[tuple[_Answer, Advance | TandemError]]


def _note(news: _News, answer: _Answer, heard: Advance | TandemError) -> None:
    news.put_nowait((answer, heard))


class AsyncLLM:
    """A model in this process, for programs with an event loop; all calls are made on the same one.

    `model` is a checkpoint's folder or its name on the Hugging Face hub; the demo model if not given. `settings` are
    those of a decode worker about computing: `AsyncLLM("org/model", kv_memory="4GiB", threads=4)`. `embeddings` says
    whether the model embeds texts, as a gateway's --embeddings. Loading takes its time in the constructor. Raises
    ModelError or ConfigError.
    """

    def __init__(self, model: str | Path | None = None, *, embeddings: str = AUTO, **settings: object) -> None:
        if embeddings not in EMBEDDINGS:
            raise ConfigError(f"embeddings must be one of {', '.join(EMBEDDINGS)}, not {embeddings!r:.100}")
        extras.check("worker")
        folder = local_model(model_source().parse(str(DEMO_MODEL if model is None else model)))
        files = read_model_files(folder)
        self.tokenizer = ModelTokenizer(files)
        self._eos_token_ids = files.facts.eos_token_ids
        self._embedding = read_rule(folder, embeddings)
        self._engine = LocalEngine(worker_settings(str(folder), settings))
        vocabulary = self._engine.limits.vocab_size
        self._grammars = GrammarCompiler(Grammars(folder / "tokenizer.json", vocab_size=vocabulary))
        self._form_checks = FormChecks()
        self._numbers = itertools.count(1)
        self._places = asyncio.Semaphore(IN_FLIGHT_PER_PLACE * self._engine.max_batch)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields the answers to a prompt as they grow; the last one is complete. Leaving early cancels the rest.

        Raises InvalidRequest that names what is wrong, or WorkerUnavailable where the engine has ended.
        """
        token_ids = await self._token_ids(prompt)
        text = prompt if isinstance(prompt, str) else None
        name = request_id or f"request-{next(self._numbers)}"
        async for answers in self._answers(token_ids, params or SamplingParams()):
            yield RequestOutput(name, text, token_ids, tuple(answer.output() for answer in answers))

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields the answers to a conversation, which the model's own template writes as a prompt."""
        async for output in self.generate(await self.tokenizer.encode_chat(messages), params, request_id=request_id):
            yield output

    async def last(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Returns the complete answers to a prompt."""
        token_ids = await self._token_ids(prompt)
        answers: Sequence[_Answer] = ()
        async for grown in self._answers(token_ids, params or SamplingParams()):
            answers = grown
        text = prompt if isinstance(prompt, str) else None
        outputs = tuple(answer.output() for answer in answers)
        return RequestOutput(f"request-{next(self._numbers)}", text, token_ids, outputs)

    async def embed(
        self, prompt: Prompt, *, dimensions: int | None = None, request_id: str | None = None
    ) -> EmbeddingRequestOutput:
        """Returns the vector of a text, cut to its first `dimensions` numbers where the model is made for it.

        Raises InvalidRequest that names what is wrong or why the model embeds no texts, or WorkerUnavailable where the
        engine has ended.
        """
        if isinstance(self._embedding, str):
            raise InvalidRequest(f"the model gives no embeddings: {self._embedding}", field="model")
        rule = self._embedding.cut_to(dimensions)
        token_ids = await self._token_ids(prompt)
        self._check(token_ids, most=self._engine.limits.max_sequence_tokens)
        state = await self._pooled_state(token_ids, rule.pooling)
        vector = EmbeddingWish(rule.pooling, rule.num_dimensions, rule.is_normalized).vector(
            state, num_tokens=len(token_ids)
        )
        return EmbeddingRequestOutput(
            request_id or f"request-{next(self._numbers)}",
            prompt if isinstance(prompt, str) else None,
            token_ids,
            EmbeddingOutput(np.frombuffer(vector, "<f4").tolist()),
        )

    def close(self) -> None:
        """Ends what runs, and gives the model's memory back. May be called again."""
        self._engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.close)

    async def _token_ids(self, prompt: Prompt) -> list[int]:
        return await self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    async def _pooled_state(self, token_ids: list[int], pooling: Pooling) -> np.ndarray:
        """Returns what the engine has pooled of a prompt's hidden states, float32 [hidden]."""
        loop, heard, key = asyncio.get_running_loop(), asyncio.Queue[Advance | TandemError](), object()
        async with self._places:
            try:
                self._engine.begin(
                    key,
                    token_ids,
                    sampling=Sampling(max_tokens=1),
                    listener=_sending(loop, heard.put_nowait),
                    pooling=pooling,
                )
                while True:
                    advance = await heard.get()
                    if isinstance(advance, TandemError):
                        raise advance
                    if isinstance(advance.outcome, NonFiniteLogits):
                        raise ModelError("the text's vector is not finite: the model's weights or its dtype do not fit")
                    if advance.finish_reason is not None:
                        assert isinstance(advance.outcome, PooledState), "the last step of such a prompt pools it"
                        return advance.outcome.state
            finally:
                self._engine.free(key)

    async def _answers(self, token_ids: list[int], params: SamplingParams) -> AsyncIterator[Sequence[_Answer]]:
        """The answers after each step that brought one of them something."""
        loop, news = asyncio.get_running_loop(), _News()
        samplings = list(params.answers(room_tokens=self._room(token_ids), eos_token_ids=self._eos_token_ids))
        answers = [self._answer(index, sampling, params) for index, sampling in enumerate(samplings)]
        grammars = await self._grammars_of(params)
        async with self._places:
            with ExitStack() as held:
                for answer, sampling, grammar in zip(answers, samplings, grammars, strict=True):
                    held.callback(self._engine.free, answer)
                    listener = _sending(loop, partial(_note, news, answer))
                    self._engine.begin(answer, token_ids, sampling=sampling, listener=listener, grammar=grammar)
                while not all(answer.has_ended for answer in answers):
                    answer, advance = await news.get()
                    if isinstance(advance, TandemError):
                        raise advance
                    if answer.has_ended:  # by a text, which the engine has not heard yet
                        continue
                    if answer.push(advance):
                        self._engine.free(answer)
                    if advance.tokens:
                        yield answers

    async def _grammars_of(self, params: SamplingParams) -> Sequence[GrammarState | None]:
        """Returns a grammar for each answer, or None where it may be any text. Raises InvalidRequest."""
        if params.structured_outputs is None:
            return [None] * params.n
        if not self._eos_token_ids:
            raise InvalidRequest("the model has no token that ends an answer", field="structured_outputs")
        form = AnswerForm(await self._form_checks.written(params.structured_outputs.form()))
        await self._form_checks.check(form)
        eos_token_ids = sorted(self._eos_token_ids)
        return [await self._grammars.begin(form, eos_token_ids=eos_token_ids) for _ in range(params.n)]

    def _answer(self, index: int, sampling: Sampling, params: SamplingParams) -> _Answer:
        text = AnswerText(
            self.tokenizer.detokenizer(),
            stop_texts=params.stop_texts,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            min_tokens=params.min_tokens,
        )
        return _Answer(index, text, has_logprobs=params.logprobs is not None)

    def _room(self, token_ids: Sequence[int]) -> int:
        limit = self._engine.limits.max_sequence_tokens
        self._check(token_ids, most=limit - 1)
        return limit - len(token_ids)

    def _check(self, token_ids: Sequence[int], *, most: int) -> None:
        vocabulary = self._engine.limits.vocab_size
        if not token_ids:
            raise InvalidRequest("the prompt is empty", field="prompt")
        if any(not 0 <= token_id < vocabulary for token_id in token_ids):
            raise InvalidRequest(f"a prompt's token ids must be from 0 to {vocabulary - 1}", field="prompt")
        if len(token_ids) > most:
            raise InvalidRequest(f"the prompt has {len(token_ids)} tokens and there is room for {most}", field="prompt")


class LLM:
    """A model in this process: `LLM("org/model").generate(["Hello"], SamplingParams(max_tokens=40))`.

    Takes what AsyncLLM takes. Use it as a scope, or call `close`, to give the model's memory back.
    """

    def __init__(self, model: str | Path | None = None, *, embeddings: str = AUTO, **settings: object) -> None:
        self._inside = AsyncLLM(model, embeddings=embeddings, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tandem llm", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer and chat template."""
        return self._inside.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Returns the answers to each prompt, in the prompts' order; `params` are one for all, or one for each.

        Raises InvalidRequest that names what is wrong, or WorkerUnavailable where the engine has ended.
        """
        asked = _each(prompts)
        if isinstance(params, Sequence):
            if len(params) != len(asked):
                raise InvalidRequest(f"{len(params)} params are given for {len(asked)} prompts", field="params")
            each: Sequence[SamplingParams | None] = params
        else:
            each = [params] * len(asked)
        return self._run(self._all([self._inside.last(*both) for both in zip(asked, each, strict=True)]))

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Returns the answers to a conversation, or to each of several."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        encode = self._inside.tokenizer.encode_chat
        prompts = self._run(self._all([encode(conversation) for conversation in conversations]))
        return self.generate(prompts, params)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None
    ) -> list[EmbeddingRequestOutput]:
        """Returns the vector of each text, in the texts' order. Raises what `AsyncLLM.embed` does."""
        embed = self._inside.embed
        return self._run(self._all([embed(prompt, dimensions=dimensions) for prompt in _each(prompts)]))

    def close(self) -> None:
        """Ends what runs, and gives the model's memory back. May be called again."""
        self._inside.close()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @staticmethod
    async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Runs them beside each other; the first error cancels the others."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
        return [task.result() for task in tasks]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except KeyboardInterrupt:
            future.cancel()
            raise


def _sending(loop: asyncio.AbstractEventLoop, take: Listener) -> Listener:
    """Returns a listener that has the event loop, unless it has ended, call another one."""

    def send(heard: Advance | TandemError) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(take, heard)

    return send


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
