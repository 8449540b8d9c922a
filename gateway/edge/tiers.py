"""The answers to a request for a tier: by its cheap model, or by the stronger one where a rule or a check says so.

With a check nothing is sent before the answers are complete and have passed it. The stronger model's are not checked,
and where it gives none, those that failed are sent. A named request keeps to the model that it began with, so
its answers are not checked.
"""

import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

from gateway.access.keys import ApiKey
from gateway.edge.generate import Answers, Generator, Known, OnTaken, TakeNow
from gateway.models.tiers import Tier
from gateway.named.ask import Ask
from gateway.named.reader import Part
from gateway.openai.writer import Whole
from gateway.requests.call import Call
from gateway.types import Delta, Usage
from services.runtime.errors import RequestCancelled, TandemError

logger = logging.getLogger(__name__)


class Begin(Protocol):
    """Begins the answers of the model that the call names now."""

    def __call__(self, *, on_taken: OnTaken) -> contextlib.AbstractAsyncContextManager[Answers]:
        """Returns the block in which they are generated."""


class TieredGenerator(Generator):
    """Begins answers as `Generator` does, and knows tiers."""

    def answers(
        self, asked: Call | Ask, key: ApiKey, *, on_taken: OnTaken
    ) -> contextlib.AbstractAsyncContextManager[Answers]:
        """The answers that a caller with this key asks for, as of `Generator`; their `tier` says why a model answers.

        Raises what the models raise.
        """
        call = asked.call if isinstance(asked, Ask) else asked
        found = None if call is None else self._requests.catalog.tier_of(call.model)
        if call is None or found is None:
            return super().answers(asked, key, on_taken=on_taken)
        begin = functools.partial(super().answers, asked, key)
        call.model, tier = found
        return self._tiered(begin, call, tier, is_named=call is not asked, on_taken=on_taken)

    @contextlib.asynccontextmanager
    async def _tiered(
        self, begin: Begin, call: Call, tier: Tier, *, is_named: bool, on_taken: OnTaken
    ) -> AsyncIterator[Answers]:
        may_be_stronger = call.allowed_models is None or tier.stronger in call.allowed_models
        why = await tier.why_stronger(_texts(call)) if may_be_stronger else ""
        if why:
            call.model = tier.stronger
        if why or is_named or not (may_be_stronger and tier.has_check):
            async with begin(on_taken=on_taken) as answers:
                yield self._told(answers, tier, why or "cheap")
            return
        async with begin(on_taken=on_taken) as answers:
            held = _HeldAnswers(answers, await answers.wholes())
        failed = next(filter(None, (tier.failed_check(each.text, each.finish_reason) for each in held.whole)), "")
        why = f"check_{failed}" if failed else "cheap"
        if failed:
            call.model, call.request_id = tier.stronger, held.request_id
            try:
                async with begin(on_taken=_nobody) as answers:
                    held = _HeldAnswers(answers, await answers.wholes())
            except RequestCancelled:
                raise
            except TandemError:
                why += "_not_replaced"  # An answer is worth more than the reason for which no better one came.
        yield self._told(held, tier, why)

    def _told(self, answers: Answers, tier: Tier, why: str) -> Answers:
        answers.tier = f"{tier.name} -> {answers.model}; reason={why}"
        self._requests.note_tier(tier.name, answers.model, why)
        found = {"request_id": answers.request_id, "tier": tier.name, "model": answers.model, "reason": why}
        logger.info("a tier's request has its model", extra=found)
        return answers


def _nobody(request_id: str, traceparent: str) -> None:
    """The client knows the id and the trace of the request already."""


def _texts(call: Call) -> list[str]:
    """Returns what a client wrote, without what has become tokens already."""
    texts = [prompt for prompt in call.prompts if isinstance(prompt, str)]
    for message in call.messages or ():
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts


class _HeldAnswers(Answers):
    """Answers that are complete, whose generation is over."""

    def __init__(self, answers: Answers, whole: list[Whole]) -> None:
        self.request_id = answers.request_id
        self.created_unix_s = answers.created_unix_s
        self.model = answers.model
        self.fallback = answers.fallback
        self.traceparent = answers.traceparent
        self.specs = answers.specs
        self.whole = whole

    async def parts(self, take_now: TakeNow | None = None) -> AsyncGenerator[Part, None]:
        for each in self.whole:
            delta = Delta(
                0, each.token_ids, each.text, each.logprobs, each.finish_reason, each.usage, each.prompt_logprobs
            )
            yield Part(each.index, delta, is_first=True)

    async def wholes(self) -> list[Whole]:
        return self.whole

    def recorded(self) -> list[Whole]:
        return self.whole

    def usages(self) -> list[tuple[Usage, Sequence[int]]]:
        return [(each.usage, each.prompt_token_ids) for each in self.whole]

    def known(self, choice: int, num_tokens: int | None, *, has_all: bool) -> Known:
        return Known((), "", None)
