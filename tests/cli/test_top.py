"""`tandem top`: what a frame says, that it fits, and how it ends on a terminal."""

import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from cli.top import CLOSE_SCREEN, MAX_TROUBLES, OPEN_SCREEN, bar, frame, sparkline
from tests.waiting import HANG_LIMIT_S

ROOT = Path(__file__).parents[2]


def worker(**fields: Any) -> dict[str, Any]:
    return {
        **{"id": "decode-0", "role": "decode", "state": "ready", "circuit": "closed", "running": 5, "waiting": 6},
        **{"pages": {"total": 100, "free": 50, "cached": 25, "reserved": 5, "used": 20}},
        **{"prefill_tokens_per_s": None, "step_s": 0.0123, "gpu": None, **fields},
    }


def request(**fields: Any) -> dict[str, Any]:
    return {
        **{"request_id": "r-1", "model": "tiny", "service_class": "normal", "outcome": "finished", "code": ""},
        **{"ended_unix_ms": 1_700_000_000_000, "prompt_tokens": 7, "generated_tokens": 9, "ttft_us": 20_000},
        **{"total_us": 2_000_000, "queue_us": 0, "prefill_us": 500_000, "transfer_us": 0, "decode_us": 1_500_000},
        **fields,
    }


def data(**fields: Any) -> dict[str, Any]:
    names = ("ttft", "itl")
    series = {f"{name}_p{share}_s": [None, 0.01, 0.02] for name in names for share in (50, 90, 99)}
    for name in ("generated_per_s", "prompt_per_s", "good_per_s", "finished_per_s", "refused_per_s", "failed_per_s"):
        series[name] = [0.0, 1.0, 2.0]
    return {
        "gateway": {"id": "ab12", "cluster": "here", "started_unix_s": 100.0},
        "now_unix_s": 160.0,
        "requests": {"running": 3, "queued": 4},
        "workers": [worker()],
        "series": {**series, "hit_share": [None, None, 0.5]},
        **fields,
    }


def test_a_frame_says_why_a_worker_gets_no_work() -> None:
    found = "slow: what comes takes 6.1 times as long as expected (since 12 s)"
    text = "\n".join(frame(data(workers=[worker(circuit="open", circuit_found=found)]), [], width=140, height=40))
    assert "ready, circuit open" in text
    assert f"decode-0: {found}" in text


def test_a_frame_says_what_there_is() -> None:
    text = "\n".join(frame(data(), [request()], width=140, height=40))
    assert "cluster here, gateway ab12, up 60 s: 3 running, 4 queued" in text
    assert "p50   20 ms" in text
    assert "50.0 %" in text
    row = next(line for line in text.splitlines() if line.startswith("decode-0"))
    assert row.split() == [
        "decode-0",
        "ready",
        f"#####/{6 * ':'}{12 * '.'}",
        *["25.0", "%", "5", "6", "12.3", "ms", "a", "step"],
    ]
    assert "r-1" in text
    assert "7 > 9" in text
    assert "ppp" + "d" * 9 in text


def test_what_is_wrong_stands_above_the_workers() -> None:
    troubles = [{"kind": "gone", "subject": f"d-{n}", "cause": "it vanished"} for n in range(MAX_TROUBLES + 1)]
    lines = frame(data(troubles=troubles), [], width=120, height=60)
    shown = [line for line in lines if line.startswith("!! ")]
    assert shown == [f"!! gone d-{n}: it vanished" for n in range(MAX_TROUBLES)]
    assert lines.index(shown[-1]) < next(n for n, line in enumerate(lines) if line.startswith("WORKER"))


def test_trouble_is_in_words() -> None:
    workers = [
        worker(circuit="open", gpu={"state": "out", "reasons": ["xid"]}),
        worker(id="d-1", state="lost", step_s=None),
    ]
    text = "\n".join(frame(data(workers=workers), [request(outcome="failed", code="timeout")], width=200, height=40))
    assert "ready, circuit open, GPU out" in text
    assert "lost" in text
    assert "failed: timeout" in text


