"""Circuit breakers: when they open, and how they close."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.runtime.breaker import MAX_OPEN_S
from services.scheduling.breakers import Breakers
from tests.examples import examples

GROUP = ["a", "b", "c", "d"]


def usable(breakers, group, now_s):
    """The members of the group that are not left alone."""
    shut = breakers.shut(group, now_s)
    return [key for key in group if key not in shut]


def opened(*keys, now_s=0.0):
    breakers = Breakers()
    for key in keys:
        for _ in range(3):
            breakers.failed(key, now_s)
    return breakers


def test_three_errors_within_ten_seconds_open_it():
    breakers = Breakers()
    for now_s in (0.0, 6.0, 11.0, 17.0):
        breakers.failed("a", now_s)
        assert not breakers.is_open("a")
    assert usable(breakers, GROUP, 17.0) == GROUP
    breakers.failed("a", 20.0)
    assert (breakers.is_open("a"), breakers.num_open) == (True, 1)
    assert usable(breakers, GROUP, 20.0) == ["b", "c", "d"]


def test_errors_among_successes_count():
    breakers = Breakers()
    for _ in range(3):
        breakers.succeeded("a", 0.0)
        breakers.failed("a", 0.0)
    assert breakers.is_open("a")
    breakers.succeeded("a", 0.0)
    breakers.failed("a", 0.0)
    assert not breakers.is_open("a")


def test_one_probe_at_a_time_and_twice_the_wait_after_each_that_fails():
    breakers, now_s, waits = opened("a"), 0.0, []
    for _ in range(8):
        wait_s = next(s for s in range(1, 100) if "a" in usable(breakers, GROUP, now_s + s))
        waits.append(wait_s)
        now_s += wait_s
        assert breakers.begin("a", now_s)
        assert not breakers.begin("a", now_s)
        assert "a" not in usable(breakers, GROUP, now_s)
        breakers.failed("a", now_s)  # of another request, from before
        assert "a" not in usable(breakers, GROUP, now_s + MAX_OPEN_S)
        breakers.failed("a", now_s, is_probe=True)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    now_s += 60
    assert breakers.begin("a", now_s)
    breakers.succeeded("a", now_s)
    assert breakers.num_open == 0
    assert not breakers.begin("a", now_s)


def test_who_knows_a_reason_opens_it_at_once():
    breakers = Breakers()
    breakers.trip("a", 5.0)
    assert (usable(breakers, GROUP, 5.9), breakers.shut(GROUP, 5.9)) == (["b", "c", "d"], ["a"])
    breakers.trip("a", 5.9)  # moves nothing
    assert breakers.begin("a", 6.0)
    assert breakers.is_probing("a")
    breakers.trip("a", 6.0)
    assert breakers.is_probing("a")
    breakers.succeeded("a", 6.0)
    assert not breakers.is_probing("a")
    assert breakers.num_open == 0


def test_the_longest_wait_can_be_shorter():
    breakers, now_s = Breakers(max_open_s=3.0), 0.0
    breakers.trip("a", now_s)
    for wait_s in (1.0, 2.0, 3.0, 3.0):
        assert not breakers.begin("a", now_s + wait_s - 0.1)
        now_s += wait_s
        assert breakers.begin("a", now_s)
        breakers.failed("a", now_s, is_probe=True)


def probe(breakers, now_s, *, is_good=True):
    assert breakers.begin("a", now_s)
    if is_good:
        return breakers.succeeded("a", now_s)
    breakers.failed("a", now_s, is_probe=True)
    return False


def test_who_opens_again_must_be_good_for_longer_each_time():
    breakers, now_s = Breakers(max_probation_s=40.0), 0.0
    for times, lasts_s in ((1, 3), (2, 12), (3, 40), (4, 40)):
        breakers.trip("a", now_s)
        assert (breakers.num_openings("a"), breakers.opened_at_s("a")) == (times, now_s)
        now_s += 1.0
        good_since_s = now_s
        while not probe(breakers, now_s):
            assert not breakers.begin("a", now_s + 0.9)
            now_s += 1.0
        assert now_s - good_since_s == lasts_s
        assert not breakers.is_open("a")


def test_one_bad_probe_begins_the_probation_anew():
    breakers = Breakers(max_open_s=2.0, max_probation_s=60.0)
    breakers.trip("a", 0.0)
    assert not any(probe(breakers, now_s) for now_s in (1.0, 2.0, 3.0))
    probe(breakers, 4.0, is_good=False)
    assert not breakers.begin("a", 5.9)
    assert [probe(breakers, now_s) for now_s in (6.0, 7.0, 8.0, 9.0)] == [False, False, False, True]


def test_each_half_minute_that_is_well_takes_one_step_back():
    breakers = Breakers(max_probation_s=60.0)
    times, now_s = [], 0.0
    for well_s in (29.0, 31.0, 61.0):
        breakers.trip("a", now_s)
        times.append(breakers.num_openings("a"))
        now_s += 1.0
        while not probe(breakers, now_s):
            now_s += 1.0
        now_s += well_s
    breakers.trip("a", now_s)
    assert [*times, breakers.num_openings("a")] == [1, 2, 2, 1]


def test_a_probe_that_says_nothing_leaves_its_place_to_the_next():
    breakers = opened("a")
    assert breakers.begin("a", 1.0)
    breakers.abandoned("a")
    assert usable(breakers, GROUP, 1.0) == GROUP
    assert breakers.begin("a", 1.0)


def test_the_caller_chooses_how_many_errors_within_which_time_open_it():
    breakers = Breakers(max_errors=2, window_s=30.0)
    breakers.failed("a", 0.0)
    breakers.failed("a", 31.0)
    assert not breakers.is_open("a")
    breakers.failed("a", 60.0)
    assert breakers.is_open("a")
    breakers.forget("a")
    breakers.failed("a", 61.0)
    assert not breakers.is_open("a")


def test_workers_that_are_gone_are_forgotten():
    breakers = Breakers()
    for number in range(1000):
        breakers.failed(number, float(number))
    assert len(breakers._breakers) < 700


class World:
    """Workers that are healthy or not, and a gateway that sends to those that it may."""

    def __init__(self, size):
        self.breakers, self.now_s = Breakers(), 0.0
        self.group = list(range(size))
        self.is_healthy = dict.fromkeys(self.group, True)
        self.running = []

    def send(self, choice):
        if not (open_to := usable(self.breakers, self.group, self.now_s)):
            return
        key = open_to[choice % len(open_to)]
        self.running.append((key, self.breakers.begin(key, self.now_s)))

    def end(self, choice, is_cancelled):
        if not self.running:
            return
        key, is_probe = self.running.pop(choice % len(self.running))
        if is_cancelled:
            if is_probe:
                self.breakers.abandoned(key)
        elif self.is_healthy[key]:
            self.breakers.succeeded(key, self.now_s)
        else:
            self.breakers.failed(key, self.now_s, is_probe=is_probe)


EVENTS = st.one_of(
    st.tuples(st.just("pass"), st.floats(0, 30)),
    st.tuples(st.just("turn"), st.integers(0, 9)),
    st.tuples(st.just("send"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 5), st.lists(EVENTS, max_size=120))
def test_random_histories(size, events):
    world = World(size)
    for kind, value in events:
        if kind == "pass":
            world.now_s += value
        elif kind == "turn":
            key = world.group[value % size]
            world.is_healthy[key] = not world.is_healthy[key]
        elif kind == "send":
            world.send(value)
        else:
            world.end(value, kind == "cancel")
    # What was sent ends, everybody is healthy again, and requests continue: none stays out.
    while world.running:
        world.end(0, False)
    world.is_healthy = dict.fromkeys(world.group, True)
    for turn in range(4 * size):
        world.now_s += MAX_OPEN_S
        world.send(turn)
        world.end(0, False)
        for key in usable(world.breakers, world.group, world.now_s):
            if world.breakers.begin(key, world.now_s):
                world.breakers.succeeded(key, world.now_s)
    assert world.breakers.num_open == 0
    assert usable(world.breakers, world.group, world.now_s) == world.group
