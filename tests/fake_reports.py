"""What a fake model says of prompts that are reported: the smaller its id, the likelier a token."""

from array import array
from dataclasses import replace

from services.engine.steps.step import PromptReport, PromptTokens, SampledToken, StepItem


def fake_report(*token_ids: int) -> PromptReport:
    """What it says of these tokens of a prompt, without candidates."""
    return PromptReport(0, array("d", map(float.__neg__, map(float, token_ids))), array("I"), array("d"))


def with_reports(item: StepItem, outcome: SampledToken | None) -> SampledToken | PromptTokens | None:
    """The outcome of a step, with what it says of the tokens after those that it computed."""
    sequence = item.sequence
    if not sequence.reports_prompt:
        return outcome
    start = sequence.num_computed_tokens + 1
    following = sequence.token_ids[start : start + item.num_scheduled_tokens]
    told = fake_report(*following)
    return PromptTokens(told) if outcome is None else replace(outcome, prompt=told)
