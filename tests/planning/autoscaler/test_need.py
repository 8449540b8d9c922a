"""Speeds in the middle of the workers, and how many of them a load takes."""

import pytest

from planning.autoscaler.need import Speeds, WorkerFacts, measured, need_of
from planning.planner.question import LatencyTargets
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed


def worker(role: str, *, prompt_s: float | None = None, step_s: float | None = None, tokens: int = 0) -> WorkerFacts:
    return WorkerFacts(
        role=role,
        state="ready",
        prefill=None if prompt_s is None else PrefillSpeed(prompt_s, 0.0),
        decode=None if step_s is None else DecodeSpeed(step_s, 0.0),
        kv_tokens=tokens,
        max_batch=4,
        waiting_tokens=0,
    )


def test_speeds_are_those_in_the_middle_and_stay_while_nobody_tells_any() -> None:
    decodes = [worker("decode", step_s=step_s, tokens=1000) for step_s in (0.01, 0.02, 9.0)]
    speeds = measured([worker("prefill", prompt_s=0.5), *decodes], None)
    assert speeds == Speeds(prefill=PrefillSpeed(0.5, 0.0), decode=DecodeSpeed(0.02, 0.0), kv_tokens=1000, max_batch=4)
    later = measured([worker("prefill"), worker("decode", step_s=0.03)], speeds)
    assert later is not None
    assert (later.prefill, later.decode, later.kv_tokens) == (speeds.prefill, DecodeSpeed(0.03, 0.0), 1000)


def test_decode_workers_tell_how_fast_prompts_are_where_no_prefill_worker_does() -> None:
    speeds = measured([worker("decode", prompt_s=0.25, step_s=0.02, tokens=10)], None)
    assert speeds is not None
    assert speeds.prefill == PrefillSpeed(0.25, 0.0)
    assert measured([worker("decode", step_s=0.02)], None) is None
    assert measured([worker("prefill", prompt_s=0.02)], None) is None


def test_a_load_takes_what_closed_forms_say() -> None:
    speeds = Speeds(prefill=PrefillSpeed(0.0, 1e-3), decode=DecodeSpeed(0.01, 0.01), kv_tokens=10**6, max_batch=4)
    need = need_of(speeds.kind, speeds.kind, targets=LatencyTargets())
    prefill, decode = need(2.0, 450, 101)
    assert prefill == pytest.approx(2.0 * 0.45 / 0.9)
    assert decode == pytest.approx(2.0 / (4 / (100 * 0.05)))
    _, kept_short = need_of(speeds.kind, speeds.kind, targets=LatencyTargets(tpot_s=0.031))(2.0, 450, 101)
    assert kept_short == pytest.approx(2.0 / (2 / (100 * 0.03)))
    assert need(0.0, 450, 101) == (0.0, 0.0)
