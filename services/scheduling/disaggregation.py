"""Whether a prompt is computed by a prefill worker or by the decode worker itself: a pure decision.

First form of the rule. A prefill worker computes the prompt when one is in rotation and the part of the prompt
that the decode worker does not hold is longer than a limit; otherwise the decode worker does.
"""

from dataclasses import dataclass
from typing import Literal

Reason = Literal["prefill_worker_available", "no_prefill_worker", "short_prompt"]


@dataclass(frozen=True, slots=True)
class PromptView:
    """What the decision looks at. Counts are tokens; `num_cached_tokens` is what the decode worker holds."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_prefill_workers: int


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """The decision and, for the `route` span, its reason."""

    is_remote: bool
    reason: Reason


def decide(prompt: PromptView, *, local_prefill_max_tokens: int) -> Disaggregation:
    """Remote or local prefill for one prompt.

    `local_prefill_max_tokens`: uncached prompts up to this length stay on the decode worker; 0 sends all away.
    """
    if prompt.num_prefill_workers == 0:
        return Disaggregation(False, "no_prefill_worker")
    if prompt.num_prompt_tokens - prompt.num_cached_tokens <= local_prefill_max_tokens:
        return Disaggregation(False, "short_prompt")
    return Disaggregation(True, "prefill_worker_available")
