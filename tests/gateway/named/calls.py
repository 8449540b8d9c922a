"""Named calls for tests, and how their answers become text."""

from gateway.models.answer_text import AnswerText
from gateway.named.ask import ask_for
from gateway.requests.call import Call
from gateway.types import AskedSampling, Sampling, Usage

USAGE = Usage(3, 0, 4, 0.0, 0.0, 0.0, 0.0)


def sampling(**changes):
    return Sampling(**{"max_tokens": 100, "seed": 7, **changes})


def text_of(tokenizer, sampling):
    return AnswerText(
        tokenizer.detokenizer(),
        stop_texts=sampling.stop,
        stop_token_ids=frozenset({1}),
        min_tokens=sampling.min_tokens,
    )


def call(**changes):
    fields = {"operation": "text_completion", "prompts": [[5, 6, 7]], "sampling": AskedSampling()}
    return Call(**(fields | changes))


def keyed(key="the key", body="body", last=None, **changes):
    return ask_for(call(idempotency_key=key, **changes), body, last_event_id=last)


def named(request_id="mine", body="body", last=None, **changes):
    return ask_for(call(request_id=request_id, **changes), body, last_event_id=last)