@pytest.mark.parametrize(("width", "height"), [(20, 3), (40, 10), (80, 24), (300, 80), (1, 1)])
def test_a_frame_fits(width: int, height: int) -> None:
    lines = frame(data(workers=[worker()] * 6), [request()] * 50, width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_nothing_yet_is_said() -> None:
    empty = data(workers=[], series={name: [] for name in data()["series"]})
    text = "\n".join(frame(empty, [], width=100, height=30))
    assert "no worker is registered" in text
    assert "no request has ended at this gateway since it started" in text


def test_names_cannot_steer_the_terminal() -> None:
    odd = request(request_id="a\x1b[2Jb\rc", model="m\x9b31m", outcome="refused", code="bad")
    text = "".join(frame(data(), [odd], width=160, height=30))
    assert text.isprintable()
    assert "a?[2Jb?c" in text


def test_names_take_the_columns_that_they_have() -> None:
    wide = request(request_id="名前" * 9, model="e\u0301te\u0301")
    for width in (80, 81, 120):
        rows = [line for line in frame(data(), [wide, request()], width=width, height=40) if "finished" in line]
        wide_row, row = rows[-2:]
        assert sum(0 if each == "\u0301" else 1 + (each in "名前") for each in wide_row) <= width
    assert row.index("finished") - wide_row.index("finished") == 18 - 2


def test_parts_of_a_bar() -> None:
    assert bar([("a", 1), ("b", 1)], 4) == "aabb"
    assert bar([("a", 1), ("b", 10**9), ("c", 0)], 5) == "abbbb"
    assert bar([("a", 0)], 3) == "   "
    for amounts in ((1, 1, 1, 1), (1, 2, 3, 10**6), (7, 0, 0, 9)):
        assert len(bar(list(zip("qptd", amounts, strict=True)), 12)) == 12
    assert sparkline([None, 0.0, 1.0, 2.0]) == " ▁▅█"
    assert sparkline([0.0, None]) == "▁ "
    assert sparkline([]) == ""


def test_once_prints_a_frame(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /dashboard/data?seconds=60"] = (200, data())
    api.routes["GET /dashboard/requests?limit=24"] = (200, {"requests": [request()]})
    assert main(["top", "--once", "--url", api.url]) == 0
    out = capsys.readouterr().out
    assert "decode-0" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("answer", [[], {"status": "starting"}, data(workers=[{"id": "decode-0"}]), None])
def test_another_server_is_an_error_too(api: Any, capsys: pytest.CaptureFixture[str], answer: Any) -> None:
    api.routes["GET /dashboard/data?seconds=60"] = (200, answer)
    api.routes["GET /dashboard/requests?limit=24"] = (200, {"requests": [request()]})
    assert main(["top", "--once", "--url", api.url]) == 1
    assert "its answer is no dashboard" in capsys.readouterr().err


def test_an_error_is_a_line_and_an_exit_code(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /dashboard/data?seconds=60"] = (401, {"error": {"message": "an API key is needed"}})
    assert main(["top", "--once", "--url", api.url]) == 1
    assert capsys.readouterr().err == "error: an API key is needed; show one with --api-key (TANDEM_API_KEY)\n"


def read_until(terminal: int, is_there: Callable[[bytes], object], timeout_s: float = HANG_LIMIT_S) -> bytes:
    """Reads a terminal's output until it fits."""
    seen, deadline_s = b"", time.monotonic() + timeout_s
    while not is_there(seen):
        left_s = deadline_s - time.monotonic()
        assert left_s > 0, f"it did not come: {seen!r}"
        if select.select([terminal], [], [], left_s)[0]:
            seen += os.read(terminal, 65536)
    return seen


def has_long_frame(seen: bytes) -> bool:
    """Whether a frame has more requests than fit into 24 lines."""
    return any(drawn.count(b"r-1") > 20 for drawn in seen.split(b"\x1b[H"))


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_on_a_terminal_it_goes_on_until_a_key_ends_it(api: Any, key: bytes) -> None:
    """It draws again, at the new size; a gateway that is away is asked again; the screen is given back."""
    state = data()
    answers = {"count": 0}
    odd: dict[int, tuple[int, Any]] = {2: (200, b"no JSON"), 3: (502, {}), 4: (404, b"<html>"), 5: (200, {})}

    def answer() -> tuple[int, Any]:
        answers["count"] += 1
        if answers["count"] in odd:
            return odd[answers["count"]]
        state["requests"] = {"running": answers["count"], "queued": 0}
        return 200, state

    api.routes["GET /dashboard/data?seconds=60"] = answer
    for height in (24, 40):
        api.routes[f"GET /dashboard/requests?limit={height}"] = (200, {"requests": [request()] * height})
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "cli.main", "top", "--url", api.url]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    try:
        os.close(theirs)
        assert OPEN_SCREEN.encode() in read_until(ours, lambda seen: b"1 running" in seen)
        read_until(ours, lambda seen: b"!! " in seen)
        read_until(ours, lambda seen: b"6 running" in seen)
        ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        read_until(ours, has_long_frame)
        os.write(ours, key)
        read_until(ours, lambda seen: CLOSE_SCREEN.encode() in seen)
        assert process.wait(HANG_LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_pools_have_a_column_where_there_are_any() -> None:
    lines = frame(data(workers=[worker(pool="batch"), worker(id="decode-1", pool="")]), [], width=120, height=60)
    at = next(number for number, line in enumerate(lines) if line.startswith("WORKER"))
    assert [line.split()[1] for line in lines[at : at + 3]] == ["POOL", "batch", "-"]
    assert not any("POOL" in line for line in frame(data(), [], width=120, height=60))


def test_models_that_share_workers_stand_above_them() -> None:
    turns = {"models": {"a": "switching", "b": "asleep"}, "switch_s": {"asleep": 0.5}}
    said = "by turns  a switching, b asleep; a switch takes 0.5 s from memory"
    assert said in frame(data(turns=turns), [], width=120, height=60)
    assert not any("by turns" in line for line in frame(data(), [], width=120, height=60))


def test_what_holds_models_back_stands_above_the_workers() -> None:
    bottlenecks = [{"model": "demo", "said": "97% of what prefill workers can compute is taken"}]
    lines = frame(data(bottlenecks=bottlenecks), [], width=120, height=60)
    assert "demo is held back: 97% of what prefill workers can compute is taken" in lines
    assert not any("held back" in line for line in frame(data(), [], width=120, height=60))
