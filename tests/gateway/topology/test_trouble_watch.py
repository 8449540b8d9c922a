"""What is looked for each second: clocks, certificates, Redis, unreachable workers and links; and the end of each."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.topology.flapping import FLAP_WINDOW_S, FLAPS
from gateway.topology.presence import Presence, Seen
from gateway.topology.trouble_watch import (
    CLOCK_OFF_FOR_S,
    DAY_S,
    HOT_FOR_S,
    HOT_OBSTACLES,
    LARGE_BYTES,
    LINK_FOR_S,
    SLOW_LINK_FOR_S,
    SLOW_REDIS_FOR_S,
    UNREACHABLE_AFTER_S,
    TroubleWatch,
    circuits,
    failing_tasks,
    hot_decodes,
    hot_prefills,
    quarantined,
    slow_links,
    unreadable_keys,
)
from gateway.topology.troubles import Found, Kind, Troubles
from gateway.topology.watch import CircuitReport, CutPairReport
from services.runtime import logs, rpc
from services.runtime.background_tasks import FailingTask
from services.runtime.breaker import CircuitState
from services.runtime.errors import TransferFailed, TransferStalled
from services.runtime.reach import NO_TLS
from services.runtime.tls import Identity
from services.scheduling.handoff_times import SlowPair
from services.scheduling.prediction import PrefillSpeed
from services.scheduling.rebalancing import HotSpot

UNIX_S = 1_800_000_000.0


class Wall:
    """A clock that is set by hand; both of its times move together."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return round((UNIX_S + self.now_s) * 1e9)


def member(id_: str, **what: Any) -> Any:
    """A member as the watch sees it."""
    record = SimpleNamespace(
        id=id_,
        role="decode",
        address=f"{id_}:1",
        incarnation="a",
        certificate_end_unix_s=what.pop("certificate_end_unix_s", 0),
        kernels_error=what.pop("kernels_error", ""),
    )
    session = SimpleNamespace(is_up=True, load=SimpleNamespace(clock_ahead_s=what.pop("clock_ahead_s", None)))
    facts = {"state": "ready", "left_out": "", "obstacle": None, "changed_at_s": 0.0, **what}
    return SimpleNamespace(record=record, session=session, **facts)


class Scene:
    """A watch over members that are set by hand."""

    def __init__(self) -> None:
        self.wall, self.presence = Wall(), Presence(lambda: {"decode": 1})
        self.members: list[Any] = []
        self.store = SimpleNamespace(is_up=True, last_failure="", round_trip=SimpleNamespace(waited_s=0.001))
        topology = SimpleNamespace(
            members=lambda: self.members,
            presence=self.presence,
            now_s=self.wall.monotonic,
            look_for_missing=lambda: None,
            watch_handoffs=lambda note: None,
        )
        self.told: dict[Kind, Mapping[str, Found]] = {}
        self.reports: dict[str, CircuitReport] = {}
        self.watch = TroubleWatch(
            Troubles(clock=self.wall),
            cast(Any, topology),
            cast(Any, self.store),
            told=lambda: self.told,
            reports=lambda: self.reports,
            clock=self.wall,
        )

    def look(self, after_s: float = 0.0) -> dict[tuple[str, str], str]:
        """The causes of all troubles, after a time."""
        self.wall.now_s += after_s
        for _ in self.watch.pieces():
            pass
        return {(trouble.kind, trouble.subject): trouble.cause for trouble in self.watch.troubles.all()}


@pytest.fixture
def scene() -> Iterator[Scene]:
    yield Scene()
    rpc.set_identity(None)


def test_nothing_is_found_where_nothing_is(scene: Scene) -> None:
    scene.members = [member("d", clock_ahead_s=1.5, certificate_end_unix_s=int(UNIX_S + 30 * DAY_S)), member("e")]
    assert scene.look() == scene.look(60.0) == {}


