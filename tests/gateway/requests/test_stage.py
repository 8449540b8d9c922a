"""The table of an attempt's stages."""

import pytest

from gateway.requests.stage import LIVE, STATES, TERMINAL, TRANSITIONS, AttemptStage, Sign
from services.cluster.placements import State, can_move


def reachable(start: AttemptStage) -> set[AttemptStage]:
    """Every stage that some signs lead to."""
    found, waiting = {start}, [start]
    while waiting:
        for stage in TRANSITIONS[waiting.pop()].values():
            if stage not in found:
                found.add(stage)
                waiting.append(stage)
    return found


def test_every_stage_has_its_row_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(AttemptStage) == reachable(AttemptStage.NEW)
    assert set(LIVE) | set(TERMINAL) == set(AttemptStage)
    assert {sign for row in TRANSITIONS.values() for sign in row} == set(Sign)


@pytest.mark.parametrize("stage", TERMINAL)
def test_a_terminal_stage_stays_terminal(stage: AttemptStage) -> None:
    assert reachable(stage) <= set(TERMINAL)
    assert reachable(stage) == (
        {AttemptStage.FAILED, AttemptStage.EXPLAINED} if stage is AttemptStage.FAILED else {stage}
    )


@pytest.mark.parametrize("stage", LIVE)
def test_every_live_stage_may_end_in_each_way(stage: AttemptStage) -> None:
    row = TRANSITIONS[stage]
    assert (row[Sign.FINISH], row[Sign.CLOSE], row[Sign.FAIL]) == (
        AttemptStage.FINISHED,
        AttemptStage.CLOSED,
        AttemptStage.FAILED,
    )


@pytest.mark.parametrize("stage", LIVE)
def test_only_a_pause_that_is_taken_back_leads_to_an_earlier_stage(stage: AttemptStage) -> None:
    back = {sign for sign, after in TRANSITIONS[stage].items() if after < stage}
    assert back == ({Sign.RESUME} if stage in (AttemptStage.PAUSING, AttemptStage.PAUSED) else set())


@pytest.mark.parametrize("stage", LIVE)
def test_the_cluster_may_see_every_step(stage: AttemptStage) -> None:
    """Placements know fewer states; each step stays in one or goes where a placement may go, over those between."""
    order = list(State)
    for after in TRANSITIONS[stage].values():
        if after in LIVE:
            before_state, after_state = STATES[stage], STATES[after]
            between = order[order.index(before_state) : order.index(after_state) + 1]
            assert before_state == after_state or all(map(can_move, between, between[1:]))
