"""Events of answers: those that a client with a part of one gets, and those that go out at once."""

import pytest

from gateway.edge.events import events
from gateway.edge.generate import Known
from gateway.named.reader import Part
from gateway.types import Delta, Usage

USAGE = Usage(3, 0, 2, 0.0, 0.0, 0.0, 0.0)


class Written:
    """A writer that notes what it is shown."""

    has_usage = True
    waits_at_end = False

    def __init__(self, *, is_usage_continuous=False):
        self.is_usage_continuous = is_usage_continuous
        self.usages = []
        self.skipped = []

    def opening(self, choice):
        return b"open %d;" % choice

    def chunk(self, choice, delta, usage):
        self.usages.append(usage and usage.completion_tokens)
        return delta.text.encode()

    def with_ids(self, event, *, before, after):
        return event + f"[{before}>{after}]".encode()

    def skip(self, choice, token_ids, text, logprobs):
        self.skipped.append((choice, list(token_ids), text))

    def usage_chunk(self, usages):
        return b"usage %d" % sum(usage.completion_tokens for usage, _ in usages)


class Sender:
    """An exchange that can send at once, or not yet."""

    def __init__(self, *, can_send=True):
        self.can_send = can_send
        self.at_once = []

    def can_send_event_now(self):
        return self.can_send

    def send_event_now(self, event):
        self.at_once.append(event)


class Told:
    """Answers that come as the test says; a `Delta` by itself goes to the fast path."""

    def __init__(self, *told, num_answers=1, start_id="", known=()):
        self.specs = [type("Spec", (), {"prompt_token_ids": [5, 6, 7]}) for _ in range(num_answers)]
        self.start_id = start_id
        self._told = told
        self._known = dict(known)
        self.taken = []

    async def parts(self, take_now):
        for each in self._told:
            if isinstance(each, Part):
                yield each
            else:
                self.taken.append(take_now(each))

    def known(self, choice, num_tokens, *, has_all):
        token_ids = self._known[choice][:num_tokens]
        return Known(token_ids, "all" if has_all else "some", None)

    def usages(self):
        return [(USAGE, [5, 6, 7]) for _ in self.specs]


def delta(index, *token_ids, text="x", **fields):
    return Delta(index, list(token_ids), text, None, **fields)


def last(index, text=""):
    return Delta(index, [], text, None, "stop", USAGE)


async def sent(answers, writer, exchange=None):
    return [event async for event in events(exchange or Sender(), answers, writer) if event]


async def test_an_answer_is_opened_once_and_ends_with_its_usage():
    answers = Told(Part(0, delta(0, 1, text="a"), True), Part(0, last(1, "b"), False))
    assert await sent(answers, Written()) == [b"open 0;a", b"b", b"usage 2"]


async def test_what_can_be_sent_at_once_is_no_event():
    answers = Told(
        Part(0, delta(0, 1, text="a"), True), delta(1, 2, text="b"), delta(2, 3, text=""), Part(0, last(3), False)
    )
    exchange = Sender()
    assert await sent(answers, Written(), exchange) == [b"open 0;a", b"usage 2"]
    assert (exchange.at_once, answers.taken) == ([b"b"], [True, True])


async def test_a_client_that_does_not_take_its_events_gets_them_in_turn():
    answers = Told(Part(0, delta(0, 1), True), delta(1, 2), Part(0, last(2), False))
    await sent(answers, Written(), exchange := Sender(can_send=False))
    assert (exchange.at_once, answers.taken) == ([], [False])


@pytest.mark.parametrize("is_continuous", [False, True])
async def test_usage_grows_with_what_was_sent_either_way(is_continuous):
    answers = Told(Part(0, delta(0, 1), True), delta(1, 2, 3), Part(0, delta(3, 4), False), Part(0, last(4), False))
    writer = Written(is_usage_continuous=is_continuous)
    await sent(answers, writer)
    assert writer.usages == ([1, 3, 4, 2] if is_continuous else [None, None, None, 2])


async def test_each_event_of_a_named_answer_says_where_the_client_was_and_is():
    answers = Told(
        Part(0, delta(0, 1, text="a"), True, "r/0", "r/1"), Part(0, last(1, "b"), False, "", "r/1f"), start_id="r/-"
    )
    assert await sent(answers, Written()) == [b"open 0;[r/->r/0]a[r/0>r/1]", b"b[r/1>r/1f]", b"usage 2"]


async def test_a_writer_is_shown_what_its_client_has():
    answers = Told(
        Part(1, delta(2, 9, text="z"), False, "", "r/5f,3"),
        num_answers=2,
        start_id="r/5f,2",
        known={0: [1, 2, 3, 4, 5], 1: [7, 8, 9]},
    )
    writer = Written(is_usage_continuous=True)
    await sent(answers, writer)
    # The answer that the client has to its end is counted too.
    assert writer.skipped == [(1, [7, 8], "some"), (0, [1, 2, 3, 4, 5], "all")]
    assert writer.usages == [3]


async def test_a_last_part_that_comes_alone_follows_all_of_the_text():
    writer = Written()
    await sent(Told(Part(0, last(2), False, "", "r/2f"), start_id="r/2t", known={0: [7, 8]}), writer)
    assert writer.skipped == [(0, [7, 8], "all")]
