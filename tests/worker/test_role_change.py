import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.runtime.errors import ConfigError
from tests.waiting import HANG_LIMIT_S, settle, until
from worker import role_change
from worker.role_change import Life, LifeChange, Lives, Wish

PREFILL: Any = SimpleNamespace(name="prefill")
DECODE: Any = SimpleNamespace(name="decode")


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_change, "LOOK_S", 0.001)


class Preparing:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: ConfigError | None = None

    async def __call__(self, wanted: Life) -> None:
        self.asked.append(wanted.role.name)
        if self.error is not None:
            raise self.error


ROLES: dict[str, Any] = {"prefill": PREFILL, "decode": DECODE}
BEGINS = Life(PREFILL, "small")


def lives(file: Path | None, model_file: Path | None = None) -> Lives:
    return Lives(Wish(ROLES, file), Wish({name: name for name in ("small", "org/Large")}, model_file))


def test_a_process_without_a_file_has_its_first_role() -> None:
    assert Wish({"decode": DECODE, "prefill": PREFILL}).wanted is DECODE


def test_the_file_names_the_role_and_nonsense_in_it_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "w.role"
    roles = Wish(ROLES, file)
    assert roles.wanted is PREFILL
    for content, wanted in (
        (b"decode", DECODE),
        (b"", DECODE),  # somebody is writing it
        (b"prefi", DECODE),
        (b"\xff\x00nonsense", DECODE),
        (b"decode" * 1000, DECODE),
        (b"  prefill\n", PREFILL),
        (b"gateway", PREFILL),
        (b"decode\n", DECODE),
    ):
        file.write_bytes(content)
        assert roles.wanted is wanted, content
    file.unlink()
    assert roles.wanted is PREFILL, "as it was started"
    file.mkdir()
    assert roles.wanted is PREFILL, "what cannot be read changes nothing"


async def test_a_change_is_due_when_it_is_prepared_and_can_be_withdrawn(tmp_path: Path) -> None:
    file, prepare = tmp_path / "w.role", Preparing()
    change = LifeChange(lives(file), BEGINS, prepare)
    due = asyncio.create_task(change.due())
    await settle()
    assert (due.done(), prepare.asked) == (False, [])
    file.write_text("decode")
    await asyncio.wait_for(due, HANG_LIMIT_S)
    assert prepare.asked == ["decode"]
    withdrawn = asyncio.create_task(change.withdrawn())
    await settle()
    assert not withdrawn.done()
    file.unlink()
    await asyncio.wait_for(withdrawn, HANG_LIMIT_S)


async def test_another_model_is_a_change_as_another_role_is(tmp_path: Path) -> None:
    file, prepare = tmp_path / "a-0.model", Preparing()
    wish = lives(None, file)
    due = asyncio.create_task(LifeChange(wish, BEGINS, prepare).due())
    file.write_text("none of them")
    await settle()
    assert not due.done()
    file.write_text("org/Large\n")
    await asyncio.wait_for(due, HANG_LIMIT_S)
    assert wish.wanted == Life(PREFILL, "org/Large")


async def test_what_has_just_failed_is_tried_when_it_is_wanted_anew(tmp_path: Path) -> None:
    file, prepare = tmp_path / "a-0.model", Preparing()
    file.write_text("org/Large")
    change = LifeChange(lives(None, file), BEGINS, prepare, failed=Life(PREFILL, "org/Large"))
    due = asyncio.create_task(change.due())
    await settle()
    assert (due.done(), prepare.asked) == (False, [])
    file.write_text("small")
    await until(lambda: change._failed is None)
    file.write_text("org/Large")
    await asyncio.wait_for(due, HANG_LIMIT_S)


async def test_a_role_that_cannot_be_had_is_told_once_and_tried_when_it_is_wanted_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, prepare = tmp_path / "w.role", Preparing()
    prepare.error = ConfigError("no room for the draft")
    file.write_text("decode")
    change = LifeChange(lives(file), BEGINS, prepare)
    with caplog.at_level(logging.ERROR):
        due = asyncio.create_task(change.due())
        await until(lambda: caplog.records)
    assert (due.done(), prepare.asked) == (False, ["decode"])
    (record,) = caplog.records
    assert vars(record)["reason"] == "no room for the draft"
    file.unlink()
    await until(lambda: change._failed is None)
    prepare.error = None
    file.write_text("decode")
    await asyncio.wait_for(due, HANG_LIMIT_S)
    assert prepare.asked == ["decode", "decode"]


async def test_a_bug_in_preparing_is_not_taken_for_a_refusal(tmp_path: Path) -> None:
    file = tmp_path / "w.role"
    file.write_text("decode")

    async def fail(wanted: Life) -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        await LifeChange(lives(file), BEGINS, fail).due()
