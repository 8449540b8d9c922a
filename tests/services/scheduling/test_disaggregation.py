"""Which prompts go to a prefill worker."""

import pytest

from services.scheduling.disaggregation import PromptView, decide


@pytest.mark.parametrize(
    ("prompt", "cached", "workers", "limit", "is_remote", "reason"),
    [
        (100, 0, 1, 0, True, "prefill_worker_available"),
        (1, 0, 1, 0, True, "prefill_worker_available"),
        (100, 0, 0, 0, False, "no_prefill_worker"),
        (100, 0, 2, 100, False, "short_prompt"),
        (101, 0, 2, 100, True, "prefill_worker_available"),
        (500, 400, 2, 100, False, "short_prompt"),
        (500, 399, 2, 100, True, "prefill_worker_available"),
        (500, 500, 2, 0, False, "short_prompt"),
    ],
)
def test_decision(prompt, cached, workers, limit, is_remote, reason):
    decision = decide(PromptView(prompt, cached, workers), local_prefill_max_tokens=limit)
    assert (decision.is_remote, decision.reason) == (is_remote, reason)
