"""Whether a prompt is computed by a prefill worker or by the decode worker itself: a pure decision.

Both ways are priced in seconds that requests have to wait, and the cheaper one is taken:

    remote = prefill_queue_s + prefill_P(tokens that P lacks) + redone_weight · redone_P + transfer_s + remote_extra_s
             + INTERFERENCE · decode_queue_s
    local  = decode_queue_s + prefill_D(tokens that D lacks) + redone_weight · redone_D + steps · step_s
             + itl_weight · itl_cost_s

D computes prompts beside the tokens of its sequences, a few milliseconds in each step (`chunks`): a prompt for which an
idle worker needs 100 ms takes many steps of a busy one, until what it generates has come to its end. `itl_cost_s` is
what a local prefill takes from the others: every sequence of D's batch waits once for each step, so together they lose
prefill_D · (sequences, at least `min_disturbed`). That is why a long prompt goes away even from an idle decode worker:
somebody will come while it is computed. A short prompt, and one whose tokens D holds, costs less than the handoff and
stays.

`redone_*` is the worker's time for tokens that the cluster would compute twice: of a local prefill those that another
worker holds, of a remote one those that a decode worker holds and no prefill worker does, the last answer of a
conversation, as a rule. Others come meanwhile, and so such tokens count twice. (That another prefill worker holds more
is in the price of prefill workers, see `routing`.)

That the choice belongs to each request, by the length that is not cached and by the queues, is an idea of Dynamo's
disaggregated router; the price in predicted seconds is ours.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from services.scheduling.chunks import stretch_s
from services.scheduling.prediction import DEFAULT_PREFILL, PrefillSpeed

Reason = Literal[
    "no_prefill_worker",
    "short_prompt",
    "long_prompt",
    "remote_is_cheaper",
    "local_is_cheaper",
    "local_itl_too_long",
    "asked_local",
    "asked_remote",
]

PrefillChoice = Literal["auto", "local", "remote"]
"""Who computes prompts, as an operator or a client asks for it; `auto`: the decision below."""
PREFILL_CHOICES: tuple[PrefillChoice, ...] = ("auto", "local", "remote")

_EVERY_PROMPT, _NO_PROMPT = 2**62, -1
"""As thresholds of `local_prefill_tokens`."""

INTERFERENCE = 0.5
"""Part of the prompts waiting at D that lengthens the steps of a sequence which comes with its pages: they are computed
between its steps, but the first half, as a rule, before it is there."""


@dataclass(frozen=True, slots=True)
class DisaggregationSettings:
    """How the decision is made.

    `local_prefill_tokens`: None decides by price; a number is the fixed threshold instead: prompts of which D lacks at
    most so many tokens stay there, 0 sends all away. `chunk_tokens`: prompt tokens that D computes between two
    steps. `itl_weight`: what a second counts that a running sequence waits, against one to the first token.
    `min_disturbed`: sequences that a local prefill is assumed to disturb at least. `max_itl_s`: no local prefill
    that makes the steps of running sequences longer than this; None: no such limit. `redone_weight`: what a second
    counts, beyond itself, in which a worker computes what another one holds. `is_asked`: the threshold is somebody's
    choice for all prompts, or for this one.
    """

    local_prefill_tokens: int | None = None
    chunk_tokens: int = 512
    itl_weight: float = 1.0
    min_disturbed: float = 0.5
    max_itl_s: float | None = None
    redone_weight: float = 1.0
    is_asked: bool = False

    def for_choice(self, choice: PrefillChoice) -> "DisaggregationSettings":
        """With somebody's choice instead of the decision. Without a prefill worker prompts are computed at home."""
        if choice == "auto":
            return self
        threshold = _EVERY_PROMPT if choice == "local" else _NO_PROMPT
        return dataclasses.replace(self, local_prefill_tokens=threshold, is_asked=True)


