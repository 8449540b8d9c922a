"""The line of prompts against a list that is searched, and how long steps may take."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduling.chunks import (
    DEFAULT_TARGETS,
    LONE_STEP_OVERHEADS,
    STEP_OVERHEADS,
    Line,
    more_steps_s,
    stretch_s,
)
from tests.examples import examples

KEYS = st.integers(0, 9)


class LineModel(RuleBasedStateMachine):
    """A line does what a list of (class, cost, age) does."""

    def __init__(self):
        super().__init__()
        self.line, self.rows, self.age = Line(), {}, 0

    @rule(key=KEYS, service_class=st.integers(0, 2), cost=st.integers(1, 5))
    def add(self, key, service_class, cost):
        if key not in self.rows:
            self.line.add(key, service_class=service_class, num_tokens=cost, cost=float(cost))
            self.rows[key] = [service_class, cost, self.age]
            self.age += 1

    @rule(key=KEYS, cost=st.integers(1, 5))
    def resize(self, key, cost):
        if key in self.rows:
            self.line.resize(key, num_tokens=cost, cost=float(cost))
            self.rows[key][1] = cost

    @rule(key=KEYS)
    def discard(self, key):
        row, place = self.rows.pop(key, None), self.line.discard(key)
        assert (place and [place.service_class, place.cost, place.age]) == row

    @invariant()
    def has_the_same_prompts(self):
        assert len(self.line) == len(self.rows)
        assert set(self.line) == set(self.rows)
        for service_class in range(3):
            assert self.line.num_of(service_class) == sum(row[0] == service_class for row in self.rows.values())

    @invariant()
    @precondition(lambda self: self.rows)
    def names_the_same_prompts_first(self):
        assert self.line.best_class == min(row[0] for row in self.rows.values())
        assert self.line.shortest() == min(self.rows, key=self.rows.__getitem__)
        assert self.line.oldest() == min(self.rows, key=lambda key: (self.rows[key][0], self.rows[key][2]))
        assert len(self.line._heap) <= 2 * len(self.rows) + 32


LineModel.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestLine = LineModel.TestCase


def test_steps_are_longer_where_fewer_prompts_arrive():
    empty_s = 0.002
    limits = [DEFAULT_TARGETS.part_s(empty_s, rate) for rate in (1e9, 200.0, 20.0, 1.0, 0.0)]
    assert limits == sorted(limits)
    assert limits[0] == max(DEFAULT_TARGETS.shared_s, STEP_OVERHEADS * empty_s)
    assert limits[-1] == max(DEFAULT_TARGETS.alone_s, LONE_STEP_OVERHEADS * empty_s)
    assert DEFAULT_TARGETS.part_s(empty_s, 20.0) == pytest.approx(math.sqrt(empty_s / 20.0))


def test_a_step_that_decodes_is_stretched_by_a_share_of_itself():
    assert stretch_s(1.0) == 0.5
    assert stretch_s(0.0) == DEFAULT_TARGETS.shared_s


def test_a_prompt_alone_pays_an_empty_step_for_each_step_after_the_first():
    part_s = DEFAULT_TARGETS.part_s(0.001, 0.0)
    assert more_steps_s(0.001, 0.5 * (part_s - 0.001), 10, chunk_tokens=100) == 0.0
    assert more_steps_s(0.001, 4 * (part_s - 0.001), 10, chunk_tokens=100) == pytest.approx(0.003)
    assert more_steps_s(0.001, 0.0, 500, chunk_tokens=100) == pytest.approx(0.004)
