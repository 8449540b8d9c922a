"""Decisions from observations: up at once, down when it is quiet, roles before starts, never beyond the budget."""

import itertools

import pytest

from planning.autoscaler.policy import Autoscaler, AutoscalerSettings, Decision, Observation


def need(rate_per_s: float, mean_prompt: float, mean_answer: float) -> tuple[float, float]:
    return rate_per_s * mean_prompt / 10_000, rate_per_s * mean_answer / 1000


class Clock:
    """Gives an autoscaler one observation after the other."""

    def __init__(self, **settings: float) -> None:
        chosen = {"start_up_s": 60.0, "headroom": 1.0, **settings}
        self.autoscaler = Autoscaler(AutoscalerSettings(**chosen), need)  # type: ignore[arg-type]
        self.now_s = 0.0
        self.workers = [1, 1]
        self.starting = [0, 0]

    def pass_by(
        self, num_arrived: int, *, prompt: float = 1000, answer: float = 100, backlog_s: float = 0.0
    ) -> Decision:
        self.now_s += 10.0
        return self.autoscaler.decide(
            Observation(
                now_s=self.now_s,
                elapsed_s=10.0,
                num_arrived=num_arrived,
                mean_prompt=prompt,
                mean_answer=answer,
                backlog_s=backlog_s,
                prefill=self.workers[0],
                decode=self.workers[1],
                starting_prefill=self.starting[0],
                starting_decode=self.starting[1],
            )
        )


def test_more_is_asked_for_at_once_and_says_why() -> None:
    clock = Clock()
    decision = clock.pass_by(400)  # 40/s: 4 workers of each role, and some for the uncertainty
    assert decision.prefill >= 5
    assert decision.decode >= 5
    assert decision.reason.startswith(f"1+0:1+0 becomes {decision.prefill}:{decision.decode}: up to ")


def test_what_starts_is_counted_and_not_ordered_twice() -> None:
    clock = Clock()
    first = clock.pass_by(400)
    clock.starting = [first.prefill - 1, first.decode - 1]
    second = clock.pass_by(400)
    assert (second.prefill, second.decode) == (first.prefill, first.decode)
    assert not second.is_change


def test_less_comes_only_after_it_has_been_quiet() -> None:
    clock = Clock(settle_s=30.0)
    for _ in range(3):
        big = clock.pass_by(400)
        clock.workers = [big.prefill, big.decode]
    sizes = [clock.pass_by(0).prefill for _ in range(14)]
    assert min(sizes[:3]) >= big.prefill, "30 s have not passed"
    assert sizes[-1] == 1


def test_a_backlog_asks_for_prefill_workers_only() -> None:
    quiet, behind = Clock().pass_by(10), Clock().pass_by(10, backlog_s=400.0)
    assert behind.prefill == quiet.prefill + 5, "20 s and a start-up of 60 s to work off 400 s"
    assert behind.decode == quiet.decode
    assert "backlog of 400 s" in behind.reason


@pytest.mark.parametrize("changes_roles", [True, False])
def test_a_mix_that_turns_changes_roles_if_it_may(changes_roles: bool) -> None:
    clock = Clock(changes_roles=changes_roles, settle_s=0.0)
    clock.workers = [8, 2]
    clock.pass_by(100, prompt=7000, answer=100)
    decision = clock.pass_by(100, prompt=100, answer=500)
    assert decision.prefill < 8
    assert decision.decode > 2
    assert decision.to_decode == (min(8 - decision.prefill, decision.decode - 2) if changes_roles else 0)
    assert decision.to_prefill == 0


def test_the_budget_is_kept_and_named() -> None:
    decision = Clock(max_workers=6).pass_by(2000, prompt=3000)
    assert decision.prefill + decision.decode == 6
    assert decision.prefill > decision.decode >= 1
    assert "the budget is 6 workers" in decision.reason


def test_a_split_of_the_budget_stays_for_a_while() -> None:
    """Four workers, ten times as much needed, and a backlog that comes and goes with each look."""
    clock = Clock(max_workers=4, settle_s=30.0)
    clock.workers = [1, 3]
    changed_s = []
    for look in range(24):
        decision = clock.pass_by(300, prompt=4000, answer=400, backlog_s=2000.0 * (look % 2))
        assert decision.prefill + decision.decode == 4
        if [decision.prefill, decision.decode] != clock.workers:
            changed_s.append(clock.now_s)
            clock.workers = [decision.prefill, decision.decode]
    assert changed_s, "the split never followed what is needed"
    assert all(later - earlier >= 30.0 for earlier, later in itertools.pairwise(changed_s))


def test_a_lost_worker_is_replaced_within_a_budget_whose_split_stays() -> None:
    clock = Clock(max_workers=4, settle_s=1e6)
    clock.workers = [2, 2]
    first = clock.pass_by(300, prompt=9000, answer=400)
    assert (first.prefill, first.decode) == (3, 1)
    clock.workers = [2, 1]
    second = clock.pass_by(300, prompt=9000, answer=400)
    assert (second.prefill, second.decode) == (3, 1)


def test_a_metric_that_lies_below_nothing_counts_as_nothing() -> None:
    decision = Clock().pass_by(-1000)
    assert (decision.prefill, decision.decode) == (1, 1)


def test_workers_that_never_come_are_given_up_and_no_more_are_ordered() -> None:
    clock = Clock(give_up_s=100.0, start_up_s=60.0)
    first = clock.pass_by(400)
    clock.starting = [first.prefill - 1, first.decode - 1]
    decisions = [clock.pass_by(400) for _ in range(20)]
    assert "given up" not in decisions[13].reason
    last = clock.pass_by(4000)
    assert (last.prefill, last.decode) == (first.prefill, first.decode), "more of the same would not come either"
    assert f"{first.decode - 1} decode workers do not come and are given up" in last.reason
    clock.workers, clock.starting = [first.prefill, first.decode], [0, 0]
    assert clock.pass_by(4000).decode > first.decode, "they have come after all"


def test_that_some_come_is_noticed_while_others_are_ordered() -> None:
    clock = Clock(give_up_s=100.0, start_up_s=60.0, max_workers=10_000)
    for size in range(1, 40):
        clock.workers, clock.starting = [size, size], [3, 3]
        assert "given up" not in clock.pass_by(400 * size).reason


def test_what_runs_when_it_begins_is_left_for_a_while() -> None:
    clock = Clock(settle_s=30.0)
    clock.workers = [5, 5]
    sizes = [clock.pass_by(0).decode for _ in range(8)]
    assert sizes[:3] == [5, 5, 5]
    assert sizes[-1] == 1


def test_time_in_which_nothing_was_counted_says_nothing() -> None:
    clock = Clock(settle_s=0.0)
    big = clock.pass_by(400)
    clock.workers = [big.prefill, big.decode]
    clock.now_s += 10.0
    seen = Observation(
        now_s=clock.now_s,
        elapsed_s=0.0,
        num_arrived=0,
        mean_prompt=1000,
        mean_answer=100,
        backlog_s=0.0,
        prefill=big.prefill,
        decode=big.decode,
    )
    assert not clock.autoscaler.decide(seen).is_change