@pytest.mark.parametrize(("ahead_s", "words"), [(30.0, "30 s ahead of"), (-5.0, "5 s behind")])
def test_a_clock_that_stays_wrong(scene: Scene, ahead_s: float, words: str) -> None:
    scene.members = [member("d", clock_ahead_s=ahead_s)]
    assert scene.look() == scene.look(CLOCK_OFF_FOR_S - 0.1) == {}
    assert words in scene.look(0.1)["clock", "d"]
    scene.members = [member("d", clock_ahead_s=0.0)]
    assert scene.look(1.0) == {}
    scene.members = [member("d", clock_ahead_s=ahead_s)]
    assert scene.look(1.0) == {}, "one late message is not a wrong clock"


def test_a_worker_that_fails_again_and_again(scene: Scene) -> None:
    for _ in range(FLAPS):
        scene.members = [member("d"), member("e")]
        assert scene.look(1.0) == {}
        scene.members = [member("d", state="lost", changed_at_s=scene.wall.now_s), member("e")]
        last = scene.look(1.0)
    assert last == {("flapping", "d"): f"it failed {FLAPS} times within 10 minutes"}
    scene.members = [member("d"), member("e")]
    assert scene.look(FLAP_WINDOW_S) == {}


@pytest.mark.parametrize(("state", "is_flapping"), [("open", True), ("half_open", True), ("suspected", False)], ids=str)
def test_an_ejection_is_a_failure(scene: Scene, state: CircuitState, is_flapping: bool) -> None:
    scene.members = [member("d")]
    report = CircuitReport("d", state, "slow", "too slow", {}, 1.0, 1)
    for _ in range(FLAPS):
        scene.reports = {}
        scene.look(1.0)
        scene.reports = {"d": report}
        scene.told = {"circuit": circuits([report], [])}
        found = scene.look(1.0)
    assert (("flapping", "d") in found) == is_flapping
    assert ("circuit", "d") in found


