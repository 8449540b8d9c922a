"""One answer drawn for people: the bars of its waterfall, and why its attempts went where they went.

Knows neither HTTP nor where stories are kept.
"""

import msgspec

from gateway.observability.history import PRICE_PARTS, AnswerStory, AttemptStory


class Bar(msgspec.Struct, frozen=True):
    """A part of an answer's time, in microseconds since the request came. `attempt` counts from 1; 0: before any.

    `chunks` are the steps of a prefill worker within it: (began, ended, tokens of the prompt). `predicted_us` is what
    it was expected to take when its attempt's way was chosen; None: nothing was expected.
    """

    phase: str
    began_us: int
    ended_us: int
    attempt: int = 0
    worker: str = ""
    chunks: list[tuple[int, int, int]] = []
    predicted_us: int | None = None


def bars(answer: AnswerStory) -> list[Bar]:
    """Returns an answer's waterfall: its phases in order, without a gap, up to its end.

    The end of a wait in the queue is the phase `route` where workers were being asked; the beginning of `prefill` is
    `waiting` where the prompt waited in its worker.
    """
    ends = [at_us for _, at_us in answer.steps[1:]] + [answer.ended_us]
    drawn: list[Bar] = []
    number = 0
    for (phase, began_us), ended_us in zip(answer.steps, ends, strict=True):
        attempts = answer.attempts
        while number < len(attempts) and attempts[number].placed_us <= began_us and phase != "queue":
            number += 1
        attempt = attempts[number - 1] if number else None
        if phase == "queue":
            coming = attempts[number] if number < len(attempts) and attempts[number].placed_us <= ended_us else None
            split_us = ended_us if coming is None else min(max(coming.began_us, began_us), ended_us)
            expected_us = None if coming is None else coming.predicted_queue_us
            drawn.append(Bar("queue", began_us, split_us, predicted_us=expected_us))
            if coming is not None:
                drawn.append(Bar("route", split_us, ended_us, number + 1))
        elif phase == "prefill" and attempt is not None:
            worker = attempt.prefill or attempt.decode
            split_us = min(began_us + attempt.waited_us, ended_us)
            if split_us > began_us:
                drawn.append(Bar("waiting", began_us, split_us, number, worker, predicted_us=attempt.predicted_wait_us))
            chunks = [
                (min(split_us + since_us, ended_us), min(split_us + since_us + spent_us, ended_us), num_tokens)
                for since_us, spent_us, num_tokens in attempt.chunks
            ]
            first_us = max(0, attempt.predicted_ttft_us - attempt.predicted_wait_us)
            drawn.append(Bar("prefill", split_us, ended_us, number, worker, chunks, first_us))
        else:
            between = f"{attempt.prefill} → {attempt.decode}" if attempt and attempt.prefill else ""
            at = attempt.decode if attempt else ""
            expected_us = _expected_us(answer, phase) if number == 1 else None
            where = (between or at) if phase == "transfer" else at
            drawn.append(Bar(phase, began_us, ended_us, number, where, predicted_us=expected_us))
    return drawn


def _expected_us(answer: AnswerStory, phase: str) -> int | None:
    """Returns what was expected of the transfer or the generation of an answer that was tried once; None: nothing."""
    attempt = answer.predicted()
    if attempt is None or phase == "queue":
        return None
    if phase == "transfer":
        return attempt.predicted_exposed_us
    return attempt.predicted_itl_us * max(0, answer.tokens - 1)


_REASONS = {
    "no_prefill_worker": "no prefill worker was available, so the decode worker computed the prompt itself",
    "short_prompt": "the prompt has few enough tokens to compute (--local-prefill-tokens) for the decode worker itself",
    "long_prompt": "the prompt has more tokens to compute than decode workers do (--local-prefill-tokens)",
    "remote_is_cheaper": "a prefill worker was the cheaper way",
    "local_is_cheaper": "the decode worker itself was the cheaper way",
    "move": "the decode worker that had it was leaving, so it moved, with its pages",
    "rebalance": "this decode worker had shorter steps or more free pages, so it moved here, with its pages",
}


def reasons(attempt: AttemptStory, prompt_tokens: int) -> list[str]:
    """Returns why an attempt went where it went, in sentences without their full stops."""
    said = [_REASONS.get(attempt.reason, attempt.reason)]
    if attempt.way_us is not None and attempt.other_way_us is not None:
        other = "the decode worker itself" if attempt.is_remote else "a prefill worker"
        said.append(f"this way cost {_said(attempt.way_us)}, {other} {_said(attempt.other_way_us)}")
    if attempt.rival and attempt.rival_us is not None and attempt.price_us is not None:
        more_us = attempt.rival_us - attempt.price_us
        more = f"{_said(abs(more_us))} {'more' if more_us > 0 else 'less'}" if more_us else "the same price"
        said.append(f"the next best was {attempt.rival}, for {more}")
    if attempt.waited_us:
        worker = attempt.prefill or attempt.decode
        ahead = f", which had {attempt.ahead_tokens} tokens of other prompts to compute" if attempt.ahead_tokens else ""
        said.append(
            f"the prompt waited {_said(attempt.waited_us)} in {worker}{ahead}; {_said(attempt.predicted_wait_us)} "
            "were expected"
        )
    if attempt.cached_tokens:
        said.append(f"{attempt.cached_tokens} of {prompt_tokens} tokens of the prompt were expected in its cache")
    if attempt.pull is not None:
        pull = attempt.pull
        said.append(
            f"the first {pull.num_tokens} of them were to come from {pull.holder}: fetching them was predicted to take "
            f"{_said(pull.predicted_us)}, computing them {_said(pull.computing_us)}"
        )
        if attempt.pulled_tokens:
            said.append(f"{attempt.pulled_tokens} had come after {_said(attempt.pull_us)}")
        elif attempt.pull_us:
            said.append(f"none came within {_said(attempt.pull_us)}, so they were computed")
    return said


def parts(attempt: AttemptStory) -> dict[str, int]:
    """Returns the parts of the price, in microseconds by name, the largest first; without those that are 0."""
    by_size = sorted(attempt.parts_us.items(), key=lambda part: -part[1])
    return {PRICE_PARTS[name]: spent_us for name, spent_us in by_size if spent_us}


def _said(microseconds: int) -> str:
    return f"{microseconds / 1e3:.3g} ms" if microseconds < 999_500 else f"{microseconds / 1e6:.3g} s"
