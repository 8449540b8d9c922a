"""What a gateway remembers: bounded, found again, told without a gap; and the figures of each second."""

import math
from types import SimpleNamespace
from typing import Any, cast

from gateway.dashboard.waterfall import parts, reasons
from gateway.observability.history import ROW_BYTES, AnswerStory, AttemptStory, History, Query, Row
from gateway.topology.events import PrefillStarted
from services.scheduling.overload import Targets
from services.scheduling.routing.route import Route

PHASES = ("queue", "prefill", "transfer", "decode")


def row(request_id: str = "one", **fields: Any) -> Row:
    return Row(request_id=request_id, **{"outcome": "finished", **fields})


def found(history: History, **query: Any) -> list[str]:
    return [each.request_id for each in history.find(Query(**query))[0]]


def test_the_latest_come_first_and_the_oldest_go() -> None:
    history = History(max_requests=3)
    for number in range(5):
        history.add(row(f"r{number}"), [])
    assert found(history) == ["r4", "r3", "r2"]
    assert history.last_number == 5
    assert history.story("r1") is None
    assert len(history) == 3


def test_it_is_bounded_in_bytes() -> None:
    history = History(max_bytes=20 * ROW_BYTES)
    attempts = [AttemptStory(0, 1, "decode-0", reason="x" * 400)]
    for number in range(200):
        history.add(row(f"r{number}"), [AnswerStory([("queue", 0)], attempts)])
        assert history.num_bytes <= 20 * ROW_BYTES
    assert 5 < len(history) < 20
    assert history.num_bytes == sum(ROW_BYTES + len(kept.story) for kept in history._kept)


def test_requests_are_found_by_words_and_by_fields() -> None:
    history = History()
    history.add(row("alpha", model="tiny", tenant="acme", service_class="batch", workers="p-1 d-1"), [])
    history.add(row("beta", model="large", tenant="acme", outcome="failed", code="worker_unavailable"), [])
    history.add(row("alpha", model="large", tenant="globex", workers="p-10 d-2"), [])
    assert found(history, q="ACME  al") == ["alpha"]
    assert found(history, q="worker_un") == ["beta"]
    assert found(history, q="tiny large") == []
    assert found(history, worker="p-1") == ["alpha"]
    assert found(history, tenant="acme", outcome="failed") == ["beta"]
    assert set(found(history)) - set(found(history, outcome="-failed")) == {"beta"}
    assert found(history, service_class="batch") == ["alpha"]
    assert found(history, model="large", before=3) == ["beta"]
    assert found(history, id="alph") == []
    assert history.find(Query(limit=2))[1]
    assert not history.find(Query(limit=3))[1]
    latest = history.story("alpha")
    assert latest is not None
    assert latest[0].tenant == "globex"
    first = history.story(number=1)
    assert first is not None
    assert first[0].tenant == "acme"


def test_a_request_is_good_if_all_its_answers_were_in_time() -> None:
    history = History(targets=Targets(ttft_s=1.0, itl_s=0.1))

    def answer(first_us: int | None, tpot_us: int) -> AnswerStory:
        return AnswerStory([("queue", 0)], first_token_us=first_us, tpot_us=tpot_us)

    assert history.note_end("finished", [answer(1_000_000, 100_000)])
    assert not history.note_end("finished", [answer(1_000_001, 0)])
    assert not history.note_end("finished", [answer(1, 1), answer(1, 100_001)])
    assert not history.note_end("failed", [answer(1, 1)])
    assert history.note_end("finished", [answer(None, 0)])
    assert history.num_ended == {"finished": 4, "failed": 1, "good": 2}
    assert History().note_end("finished", [answer(10**9, 10**9)])


def test_a_story_has_a_bound() -> None:
    story = AnswerStory([("queue", 0)])
    for number in range(1000):
        story.note_move("d", number, reason="move")
    assert len(story.attempts) == 64
    story.note_failure("first")
    story.note_failure("second")
    assert story.attempts[-1].failure == "first"


def test_what_workers_say_that_cannot_be_is_left_out() -> None:
    story = AnswerStory([("queue", 0)])
    story.note_move("d", 0, reason="move")
    story.note_prompt("p", PrefillStarted(math.nan))
    story.note_handoff(num_pages=1, num_bytes=2, exposed_s=math.inf, transport="shm", chunks=[(math.nan, -math.inf, 3)])
    (attempt,) = story.attempts
    assert (attempt.waited_us, attempt.exposed_us, attempt.chunks) == (0, 0, [(0, 0, 3)])


def test_names_of_nobody_are_no_mistake() -> None:
    """Terms of other policies' prices are told as far as the route has them, also where it has none at all."""
    decode = cast(Any, SimpleNamespace(worker_id="d", waiting_tokens=0))
    route = Route(decode, (), False, "x", 0.0, 0.0, 0, {})
    story = AnswerStory([("queue", 0)])
    story.note_route(route, None, prefill="", began_us=0, placed_us=0)
    assert reasons(story.attempts[0], 1) == ["x"]
    assert parts(story.attempts[0]) == {}
