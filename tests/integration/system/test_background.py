"""Responses in the background whose gateway is killed in the middle: the restarted one continues them to their ends."""

import os
import signal
import time
from collections.abc import Callable

import openai
from openai.types.responses import Response

from benchmarks.cluster import running_cluster
from tests.waiting import HANG_LIMIT_S

NUM_RESPONSES, NUM_TOKENS = 4, 1500
TIMEOUT_S = HANG_LIMIT_S


def test_background_responses_outlive_a_killed_gateway_with_the_answers_that_they_would_have_had() -> None:
    with running_cluster(prefill=0, decode=1) as cluster:
        client = openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id

        def create(number: int, *, is_background: bool) -> Response:
            return client.responses.create(
                model=model,
                input=f"Say {number}.",
                max_output_tokens=NUM_TOKENS,
                background=is_background,
                extra_body={"seed": number, "ignore_eos": True},
            )

        undisturbed = [create(number, is_background=False).output_text for number in range(NUM_RESPONSES)]
        begun = [create(number, is_background=True) for number in range(NUM_RESPONSES)]
        watched(client, begun, lambda now: any(one.status == "in_progress" for one in now))
        victim = cluster.gateway_pid()
        os.kill(victim, signal.SIGKILL)
        ended = watched(client, begun, lambda now: all(one.status not in ("queued", "in_progress") for one in now))
        assert cluster.gateway_pid() != victim
    assert [one.status for one in ended] == ["incomplete"] * NUM_RESPONSES
    assert [one.output_text for one in ended] == undisturbed


def watched(
    client: openai.OpenAI, responses: list[Response], holds: Callable[[list[Response]], bool]
) -> list[Response]:
    """Fetches all of them until that holds, also while no gateway runs."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            now = [client.responses.retrieve(response.id) for response in responses]
            if holds(now):
                return now
        except (openai.APIConnectionError, openai.InternalServerError):
            pass  # the gateway is being started again
        assert time.monotonic() < deadline_s, f"it did not come to that in {TIMEOUT_S:g} s"
        time.sleep(0.02)
