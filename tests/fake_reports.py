"""What a fake model says of prompts that are reported: the same of each token."""

from dataclasses import replace

from services.engine.steps.step import PromptTokens, SampledToken, StepItem


def with_reports(item: StepItem, outcome: SampledToken | None) -> SampledToken | PromptTokens | None:
    """The outcome of a step, with what it says of the tokens after those that it computed."""
    sequence = item.sequence
    if not sequence.reports_prompt:
        return outcome
    start = sequence.num_computed_tokens + 1
    following = sequence.token_ids[start : start + item.num_scheduled_tokens]
    told = tuple(SampledToken(token_id, -0.5) for token_id in following)
    return PromptTokens(told) if outcome is None else replace(outcome, prompt=told)
