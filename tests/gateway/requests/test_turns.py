"""The turns of models that share workers, as a gateway takes them: with files, and without any worker."""

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.observability.metrics import Metrics
from gateway.requests.turns import ModelTurns
from services.runtime.worker_state import WorkerState
from services.scheduling.turns import MIN_LIMIT_S, REST_S


class Setting:
    """Two workers of one group, three models that share them and one that does not, and a clock that is set by hand."""

    def __init__(self, folder: Path | None) -> None:
        self.now_s = 1000.0
        self.answers: list[Any] = []
        self.folder = folder
        self.workers = [self.worker(role) for role in ("prefill", "decode")]
        self.metrics = Metrics()
        catalog = [SimpleNamespace(name=name, share="all") for name in "abc"] + [SimpleNamespace(name="x", share="")]
        self.topology: Any = SimpleNamespace(members=lambda: self.workers, num_ready=self.num_ready, stale_since_s=None)
        policies: Any = SimpleNamespace(model_files=folder, turn_s=10.0)
        self.turns = ModelTurns(
            self.topology,
            catalog,  # type: ignore[arg-type]
            policies=policies,
            answers=lambda: self.answers,
            metrics=self.metrics,
            clock=SimpleNamespace(monotonic=lambda: self.now_s),  # type: ignore[arg-type]
        )

    def worker(self, role: str) -> Any:
        return SimpleNamespace(
            record=SimpleNamespace(id=f"{role}-0", role=role, model="a", group="all-0", asleep=()),
            state=WorkerState.READY,
            load=SimpleNamespace(running=0, waiting=0),
            session=SimpleNamespace(num_open_attempts=0),
        )

    def num_ready(self, role: str, model: str) -> int:
        return sum(
            one.state == WorkerState.READY and (one.record.role, one.record.model) == (role, model)
            for one in self.workers
        )

    def ask(self, model: str) -> None:
        self.answers.append(SimpleNamespace(spec=SimpleNamespace(model=model, arrived_s=self.now_s)))

    def become(self, model: str, *, asleep: tuple[str, ...] = (), state: WorkerState = WorkerState.READY) -> None:
        for one in self.workers:
            one.record.model, one.record.asleep, one.state = model, asleep, state

    def look(self, after_s: float = 0.0) -> str:
        """Looks, and returns the model that the workers are told to have; empty: they are told none."""
        self.now_s += after_s
        self.turns.look()
        assert self.folder is not None
        file = self.folder / "all-0.model"
        return file.read_text(errors="replace") if file.exists() else ""


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_a_model_that_is_asked_for_is_told_to_wake_and_its_time_is_measured(setting: Setting) -> None:
    assert setting.look() == ""
    setting.ask("x")
    assert setting.look(60.0) == "", "that one has workers of its own"
    setting.answers.clear()
    setting.ask("b")
    assert setting.look() == "b"
    assert (setting.turns.state_of("a"), setting.turns.state_of("b")) == ("awake", "switching")
    setting.become("b", asleep=("a",), state=WorkerState.STARTING)
    setting.ask("c")
    assert setting.look(3.0) == "b", "it is on its way"
    setting.become("b", asleep=("a",))
    assert setting.look(1.0) == "b"
    states = {name: setting.turns.state_of(name) for name in "abcx"}
    assert states == {"a": "asleep", "b": "awake", "c": "on_disk", "x": None}
    page = setting.metrics.render([]).decode()
    assert 'tandem_model_switch_seconds_sum{from="disk",model="b"} 4' in page
    assert setting.turns.not_awake("c").retry_after_s == pytest.approx(4.0)


def test_other_requests_than_answers_wake_a_model(setting: Setting) -> None:
    texts: list[Any] = []
    setting.turns.add_source(lambda: texts)
    setting.look()
    texts.append(SimpleNamespace(model="b", arrived_s=setting.now_s))
    assert setting.look(50.0) == "b"


def test_a_busy_model_has_its_turn(setting: Setting) -> None:
    setting.ask("a")
    setting.workers[1].load.running = 1
    assert setting.look() == ""
    setting.ask("b")
    assert setting.look(9.0) == ""
    assert setting.look(1.0) == "b"


def test_a_group_is_awake_only_when_all_its_workers_are(setting: Setting) -> None:
    setting.look()
    setting.ask("b")
    assert setting.look(50.0) == "b"
    setting.workers[1].record.model = "b"
    setting.ask("c")
    assert setting.look(30.0) == "b", "the other worker still serves a"
    assert setting.turns.state.groups[0].state == "switching"


def test_one_that_does_not_wake_is_given_up_and_rests(setting: Setting) -> None:
    setting.look()
    setting.ask("b")
    assert setting.look(50.0) == "b"
    assert setting.look(MIN_LIMIT_S + 0.1) == "a"
    assert setting.look(1.0) == "a"
    assert setting.look(REST_S - 2.0) == "a"
    assert setting.look(2.0) == "b", "it is tried again"


def test_nothing_changes_while_redis_is_away_or_another_gateway_decides(setting: Setting, tmp_path: Path) -> None:
    setting.look()
    setting.ask("b")
    setting.topology.stale_since_s = 1.0
    assert setting.look(50.0) == ""
    setting.topology.stale_since_s = None
    lock = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert setting.look(50.0) == ""
    finally:
        os.close(lock)
    assert setting.look() == "b"


def test_what_another_gateway_has_decided_holds_and_a_restart_finds_it(tmp_path: Path) -> None:
    one, other = Setting(tmp_path), Setting(tmp_path)
    one.look()
    other.look()
    one.ask("b")
    other.ask("c")
    assert one.look(50.0) == "b"
    other.now_s = one.now_s
    assert other.look() == "b"
    assert (tmp_path / "all-0.model").read_text() == "b"
    later = Setting(tmp_path)
    later.ask("c")
    assert later.look(50.0) == "b", "its workers are not what they are to be yet"


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"x", b"none of them", b"a" * 100_000])
def test_a_file_with_nonsense_stands_for_what_the_workers_have(
    setting: Setting, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "all-0.model").write_bytes(content)
    setting.look()
    assert setting.turns.state_of("a") == "awake"
    setting.ask("b")
    setting.look(50.0)
    assert (tmp_path / "all-0.model").read_text() == "b"


def test_without_a_folder_nothing_is_decided_and_requests_may_wait() -> None:
    setting = Setting(None)
    setting.ask("b")
    setting.turns.look()
    setting.now_s += 100.0
    setting.turns.look()
    assert setting.turns.state_of("a") == "awake"
    assert setting.turns.takes_turns("b")
    assert setting.turns.is_asleep("b")
    assert not setting.turns.takes_turns("x")
    setting.workers.clear()
    assert not setting.turns.takes_turns("b"), "nothing could wake it"


def test_a_gateway_can_serve_once_any_of_them_was_awake(setting: Setting) -> None:
    setting.become("a", state=WorkerState.STARTING)
    setting.look()
    assert not setting.turns.can_wake("b")
    setting.become("a")
    setting.look()
    assert setting.turns.can_wake("b")
    assert not setting.turns.can_wake("x")
    setting.ask("b")
    setting.look(50.0)
    setting.become("b", state=WorkerState.STARTING)
    setting.look()
    assert setting.turns.can_wake("a"), "in the middle of a switch"
    del setting.workers[1]
    setting.look()
    assert not setting.turns.can_wake("a"), "nothing decodes"
    assert setting.turns.takes_turns("a"), "and may come back"
