from decode_worker.payoff import (
    ANY_LEVEL,
    FIRST_REST_STEPS,
    LEVELS,
    MOST_LOST_STEPS,
    MOST_REST_STEPS,
    PLAIN_EVERY,
    PLAIN_STEPS,
    TRIAL_STEPS,
    Balance,
    Kind,
    Price,
    Record,
    first_guess,
    level_of_match,
    worthwhile,
)
from services.engine.steps.guesses import Guess

KIND = Kind("draft", True, 5)


def test_a_request_is_believed_by_its_own_record_and_by_others_before_it_has_one() -> None:
    everybody = Record(1000)
    one, other = Record(100, behind=everybody), Record(100, behind=everybody)
    assert one.chance(KIND, 0) == everybody.chance(KIND, 0) == first_guess(KIND)
    for step in range(40):
        one.note(KIND, step, 0.0)
    assert one.chance(KIND, 40) < 0.05
    assert one.chance(KIND, 40) < other.chance(KIND, 40) < first_guess(KIND)
    for step in range(40):
        other.note(KIND, step, 1.0)
    assert other.chance(KIND, 40) > 0.85 > 0.3 > one.chance(KIND, 40)


def test_kinds_do_not_speak_for_each_other() -> None:
    record = Record(100)
    for _ in range(50):
        record.note(Kind("ngram", False, 2), 0, 0.0)
    assert record.chance(Kind("ngram", True, 2), 0) == first_guess(Kind("ngram", True, 2))
    assert record.chance(Kind("ngram", False, 2), 0) < 0.05


def test_what_is_long_ago_counts_less_until_it_is_tried_again() -> None:
    record = Record(50)
    for _ in range(30):
        record.note(KIND, 0, 0.0)
    chances = [record.chance(KIND, step) for step in (0, 50, 200, 1000)]
    assert chances == sorted(chances)
    assert chances[0] < 0.1
    assert abs(chances[-1] - first_guess(KIND)) < 0.01


def test_a_long_record_still_learns() -> None:
    record = Record(10**9)
    for _ in range(5000):
        record.note(KIND, 0, 1.0)
    for _ in range(100):
        record.note(KIND, 0, 0.0)
    assert record.chance(KIND, 0) < 0.3


def test_levels_are_in_range_and_rise() -> None:
    probabilities = [Guess(0, number / 100).level for number in range(101)]
    matches = [level_of_match(number) for number in range(2, 40)]
    for levels in (probabilities, matches):
        assert levels == sorted(levels)
        assert set(levels) == set(range(LEVELS))
    assert all(0 < first_guess(Kind("draft", True, level)) < 1 for level in range(ANY_LEVEL + 1))


def test_proposals_are_taken_as_far_as_they_are_worth_their_cost() -> None:
    assert worthwhile([0.9, 0.9, 0.1, 0.9], 0.2) == (2, 0.9 - 0.2 + 0.81 - 0.2)
    assert worthwhile([0.5] * 8, 0.6) == (0, 0.0)
    assert worthwhile([1.0] * 8, 0.1)[0] == 8
    assert worthwhile([], 0.1) == (0, 0.0)


def test_time_costs_what_the_step_gives_in_it() -> None:
    price = Price(num_tokens=32, time_s=0.004)
    assert price.of(0.0001) == 0.8
    alone = Price(num_tokens=1, time_s=0.001)
    assert alone.of(0.0001) == 0.1
    alone.add(num_tokens=1, time_s=0)
    assert alone.of(0.0001) == 0.2, "a step that gives more makes its time dearer"


def compared() -> Balance:
    """One to which a step of four sequences takes 4 ms, so that a token takes one."""
    balance = Balance()
    for _ in range(PLAIN_STEPS):
        assert not balance.is_open(), "there is nothing to compare with"
        balance.note_plain(4, 0.004)
    return balance


def rests(balance: Balance) -> int:
    """For how many steps."""
    num = 0
    while not balance.is_open():
        num += 1
    return num


def test_what_does_not_pay_rests_longer_and_longer_and_is_tried_again() -> None:
    balance = compared()

    def rests_after(net: float) -> int:
        for _ in range(TRIAL_STEPS):
            balance.note(4, 1, (5 - net) * 0.001)
        return rests(balance)

    doubled = [min(FIRST_REST_STEPS * 2**times, MOST_REST_STEPS) for times in range(6)]
    assert rests_after(0.1) == 0
    assert [rests_after(-0.1) for _ in range(6)] == doubled
    assert rests_after(0.1) == rests_after(0.2) == 0
    assert rests_after(-0.9) == MOST_REST_STEPS // 4, "two have gained"


def test_a_trial_that_loses_much_ends_early_and_one_slow_step_ends_none() -> None:
    balance = compared()
    num_tried = 0
    while balance.is_open():
        balance.note(4, 1, 0.0091)  # a plain step's time is lost in each
        num_tried += 1
    assert num_tried == MOST_LOST_STEPS

    balance = compared()
    balance.note(4, 1, 10.0)
    for _ in range(TRIAL_STEPS - 1):
        balance.note(4, 1, 0.004)
    assert balance.is_open(), "it gained more than one step that was held up may cost"


def test_reading_is_paid_for_in_many_steps() -> None:
    assert PLAIN_EVERY > 4 * TRIAL_STEPS - 1, "what closes before that is a loss"
    balance = compared()
    for _ in range(3 * TRIAL_STEPS):
        balance.note(4, 0, 0.004 + 0.001, read_s=0.001)
        assert balance.is_open(), "steps that only read are no trial"
    for num_accepted in [4] * TRIAL_STEPS:
        balance.note(4, num_accepted, 0.005)
    assert balance.is_open(), "what came of it was worth it"

    balance = compared()
    for _ in range(3 * TRIAL_STEPS):
        balance.note(4, 1, 0.004 + 0.004, read_s=0.004)
        if not balance.is_open():
            break
    else:
        raise AssertionError("reading continued that never paid")


def test_plain_steps_that_warm_up_or_were_held_up_are_not_what_plain_steps_take() -> None:
    balance = Balance()
    for number in range(PLAIN_STEPS):
        balance.note_plain(4, 0.008 if number < PLAIN_STEPS // 2 or number == PLAIN_STEPS - 1 else 0.004)
    assert balance.plain_s == 0.001
    for _ in range(PLAIN_STEPS - 1):
        balance.note_plain(4, 0.008)
    assert balance.is_open()
    balance.note(4, 4, 0.004)
    for _ in range(PLAIN_STEPS - 1):
        balance.note_plain(4, 0.008)
    assert balance.plain_s == 0.001, "they were not in a row"
    balance.note_plain(4, 0.008)
    assert balance.plain_s == 0.002


def test_plain_steps_are_made_now_and_then_where_it_pays() -> None:
    balance = compared()
    for _ in range(3):
        num_open = 0
        while balance.is_open():
            balance.note(4, 4, 0.005)
            num_open += 1
        assert num_open == PLAIN_EVERY
        balance.note_plain(4, 0.004)
        for _ in range(PLAIN_STEPS - 1):
            assert not balance.is_open()
            balance.note_plain(4, 0.004)