@dataclass(frozen=True, slots=True)
class PrefillWays:
    """What the decision looks at, for one prompt, one decode worker and the prefill worker that would compute it.

    Tokens and seconds. `transfer_s` is the time of the pages that D lacks; `num_running` and `step_s` are the sequences
    that D's steps have now, and how long such a step takes, `steps_left` after how many of them all those have ended;
    `remote_extra_s` is what else speaks against the prefill worker (another region, few pages).
    `cached_on_any_prefill` and `cached_anywhere` are the most that any prefill worker, and any worker, has cached.
    Cached counts are at most `num_prompt_tokens` - 1: the last token is always computed.
    """

    num_prompt_tokens: int
    has_prefill_worker: bool = True
    cached_on_prefill: int = 0
    cached_on_decode: int = 0
    cached_on_any_prefill: int = 0
    cached_anywhere: int = 0
    prefill_queue_s: float = 0.0
    decode_queue_s: float = 0.0
    prefill_speed: PrefillSpeed = DEFAULT_PREFILL
    local_speed: PrefillSpeed = DEFAULT_PREFILL
    transfer_s: float = 0.0
    remote_extra_s: float = 0.0
    num_running: int = 0
    steps_left: float = math.inf
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """The decision and, for the `route` span, its reason and all that it was made of.

    Seconds. `*_ttft_s`: predicted time to the first token either way; `local_itl_s`: a step of D's batch that has a
    chunk of this prompt in it; `*_redone_s`: time for what is held elsewhere; `*_cost_s`: what the two ways were
    compared by.
    """

    is_remote: bool
    reason: Reason
    remote_ttft_s: float = 0.0
    local_ttft_s: float = 0.0
    itl_cost_s: float = 0.0
    local_itl_s: float = 0.0
    remote_redone_s: float = 0.0
    local_redone_s: float = 0.0
    remote_cost_s: float = 0.0
    local_cost_s: float = 0.0
    ways: PrefillWays | None = None


def decide(ways: PrefillWays, settings: DisaggregationSettings) -> Disaggregation:
    """Remote or local prefill for one prompt. Equal prices: local, which moves nothing."""
    lacking_on_d = max(1, ways.num_prompt_tokens - ways.cached_on_decode)
    lacking_on_p = max(1, ways.num_prompt_tokens - ways.cached_on_prefill)
    local_s, num_steps, step_s = ways.local_speed.time_s(lacking_on_d, ways.cached_on_decode), 1.0, 0.0
    if ways.num_running:
        step_s, num_chunks = ways.step_s, 1 + (lacking_on_d - 1) // settings.chunk_tokens
        num_steps = max(num_chunks, (local_s - ways.local_speed.overhead_s) / stretch_s(step_s))
    # Those that run stretch it until they have ended.
    local_ttft_s = ways.decode_queue_s + local_s + min(num_steps, ways.steps_left) * step_s
    itl_cost_s = local_s * max(settings.min_disturbed, ways.num_running)
    local_itl_s = step_s + local_s / num_steps
    remote_ttft_s = ways.prefill_queue_s + ways.prefill_speed.time_s(lacking_on_p, ways.cached_on_prefill)
    remote_redone_s = ways.prefill_speed.computed_twice_s(ways.cached_on_any_prefill, ways.cached_anywhere)
    local_redone_s = ways.local_speed.computed_twice_s(ways.cached_on_decode, ways.cached_anywhere)
    remote_cost_s = (
        remote_ttft_s
        + settings.redone_weight * remote_redone_s
        + ways.remote_extra_s
        + ways.transfer_s
        + INTERFERENCE * ways.decode_queue_s
    )
    local_cost_s = local_ttft_s + settings.redone_weight * local_redone_s + settings.itl_weight * itl_cost_s
    reason: Reason
    if not ways.has_prefill_worker:
        reason = "no_prefill_worker"
    elif settings.local_prefill_tokens is not None:
        stays = ways.num_prompt_tokens - ways.cached_on_decode <= settings.local_prefill_tokens
        if settings.is_asked:
            reason = "asked_local" if stays else "asked_remote"
        else:
            reason = "short_prompt" if stays else "long_prompt"
    elif settings.max_itl_s is not None and ways.num_running and local_itl_s > settings.max_itl_s:
        reason = "local_itl_too_long"
    else:
        reason = "remote_is_cheaper" if remote_cost_s < local_cost_s else "local_is_cheaper"
    return Disaggregation(
        is_remote=reason in ("long_prompt", "local_itl_too_long", "remote_is_cheaper", "asked_remote"),
        reason=reason,
        remote_ttft_s=remote_ttft_s,
        local_ttft_s=local_ttft_s,
        itl_cost_s=itl_cost_s,
        local_itl_s=local_itl_s,
        remote_redone_s=remote_redone_s,
        local_redone_s=local_redone_s,
        remote_cost_s=remote_cost_s,
        local_cost_s=local_cost_s,
        ways=ways,
    )
