"""Faults: what they cost is what they must cost, and no request is lost."""

import itertools

import pytest

from planning.simulator.cluster import Run, simulate
from planning.simulator.faults import DEATH, SILENCE, SILENCE_S, SLOWNESS, STOPPED_CARD, Fault, with_faults
from planning.simulator.report import e2e_s
from planning.simulator.traces import TraceRequest
from tests.planning.simulator.small import DECODE, cluster_spec, trace_of


def run(faults: list[Fault], *, num_requests: int = 1, num_output: int = 200, num_decode: int = 2) -> Run:
    requests = [TraceRequest(0.05 * index, 300, num_output) for index in range(num_requests)]
    return simulate(trace_of(requests), cluster_spec(2, num_decode), "round_robin", meddler=with_faults(faults))


def on(kind: str, at_s: float, **more: float) -> Fault:
    """A fault of the decode worker that the first request is on."""
    (job,) = run([]).jobs
    return Fault(kind=kind, worker_id=job.decode_worker, at_s=at_s, **more)


def test_after_a_death_an_answer_continues_where_it_was() -> None:
    (whole,), (broken,) = run([]).jobs, run([on(DEATH, 1.0)]).jobs
    assert broken.attempt == 2
    given = broken.num_emitted
    assert 50 < given < 150
    assert broken.first_token_s == whole.first_token_s
    # The gap is the prompt with what was given, computed again, and what was lost of a step.
    assert 0 < e2e_s(broken) - e2e_s(whole) < 0.01 + 1e-4 * (300 + given) + 1e-9 * (300 + given) ** 2 + 0.02


def test_silence_costs_the_time_until_it_is_noticed_on_top() -> None:
    death, silence = run([on(DEATH, 1.0)]).jobs[0], run([on(SILENCE, 1.0)]).jobs[0]
    assert silence.num_emitted == death.num_emitted
    assert e2e_s(silence) - e2e_s(death) == pytest.approx(SILENCE_S)


def test_slowness_stretches_the_steps_that_it_lasts_for() -> None:
    (whole,), (slowed,) = run([]).jobs, run([on(SLOWNESS, 1.0, duration_s=1.0, factor=3.0)]).jobs
    # In a second at a third of the pace two thirds of a second's tokens are lost, but for a step at either end.
    assert e2e_s(slowed) - e2e_s(whole) == pytest.approx(2 / 3, abs=4 * DECODE.step_s(1, 500))


def test_a_card_that_stops_delays_what_crosses_it_and_fails_nothing() -> None:
    (whole,), (held,) = run([]).jobs, run([on(STOPPED_CARD, 0.0, duration_s=2.0)]).jobs
    assert held.attempt == 1
    assert held.first_token_s == whole.first_token_s
    assert 1.9 < e2e_s(held) - e2e_s(whole) < 2.0


def test_a_worker_that_is_gone_has_no_faults() -> None:
    assert run([on(DEATH, 1e6), Fault(kind=DEATH, worker_id="d77", at_s=0.5)]).jobs[0].attempt == 1


@pytest.mark.parametrize("kinds", list(itertools.combinations((DEATH, SILENCE, SLOWNESS, STOPPED_CARD), 2)))
def test_faults_together_lose_nothing(kinds: tuple[str, str]) -> None:
    faults = [
        Fault(kind=kind, worker_id=worker_id, at_s=at_s, duration_s=1.0, factor=4.0)
        for kind, worker_id, at_s in zip(kinds, ("p0", "d0"), (0.8, 1.1), strict=True)
    ]
    found = run(faults, num_requests=60, num_output=40)
    assert all(job.end_s is not None and not job.refusal for job in found.jobs)
    if DEATH in kinds or SILENCE in kinds:
        assert any(job.attempt > 1 for job in found.jobs)
