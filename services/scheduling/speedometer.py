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
"""Of the fields of each. dataclasses.astuple copies deeply, which takes longer than all else that a load is made of."""

MIN_STEPS = 5
"""Steps with chunks that must have been done before their speed is told to others: who is called slow after one hiccup
gets no prompts any more, and so never the chance to show that it is not."""


StepWork = tuple[int, int, bool]
"""(tokens computed before, tokens computed in the step, whether these are a prompt's). A prompt's chunk of one token is
no decoding: a step of it alone costs what an empty step costs, and the speed of prompts has to learn that from it."""


class Speedometer:
    """Takes steps, in which chunks of prompts and sequences that decode may be mixed, and transfers."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._prefill, self._decode, self._link = PrefillMeter(), DecodeMeter(), TransferMeter()

    @property
    def prefill(self) -> PrefillSpeed | None:
        """None: too little was measured yet."""
        return self._prefill.speed if self._num_steps >= MIN_STEPS else None

    @property
    def decode(self) -> DecodeSpeed | None:
        """None: nothing was measured yet."""
        return None if self._decode.speed is DEFAULT_DECODE else self._decode.speed

    @property
    def prefill_now(self) -> PrefillSpeed | None:
        """At the pace of the last seconds, for those who predict when work will be done; None as for `prefill`.

        Steps are not made by it: they would become shorter whenever the machine is busy with something else.
        """
        return None if self.prefill is None else self._prefill.speed_now

    @property
    def decode_now(self) -> DecodeSpeed | None:
        """The same of decode steps."""
        return None if self.decode is None else self._decode.speed_now

    @property
    def link(self) -> LinkSpeed | None:
        """None: nothing was measured yet."""
        return None if self._link.speed is DEFAULT_LINK else self._link.speed

    def observe_step(self, work: Iterable[StepWork], time_s: float, now_s: float) -> None:
        """A step took `time_s` seconds and was done at `now_s`.

        Of a mixed step, the chunks took what decoding alone does not take.
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
        # Several chunks are taken for one with as many pairs of tokens, before which there may be fewer than none.
        num_before = round((num_pairs / num_tokens - num_tokens) / 2)
        # What is not positive says nothing, and is left out there.
        self._num_steps += time_s > 0
        self._prefill.observe(num_tokens, num_before, time_s, now_s)

    def observe_steps(self, steps: Iterable[tuple[Iterable[StepWork], float]], now_s: float) -> None:
        """Steps that were done and timed before `now_s`: what each was made of, and its seconds."""
        for work, time_s in steps:
            self.observe_step(work, time_s, now_s)

    def observe_transfer(self, num_bytes: int, time_s: float, now_s: float) -> None:
        """Pages that were all sent at once were verified at the other side `time_s` seconds later, at `now_s`."""
        self._link.observe(num_bytes, time_s, now_s)


def numbers(speed: PrefillSpeed | DecodeSpeed | LinkSpeed | None) -> tuple[float, ...] | None:
    """The numbers of a speed, in the order of its fields."""
    return None if speed is None else tuple(getattr(speed, name) for name in _NAMES[type(speed)])
