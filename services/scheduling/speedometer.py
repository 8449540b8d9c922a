"""What a worker measures while it works: the speeds of services.scheduling.prediction, from its steps and transfers."""

from collections.abc import Iterable
from dataclasses import fields

from services.scheduling.prediction import (
    DEFAULT_DECODE,
    DEFAULT_LINK,
    DecodeMeter,
    DecodeSpeed,
    LinkSpeed,
    PrefillMeter,
    PrefillSpeed,
    TransferMeter,
)

_NAMES = {kind: tuple(one.name for one in fields(kind)) for kind in (PrefillSpeed, DecodeSpeed, LinkSpeed)}
"""The names of the fields of each. dataclasses.astuple copies deeply, which takes longer than the rest of a load."""

MIN_STEPS = 5
"""Steps with chunks that must be done before their speed is told to others: a worker that is called slow after one
hiccup no longer gets prompts, and so never the chance to show that it is not slow."""


StepWork = tuple[int, int, bool]
"""(tokens computed before, tokens computed in the step, whether these are a prompt's). A prompt's chunk of one token
does not count as decoding: a step of it alone costs what an empty step costs, which the speed of prompts learns from
it."""


class Speedometer:
    """The meters of one worker, fed with its transfers and steps; a step may mix chunks of prompts and decoding."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._prefill, self._decode, self._link = PrefillMeter(), DecodeMeter(), TransferMeter()

    @property
    def prefill(self) -> PrefillSpeed | None:
        """The speed of prompts; None: too little was measured yet."""
        return self._prefill.speed if self._num_steps >= MIN_STEPS else None

    @property
    def decode(self) -> DecodeSpeed | None:
        """The speed of decode steps; None: nothing was measured yet."""
        return None if self._decode.speed is DEFAULT_DECODE else self._decode.speed

    @property
    def prefill_now(self) -> PrefillSpeed | None:
        """The speed of prompts at the pace of the last seconds, to predict when work ends; None as for `prefill`.

        Steps are not sized by it: they would become shorter whenever the machine is busy with something else.
        """
        return None if self.prefill is None else self._prefill.speed_now

    @property
    def decode_now(self) -> DecodeSpeed | None:
        """The speed of decode steps at the pace of the last seconds; None as for `decode`."""
        return None if self.decode is None else self._decode.speed_now

    @property
    def link(self) -> LinkSpeed | None:
        """The speed of transfers; None: nothing was measured yet."""
        return None if self._link.speed is DEFAULT_LINK else self._link.speed

    def observe_step(self, work: Iterable[StepWork], time_s: float, now_s: float) -> None:
        """Takes a step that took `time_s` seconds and was done at `now_s`.

        In a mixed step, the chunks are taken to have cost what decoding alone does not.
        """
        num_sequences = context_tokens = num_tokens = num_pairs = 0
        for start, num, is_prompt in work:
            if is_prompt:
                num_tokens += num
                num_pairs += num * (num + 2 * start)
            else:
                num_sequences += num
                context_tokens += start * num
        if not num_tokens:
            self._decode.observe(num_sequences, context_tokens, time_s, now_s)
            return
        if num_sequences:
            time_s -= self._decode.speed.step_s(num_sequences, context_tokens)
        # Several chunks are taken for one with as many pairs of tokens, so the number before it may be negative.
        num_before = round((num_pairs / num_tokens - num_tokens) / 2)
        # A time that is not positive says nothing, and the meter leaves it out.
        self._num_steps += time_s > 0
        self._prefill.observe(num_tokens, num_before, time_s, now_s)

    def observe_steps(self, steps: Iterable[tuple[Iterable[StepWork], float]], now_s: float) -> None:
        """Takes steps that were done and timed before `now_s`: what each was made of, and its seconds."""
        for work, time_s in steps:
            self.observe_step(work, time_s, now_s)

    def observe_transfer(self, num_bytes: int, time_s: float, now_s: float) -> None:
        """Takes a transfer of pages, all sent at once and verified at the other side `time_s` later, at `now_s`."""
        self._link.observe(num_bytes, time_s, now_s)


def numbers(speed: PrefillSpeed | DecodeSpeed | LinkSpeed | None) -> tuple[float, ...] | None:
    """Returns the numbers of a speed, in the order of its fields."""
    return None if speed is None else tuple(getattr(speed, name) for name in _NAMES[type(speed)])
