from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.runtime.errors import ModelError
from worker import models as module
from worker.models import Models


class Weights:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Loaded:
    def __init__(self, weights: Weights, *, keeps: bool, fails: bool = False) -> None:
        self.used, self.weights = weights, weights if keeps else None
        self.fails = fails
        self.is_closed = False

    def identity(self, **_: str) -> str:
        if self.fails:
            raise KeyError("a bug")
        return "identity"

    def close(self) -> None:
        self.is_closed = True


@dataclass(frozen=True)
class Settings:
    model: Path
    model_name: str


class Role:
    """Notes what is loaded from disk, and what of kept weights."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.loads: list[tuple[str, str]] = []
        self.keeps, self.fails = keeps, False
        self.last: Loaded | None = None

    def load(self, settings: Settings, kept: Weights | None) -> Loaded:
        self.loads.append((settings.model_name, "disk" if kept is None else kept.name))
        self.last = Loaded(kept or Weights(settings.model_name), keeps=self.keeps, fails=self.fails)
        return self.last


@pytest.fixture(autouse=True)
def _no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_model_facts", lambda folder: SimpleNamespace(vocabulary=str(folder)))


def models(max_asleep: int) -> Models:
    folders = {name: Path("/nowhere") / name for name in "abc"}
    return Models(Settings(folders["a"], "a"), folders, max_asleep=max_asleep)  # type: ignore[arg-type]


def run(role: Any, kept: Models, names: str) -> list[Any]:
    awake = []
    for name, wanted in zip(names, names[1:] + " ", strict=True):
        kept.wake(role, name)
        awake.append(kept.awake)
        assert awake[-1].settings.model == Path("/nowhere") / name
        kept.lay_down(wanted)
    return awake


def test_the_weights_that_were_used_last_stay_and_the_others_are_closed() -> None:
    role, kept = Role(), models(1)
    first, second, *_ = run(role, kept, "abac")
    assert role.loads == [("a", "disk"), ("b", "disk"), ("a", "a"), ("c", "disk")]
    assert kept.asleep == ("c",)
    assert first.loaded.used.is_closed
    assert second.loaded.used.is_closed
    role, kept = Role(), models(2)
    run(role, kept, "abaca")
    assert role.loads == [("a", "disk"), ("b", "disk"), ("a", "a"), ("c", "disk"), ("a", "a")]
    assert kept.asleep == ("c", "a")


def test_a_model_that_is_awake_counts_for_nothing() -> None:
    role, kept = Role(), models(1)
    run(role, kept, "a")
    kept.wake(role, "a")  # type: ignore[arg-type]
    assert kept.asleep == ()
    assert not kept.awake.loaded.used.is_closed  # type: ignore[attr-defined]


@pytest.mark.parametrize(("keeps", "max_asleep"), [(False, 3), (True, 0)])
def test_what_may_not_stay_is_closed(keeps: bool, max_asleep: int) -> None:
    role, kept = Role(keeps=keeps), models(max_asleep)
    (awake,) = run(role, kept, "a")
    assert awake.loaded.is_closed
    assert kept.asleep == ()


def test_the_end_closes_what_sleeps() -> None:
    role, kept = Role(), models(2)
    awake = run(role, kept, "ab")
    kept.wake(role, "c")  # type: ignore[arg-type]
    last = kept.awake.loaded
    kept.close()
    assert [one.loaded.used.is_closed for one in awake] == [True, True]
    assert last.is_closed  # type: ignore[attr-defined]
    assert kept.asleep == ()


def test_a_model_that_was_loaded_in_vain_is_closed() -> None:
    role, kept = Role(), models(1)
    role.fails = True
    with pytest.raises(KeyError):
        kept.wake(role, "a")  # type: ignore[arg-type]
    assert role.last is not None
    assert role.last.is_closed


def test_a_folder_that_cannot_be_served_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(folder: Path) -> Any:
        raise ModelError(f"{folder} has no config.json")

    monkeypatch.setattr(module, "read_model_facts", read)
    with pytest.raises(ModelError, match="/nowhere/b has no config"):
        models(1).check("b")