def test_a_log_that_cannot_be_written(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = logs.LostLines()
    monkeypatch.setattr(logs, "lost", lost)
    assert scene.look() == {}
    lost.count, lost.error = 7, "No space left on device"
    assert scene.look() == {("log", "gateway"): "7 lines of the log could not be written: No space left on device"}
    lost.error = ""
    assert scene.look() == {}


def test_certificates_that_end_soon(scene: Scene) -> None:
    scene.members = [
        member("expired", certificate_end_unix_s=int(UNIX_S)),
        member("soon", certificate_end_unix_s=int(UNIX_S + 2.5 * DAY_S + 100)),
        member("later", certificate_end_unix_s=int(UNIX_S + 8 * DAY_S)),
        member("none"),
    ]
    rpc.set_identity(cast(Identity, SimpleNamespace(end_unix_s=lambda: UNIX_S + DAY_S + 100)))
    assert scene.look() == {
        ("certificate", "expired"): "it has expired",
        ("certificate", "gateway"): "it expires in 1.0 days",
        ("certificate", "soon"): "it expires in 2.5 days",
    }


def test_a_worker_without_compiled_kernels(scene: Scene) -> None:
    scene.members = [member("with"), member("without", kernels_error="there is no C++ compiler on the path")]
    cause = "it computes with torch, without compiled kernels: there is no C++ compiler on the path"
    assert scene.look() == {("kernels", "without"): cause}
    (trouble,) = scene.watch.troubles.of("kernels")
    assert "install g++ or clang++" in trouble.remedy
    scene.members = [member("with"), member("without")]
    assert scene.look(1.0) == {}


def test_a_worker_that_stays_unreachable(scene: Scene) -> None:
    scene.members = [
        member("d", state="lost", obstacle=NO_TLS, changed_at_s=scene.wall.now_s),
        member("s", state="starting", changed_at_s=0.0),
        member("o", state="left_out", left_out="other weights"),
    ]
    assert scene.look() == {("left_out", "o"): "other weights"}
    found = scene.look(UNREACHABLE_AFTER_S)
    assert found["unreachable", "d"] == f"at d:1: {NO_TLS.cause}"
    assert len(found) == 2
    scene.members = []
    assert scene.look(1.0) == {}


def test_a_file_of_keys_that_cannot_be_read(scene: Scene) -> None:
    scene.told = {"api_keys": unreadable_keys("line 3 is no TOML")}
    assert scene.look() == {("api_keys", "gateway"): "line 3 is no TOML"}
    scene.told = {"api_keys": unreadable_keys("")}
    assert scene.look() == {}


def test_a_background_task_that_keeps_failing(scene: Scene) -> None:
    tasks = [FailingTask("session", "d-0", 7, "KeyError (session.py:290); the log has the rest", 1.0)]
    tasks.append(FailingTask("workers", "", 3, "Redis does not answer", 2.0))
    scene.told = {"background_task": failing_tasks(tasks)}
    assert scene.look() == {
        ("background_task", "session d-0"): (
            "it failed 7 times in a row, most recently with: KeyError (session.py:290); the log has the rest"
        ),
        ("background_task", "workers"): "it failed 3 times in a row, most recently with: Redis does not answer",
    }
    scene.told = {"background_task": failing_tasks([])}
    assert not scene.look()


def test_redis_that_is_far_and_redis_that_is_away(scene: Scene) -> None:
    scene.store.round_trip.waited_s = 0.2
    assert scene.look() == {}
    assert scene.look(SLOW_REDIS_FOR_S) == {("redis_slow", "redis"): "a call takes 200 ms on average"}
    scene.store.is_up, scene.store.last_failure = False, "Connection refused"
    assert scene.look() == {("redis", "redis"): "Connection refused"}
    scene.store.last_failure = "invalid username-password pair"
    assert scene.look(1.0) == {("redis", "redis"): "invalid username-password pair"}
    (trouble,) = scene.watch.troubles.all()
    assert "password" in trouble.remedy
    scene.store.is_up, scene.store.round_trip.waited_s = True, 0.001
    assert scene.look(1.0) == {}


def test_a_link_that_loses_large_packets(scene: Scene) -> None:
    scene.members = [member("p"), member("d")]
    note = scene.watch.note_handoff
    note("p", "d", TransferFailed("a checksum is wrong"))
    assert scene.look() == {}
    note("p", "d", TransferStalled("it does not move"))
    assert "large packets are lost" in scene.look()["link", "p to d"]
    note("p", "d", LARGE_BYTES - 1)
    note("p", "other", LARGE_BYTES)
    assert len(scene.look()) == 1
    note("p", "d", LARGE_BYTES)
    assert scene.look() == {}
    note("p", "d", TransferStalled("it does not move"))
    assert len(scene.look(LINK_FOR_S - 1.0)) == 1
    note("p", "d", TransferStalled("it does not move"))
    assert len(scene.look(LINK_FOR_S - 1.0)) == 1
    assert scene.look(1.0) == {}, "nobody has tried it for a while"
    note("p", "d", TransferStalled("it does not move"))
    scene.members = [member("p")]
    assert scene.look() == {}


def test_who_is_gone_and_how_many_are_missing(scene: Scene) -> None:
    scene.presence.left(
        Seen("d", "decode", "m", "host", "d:1", "lost", has_worked=True), 0.0, unix_s=UNIX_S, in_order=False
    )
    scene.presence.look([], 0.0)
    scene.presence.look([], 20.0)
    assert scene.look() == {
        ("gone", "d"): "the decode worker at d:1 (host) vanished without a word",
        ("missing", "decode"): "0 of 1 decode workers are ready",
    }


def test_a_circuit_is_a_trouble_until_it_is_closed(scene: Scene) -> None:
    slow = CircuitReport("d", "open", "slow", "6 times as long as the others", {"ratio": 6.0}, 3.0, 2)
    pair = CutPairReport("p", "d", "open", "the link is down", 4.0)
    scene.told = {"circuit": circuits([slow], [pair])}
    assert scene.look() == {
        ("circuit", "d"): "it is kept from work: slow: 6 times as long as the others (since 3 s, 2 times lately)",
        ("circuit", "p to d"): "the pair is blocked: the link is down (since 4 s)",
    }
    assert "trials" in scene.watch.troubles.of("circuit")[0].remedy
    scene.told = {"circuit": {}}
    assert scene.look() == {}


def test_a_pair_with_slow_handoffs_is_named_if_that_lasts_and_no_worker_is(scene: Scene) -> None:
    scene.members = [member("p"), member("d")]
    scene.told = {"link": slow_links([SlowPair(("p", "d"), 6.1, 1.2, 0.8)])}
    assert scene.look() == {}
    cause = "handoffs take 0.8 s, 6.1 times as long as expected, between other workers 1.2 times"
    assert scene.look(SLOW_LINK_FOR_S) == {("link", "p to d"): cause}
    assert "GPU" not in scene.watch.troubles.of("link")[0].remedy
    scene.watch.note_handoff("p", "other", TransferStalled("it does not move"))
    scene.told = {"link": {}}
    scene.members.append(member("other"))
    assert list(scene.look()) == [("link", "p to other")]


def test_quarantine_is_a_trouble_while_it_lasts(scene: Scene) -> None:
    for number, words in ((1, "1 request is refused"), (3, "3 requests are refused")):
        scene.told = {"quarantine": quarantined(number)}
        (cause,) = scene.look().values()
        assert cause.startswith(words)
    scene.told = {"quarantine": quarantined(0)}
    assert scene.look() == {}


def test_a_hot_spot_is_told_when_it_lasts_with_its_cause(scene: Scene) -> None:
    scene.told = {"hot_spot": hot_decodes({"d": HotSpot(0.3, 0.1, "full")})}
    assert scene.look() == {}
    scene.wall.now_s += HOT_FOR_S
    cause = "its steps take 300 ms, those of the others 100: the others have no room for its answers"
    assert scene.look() == {("hot_spot", "d"): cause}
    assert "add a decode worker" in scene.watch.troubles.of("hot_spot")[0].remedy
    scene.told = {"hot_spot": {}}
    assert scene.look() == {}


def test_every_obstacle_has_words() -> None:
    for obstacle, (why, _) in HOT_OBSTACLES.items():
        (found,) = hot_decodes({"d": HotSpot(0.3, 0.1, obstacle)}).values()
        assert found.cause.endswith(f": {why}")


MS_A_TOKEN = PrefillSpeed(0.0, 0.001)


def test_a_prefill_worker_where_far_more_waits_than_at_the_others() -> None:
    def prefill(id_: str, waiting_tokens: int, *, model: str = "m", speed: Any = MS_A_TOKEN) -> Any:
        one = member(id_)
        one.record.role, one.record.model = "prefill", model
        one.load = SimpleNamespace(prefill_speed=speed, waiting_tokens=waiting_tokens)
        return one

    (found,) = hot_prefills([prefill("a", 9000), prefill("b", 1000), prefill("c", 3000)]).items()
    assert (found[0], found[1].cause) == ("a", "prompts of 9.0 s wait there, at the others of 2.0 s")
    assert hot_prefills([prefill("a", 9000), prefill("b", 4000)]) == {}, "the other one waits nearly as long"
    assert hot_prefills([prefill("a", 1900), prefill("b", 0)]) == {}, "it is not long"
    assert hot_prefills([prefill("a", 9000), prefill("b", 0, model="other")]) == {}, "nothing to compare it with"
    assert hot_prefills([prefill("a", 9000, speed=None), prefill("b", 0)]) == {}, "it has measured nothing"
