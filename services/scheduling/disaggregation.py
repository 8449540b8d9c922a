"""Settings and rules for where a prompt is computed: at a prefill worker or at the decode worker D itself. Pure.

The price decides (`routing.price`), unless a threshold, or the choice of an operator or a client, has the last word.
A short prompt, and one whose tokens D holds, costs less than the handoff and stays at D.

That the choice belongs to each request, by the length that is not cached and by the queues, is an idea of Dynamo's
disaggregated router; the price in predicted seconds is ours.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

Reason = Literal[
    "no_prefill_worker",
    "short_prompt",
    "long_prompt",
    "remote_is_cheaper",
    "local_is_cheaper",
    "asked_local",
    "asked_remote",
]

PrefillChoice = Literal["auto", "local", "remote"]
"""Where prompts are computed, as an operator or a client asks for it; `auto`: the decision below."""
PREFILL_CHOICES: tuple[PrefillChoice, ...] = ("auto", "local", "remote")

_EVERY_PROMPT, _NO_PROMPT = 2**62, -1
"""Values of `local_prefill_tokens` that keep every prompt at D, and none."""


@dataclass(frozen=True, slots=True)
class DisaggregationSettings:
    """How the decision is made.

    `local_prefill_tokens`: None decides by price; a number is a fixed threshold instead: a prompt of which D lacks at
    most this many tokens stays there, 0 sends away every prompt. `chunk_tokens`: prompt tokens that D computes between
    two steps. `itl_weight`: what a second that a running sequence waits counts, against a second to the first token.
    `min_disturbed`: the least number of sequences that a local prefill is assumed to disturb. `redone_weight`: what a
    second in which a worker computes what another one holds counts beyond itself. `is_asked`: the threshold is an
    operator's or a client's choice.
    """

    local_prefill_tokens: int | None = None
    chunk_tokens: int = 512
    itl_weight: float = 1.0
    min_disturbed: float = 0.5
    redone_weight: float = 1.0
    is_asked: bool = False

    def for_choice(self, choice: PrefillChoice) -> "DisaggregationSettings":
        """Returns these settings with a choice in place of the decision; without prefill workers, D still computes."""
        if choice == "auto":
            return self
        threshold = _EVERY_PROMPT if choice == "local" else _NO_PROMPT
        return dataclasses.replace(self, local_prefill_tokens=threshold, is_asked=True)

    def rule(self, lacking: int) -> tuple[Reason, bool] | None:
        """Returns why a threshold decides, and whether the prompt is sent away. Returns None if the price decides.

        D lacks `lacking` of the prompt's tokens.
        """
        if self.local_prefill_tokens is None:
            return None
        is_remote = lacking > self.local_prefill_tokens
        if self.is_asked:
            return ("asked_remote" if is_remote else "asked_local"), is_remote
        return ("long_prompt" if is_remote else "short_prompt"), is_remote
