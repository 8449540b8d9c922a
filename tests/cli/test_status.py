"""`tandem status` against a small HTTP server."""

import json
from typing import Any

import pytest

from cli.main import main

WORKER = {
    "id": "decode-0",
    "role": "decode",
    "pid": 4242,
    "host": "here",
    "address": "127.0.0.1:40001",
    "incarnation": "0" * 32,
    "state": "ready",
    "model": "tandem-demo",
    "exact": True,
    "identity": {"engine": "vllm/0.32.0", "dtype": "float32"},
    "pages": {"total": 100, "free": 91, "cached": 2, "reserved": 3, "used": 4},
    "running": 5,
    "waiting": 6,
}
CLUSTER = {"workers": [WORKER], "requests": {"queued": 7, "running": 8}}


def test_the_table_shows_every_figure_under_its_heading(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /cluster"] = (200, CLUSTER)
    assert main(["status", "--url", api.url]) == 0
    heading, row, *rest = capsys.readouterr().out.splitlines()
    shown = dict(zip(heading.split(), row.split(), strict=True))
    assert shown == {
        "WORKER": "decode-0", "ROLE": "decode", "STATE": "ready", "PID": "4242", "ADDRESS": "127.0.0.1:40001",
        "PAGES": "100", "FREE": "91", "CACHED": "2", "RESERVED": "3", "USED": "4", "RUN": "5", "WAIT": "6",
        "EXACT": "yes", "ENGINE": "vllm/0.32.0",
    }  # fmt: skip
    assert heading.index("ADDRESS") == row.index("127.0.0.1:40001")
    assert rest[-1].split() == ["requests", "8", "running,", "7", "queued"]


def test_a_gpu_in_trouble_is_named_with_what_was_found(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = [None, {"state": "ok", "weight": 1.0, "reasons": []}, {"state": "out", "reasons": ["too_hot", "xid_79"]}]
    workers = [WORKER | {"id": f"decode-{number}", "gpu": gpu} for number, gpu in enumerate(gpus)]
    api.routes["GET /cluster"] = (200, CLUSTER | {"workers": workers})
    assert main(["status", "--url", api.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "GPU" in line] == ["GPU of decode-2: out, too_hot, xid_79"]


@pytest.mark.parametrize("state", ["suspected", "open", "half_open"])
def test_a_circuit_that_is_not_closed_is_a_part_of_the_state(
    api: Any, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    workers = [WORKER | {"circuit": {"state": state, "cause": "slow"}}, WORKER | {"id": "decode-1", "circuit": None}]
    api.routes["GET /cluster"] = (200, CLUSTER | {"workers": workers})
    assert main(["status", "--url", api.url]) == 0
    heading, first, second, *_ = capsys.readouterr().out.splitlines()
    place = slice(heading.index("STATE"), heading.index("PID"))
    assert first[place].strip().startswith(f"ready, circuit {state}")
    assert second[place].split()[0] == "ready"
    assert "circuit" not in second


def test_what_is_gone_and_what_is_wrong_stand_below_the_workers(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gone = {key: WORKER[key] for key in ("role", "model", "host", "address")} | {"id": "decode-1", "since_unix_s": 1e9}
    told = {"kind": "gone", "subject": "decode-1", "cause": "it vanished", "remedy": "look at it", "since_unix_s": 1e9}
    # What troubles say, as that a worker is left out, is not said twice.
    workers = [WORKER | {"state": "left_out", "left_out": "other weights"}]
    api.routes["GET /cluster"] = (200, CLUSTER | {"workers": workers, "gone": [gone], "troubles": [told]})
    assert main(["status", "--url", api.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:5] == ["decode-1", "decode", "gone", "-", "127.0.0.1:40001"]
    (place,) = (number for number, line in enumerate(lines) if line.startswith("! "))
    assert lines[place].startswith("! gone decode-1: it vanished (since 2001-09-")
    assert lines[place + 1] == "  look at it"
    assert not [line for line in lines if "is left out:" in line]


def test_pools_are_told_with_their_workers(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workers = [WORKER | {"id": f"decode-{number}", "pool": pool} for number, pool in enumerate(("", "slow", "x"))]
    pools = [{"name": "slow", "rule": "strict"}, {"name": "long", "rule": "preferred"}]
    api.routes["GET /cluster"] = (200, CLUSTER | {"workers": workers, "pools": pools})
    assert main(["status", "--url", api.url]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("pool")] == [
        "pool      slow, strict: decode-1",
        "pool      long, preferred: no workers",
        "pool      x, without requests of its own: decode-2",
    ]


def test_models_that_share_workers_are_told_with_what_a_switch_takes(
    api: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    group = {"group": "a-0", "model": "a", "state": "awake", "for_s": 12.3}
    turns = {"models": {"a": "awake", "b": "on_disk"}, "groups": [group], "switch_s": {"asleep": 0.25, "disk": 3.0}}
    api.routes["GET /cluster"] = (200, CLUSTER | {"turns": turns})
    assert main(["status", "--url", api.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("by turns  a awake, b on disk; a switch takes 0.25 s from memory and 3 s from disk")
    assert lines[at + 1] == "          a-0: a awake for 12 s"
    api.routes["GET /cluster"] = (200, CLUSTER | {"turns": turns | {"switch_s": {}}})
    assert main(["status", "--url", api.url]) == 0
    assert "by turns  a awake, b on disk; no switch was measured yet" in capsys.readouterr().out


def test_json_is_the_answer_itself(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /cluster"] = (200, CLUSTER)
    assert main(["status", "--url", api.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == CLUSTER


def test_an_empty_cluster_is_said_to_be_empty(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /cluster"] = (200, {"workers": [], "requests": {"queued": 0, "running": 0}})
    assert main(["status", "--url", api.url]) == 0
    assert "no workers" in capsys.readouterr().out


def test_nobody_there_is_exit_code_1_and_one_sentence(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url = api.url
    api.close()
    assert main(["status", "--url", url]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert url in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("answer", [(500, {"error": {"message": "broken inside"}}), (200, b"<html>"), (404, b"")])
def test_a_useless_answer_is_exit_code_1(api: Any, capsys: pytest.CaptureFixture[str], answer: Any) -> None:
    api.routes["GET /cluster"] = answer
    assert main(["status", "--url", api.url]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_a_url_that_is_none_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "localhost"]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "advice"), [(401, "show one with --api-key"), (403, "show another one")])
def test_a_refusal_for_a_key_names_the_flag(
    api: Any, capsys: pytest.CaptureFixture[str], status: int, advice: str
) -> None:
    api.routes["GET /cluster"] = (status, {"error": {"message": "an API key is needed"}})
    assert main(["status", "--url", api.url]) == 1
    said = capsys.readouterr().err
    assert "error: an API key is needed; " in said
    assert advice in said
    api.routes["GET /cluster"] = (503, {"error": {"message": "not now"}})
    assert main(["status", "--url", api.url]) == 1
    assert "--api-key" not in capsys.readouterr().err
