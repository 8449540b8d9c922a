"""The log of decisions: it is decided again as it was, whatever cut it off."""

from pathlib import Path

import pytest

from planning.autoscaler.decisions import Begin, DecisionLog, Look, begun, decided, read_log
from planning.autoscaler.need import Speeds
from planning.autoscaler.policy import AutoscalerSettings, Observation
from planning.planner.question import LatencyTargets
from services.runtime.errors import ConfigError
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed

SPEEDS = Speeds(prefill=PrefillSpeed(0.001, 1e-3), decode=DecodeSpeed(0.01, 0.01), kv_tokens=10**6, max_batch=4)
BEGIN = Begin(
    settings=AutoscalerSettings(start_up_s=30.0, settle_s=40.0, changes_roles=False), targets=LatencyTargets()
)


class Life:
    """An autoscaler that writes its log, in a world where orders are carried out at once."""

    def __init__(self, file: Path, now_s: float, *, max_bytes: int = 1 << 20) -> None:
        self.log = DecisionLog(file, BEGIN, since_s=now_s - 300.0, max_bytes=max_bytes)
        self.now_s = now_s
        self.sizes = (1, 1)

    def look(self, num_arrived: int) -> Look:
        self.now_s += 10.0
        seen = Observation(
            now_s=self.now_s,
            elapsed_s=10.0,
            num_arrived=num_arrived,
            mean_prompt=450.0,
            mean_answer=101.0,
            backlog_s=0.0,
            prefill=self.sizes[0],
            decode=self.sizes[1],
        )
        decision = decided(self.log.autoscaler, seen, speeds=SPEEDS, targets=BEGIN.targets)
        look = Look(seen=seen, speeds=SPEEDS, decision=decision, done="ordered")
        self.log.write(look)
        self.sizes = decision.prefill, decision.decode
        return look


def decided_again(file: Path) -> list[bool]:
    autoscaler, found = None, []
    for record in read_log(file):
        if isinstance(record, Begin):
            autoscaler = begun(record)
        else:
            assert autoscaler is not None
            found.append(
                decided(autoscaler, record.seen, speeds=record.speeds, targets=BEGIN.targets) == record.decision
            )
    return found


def test_everything_is_decided_again_as_it_was_over_deaths_and_cut_off_lines(tmp_path: Path) -> None:
    file = tmp_path / "log"
    first = Life(file, 1000.0)
    for num in (0, 20, 80, 200, 400, 100):
        first.look(num)
    with file.open("ab") as stream:
        stream.write(b'{"what":"look","seen":{"now_s":10\n')
    first.log.close()
    second = Life(file, first.now_s + 60.0)
    second.sizes = first.sizes
    for num in (100, 0, 0, 0, 0, 0, 0):
        second.look(num)
    assert decided_again(file) == [True] * 13


def test_one_that_is_started_again_remembers_why_there_are_as_many(tmp_path: Path) -> None:
    file = tmp_path / "log"
    before = Life(file, 1000.0)
    for num in (200, 200, 200):
        before.look(num)
    assert before.sizes[1] > 1
    before.log.close()
    after, fresh = Life(file, before.now_s + 5.0), Life(tmp_path / "other", before.now_s + 5.0)
    after.sizes = fresh.sizes = before.sizes
    after.look(200)
    fresh.look(200)
    assert after.look(200).decision.reason.split("up to ")[1] == after.look(200).decision.reason.split("up to ")[1]
    after.log.close()
    late = Life(file, before.now_s + 4000.0)
    assert len([record for record in read_log(file) if isinstance(record, Begin)][-1].warm) == 0, "long ago"
    assert late.sizes == (1, 1)


def test_a_file_that_is_full_begins_anew_and_each_is_replayed_alone(tmp_path: Path) -> None:
    file = tmp_path / "log"
    life = Life(file, 1000.0, max_bytes=90_000)
    for number in range(150):
        life.look(50 * (number % 7))
    old = tmp_path / "log.1"
    assert old.exists()
    assert file.stat().st_size <= 90_000
    again = decided_again(file)
    assert all(again)
    assert again
    assert all(decided_again(old))


def test_a_file_has_one_autoscaler_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "log"
    first = Life(file, 1000.0, max_bytes=90_000)
    with pytest.raises(ConfigError, match=r"another autoscaler writes its decisions into .*log: give each copy"):
        Life(file, 1000.0)
    while not (tmp_path / "log.1").exists():
        first.look(50)
    with pytest.raises(ConfigError, match="another autoscaler"):
        Life(file, first.now_s)
    first.log.close()
    second = Life(file, first.now_s)
    second.look(50)
    assert all(decided_again(file))


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        DecisionLog(tmp_path / "no" / "log", BEGIN, since_s=0.0)
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_log(tmp_path / "none"))
