"""The data behind the dashboard, the keys that may read it, and that the page brings along all that it needs."""

import asyncio
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from gateway.dashboard import feed
from gateway.dashboard.pages import POLICY
from gateway.dashboard.series import COLUMNS
from gateway.observability.history import Query
from protos import worker_pb2
from services.runtime.errors import InternalError
from tests.gateway.dashboard.conftest import ADMIN, PLAIN

ROOT = Path(__file__).parents[3]

ODD_NAME = "<img src=x onerror=alert(1)>"
MARKER = "zebrafinch"
FILES = (
    *("index.html", "style.css", "icon.svg", "app.js", "api.js", "charts.js", "cluster.js", "dom.js"),
    *("playground.js", "requests.js"),
)


def shows(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def read(system: Any, path: str, **headers: str) -> Any:
    reply = await system.http.get(path, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["cache-control"] == "no-store"
    return reply.json()


async def ended(system: Any, count: int) -> Any:
    """The list, once `count` requests have ended."""
    await system.until(lambda: system.gateway.requests.log.history.last_number >= count)
    return (await read(system, "/dashboard/requests"))["requests"]


async def test_what_waits_and_runs_is_listed_until_it_ends(make_system: Any, pair_type: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(feed, "MAX_OPEN", 2)
    system = await make_system()
    slow = pair_type([5] * 100, step_s=60.0)
    await system.add_pair(slow)
    body = {"prompt": [5, 6, 7], "max_tokens": 50, "n": 3}
    asked = asyncio.create_task(system.http.post("/v1/completions", json=body, headers={"x-request-id": "run.1"}))
    await system.until(lambda: system.gateway.requests.num_open_answers == 3)
    states = [one.phase for one in system.gateway.requests.open_answers(9)]
    assert set(states) <= {"queue", "prefill", "transfer", "decode"}
    shown = (await read(system, "/dashboard/data"))["open"]
    assert shown["total"] == 3
    answers = shown["answers"]
    assert [(one["request_id"], one["choice"], one["prompt_tokens"], one["max_tokens"]) for one in answers] == [
        ("run.1", 0, 3, 50),
        ("run.1", 1, 3, 50),
    ]
    assert all(one["since_us"] >= 0 for one in answers)
    asked.cancel()
    await system.until(lambda: system.gateway.requests.num_open_answers == 0)
    assert (await read(system, "/dashboard/data"))["open"] == {"answers": [], "total": 0}


async def test_a_snapshot_shows_workers_and_figures(make_system: Any, pair: Any) -> None:
    system = await make_system(itl_target_s=0.5)
    await system.add_pair(pair, prefill=2)
    await system.complete(max_tokens=100)
    await ended(system, 1)
    feed_ = system.gateway._feed
    feed_.tick()
    shown = await read(system, "/dashboard/data?seconds=2")
    assert [worker["id"] for worker in shown["workers"]] == ["decode-0", "prefill-0", "prefill-1"]
    worker = shown["workers"][0]
    assert (worker["state"], worker["circuit"], worker["running"]) == ("ready", "closed", 0)
    assert worker["pages"] == {"total": 100, "free": 100, "cached": 0, "reserved": 0, "used": 0}
    assert shown["gateway"]["id"] == system.gateway.incarnation[:8]
    assert shown["gateway"]["targets"] == {"ttft_s": 5.0, "itl_s": 0.5}
    assert shown["api"] == {"is_here": True, "port": system.gateway.http_port}
    assert shown["models"] == ["tiny"]
    assert shown["last_number"] == 1
    assert set(shown["series"]) == {"unix_s", *COLUMNS}
    assert {len(values) for values in shown["series"].values()} == {2}
    assert shown["series"]["generated_per_s"][-1] > 0
    assert shown["series"]["ttft_p50_s"][-1] > 0
    assert shown["series"]["good_per_s"][-1] == shown["series"]["finished_per_s"][-1] > 0


async def test_a_request_has_its_row_and_its_story(make_system: Any, pair: Any) -> None:
    system = await make_system()
    await system.add_pair(pair)
    reply = await system.complete(max_tokens=100, tenant="acme", n=2)
    (row,) = await ended(system, 1)
    assert row["request_id"] == reply.headers["x-request-id"]
    assert (row["model"], row["tenant"], row["service_class"]) == ("tiny", "acme", "normal")
    assert (row["outcome"], row["answers"], row["attempts"]) == ("finished", 2, 2)
    assert row["workers"] == "prefill-0 decode-0"
    assert row["is_good"]
    assert row["total_us"] == sum(row[f"{phase}_us"] for phase in ("queue", "prefill", "transfer", "decode"))
    for name in (row["request_id"], "@1"):
        told = await read(system, f"/dashboard/requests/{name}")
        assert told["request"] == row
        assert len(told["answers"]) == 2
    for answer in told["answers"]:
        assert [bar["phase"] for bar in answer["bars"]][:2] == ["queue", "route"]
        assert answer["bars"][-1]["phase"] == "decode"
        assert 0 < answer["first_token_us"] <= answer["ended_us"] <= row["total_us"]
        (attempt,) = answer["attempts"]
        assert (attempt["prefill"], attempt["decode"]) == ("prefill-0", "decode-0")
        assert attempt["why"][0].startswith("the prompt has more tokens to compute")
        assert (attempt["pages"], attempt["bytes"], attempt["transport"]) == (1, 64, "none")
        assert attempt["predicted_ttft_us"] > 0
        assert attempt["actual_ttft_us"] > 0
    assert max(answer["ended_us"] for answer in told["answers"]) == row["total_us"]


async def test_a_failover_is_told(make_system: Any, worker_type: Any, pair: Any) -> None:
    async def break_off(attempt: Any) -> None:
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(1, pair.answer[1:4])
        await system.until(lambda: system.gateway.metrics.generated_tokens.total() >= 4)
        attempt.fail(InternalError("broken"))

    async def slow_start(attempt: Any) -> None:
        attempt.emit(worker_pb2.PrefillStarted(queue_s=0.25))
        await pair.prefill(attempt)

    system = await make_system(routing="least_loaded")
    busy = worker_type("decode", "decode-1", pair.decode)
    busy.load.waiting_tokens = busy.load.running = 5
    await system.add(worker_type("prefill", "prefill-0", slow_start))
    await system.add(worker_type("decode", "decode-0", break_off))
    await system.add(busy)
    await system.complete(max_tokens=100)
    (row,) = await ended(system, 1)
    (answer,) = (await read(system, "/dashboard/requests/@1"))["answers"]
    first, second = answer["attempts"]
    assert (first["decode"], first["failure"]) == ("decode-0", "internal_error")
    assert (second["decode"], second["failure"]) == ("decode-1", "")
    assert second["actual_ttft_us"] is None
    of = {(bar["phase"], bar["attempt"]): bar for bar in answer["bars"]}
    assert of["decode", 1]["worker"] == "decode-0"
    assert of["decode", 2]["worker"] == "decode-1"
    assert of["route", 2]["began_us"] >= of["decode", 1]["ended_us"]
    assert sum(bar["ended_us"] - bar["began_us"] for bar in answer["bars"]) == row["total_us"]


async def test_the_first_token_is_told_of_the_attempt_that_gave_it(
    make_system: Any, worker_type: Any, pair: Any
) -> None:
    async def break_at_once(attempt: Any) -> None:
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(InternalError("broken"))

    system = await make_system(routing="least_loaded")
    busy = worker_type("decode", "decode-1", pair.decode)
    busy.load.waiting_tokens = busy.load.running = 5
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    await system.add(worker_type("decode", "decode-0", break_at_once))
    await system.add(busy)
    await system.complete(max_tokens=100)
    await ended(system, 1)
    (answer,) = (await read(system, "/dashboard/requests/@1"))["answers"]
    first, second = answer["attempts"]
    assert (first["failure"], first["actual_ttft_us"]) == ("internal_error", None)
    assert 0 < second["actual_ttft_us"] < answer["first_token_us"]


async def test_what_was_refused_is_there_too_and_does_not_push_out_the_rest(make_system: Any, pair: Any) -> None:
    system = await make_system()
    await system.add_pair(pair)
    await system.complete(max_tokens=1)
    for _ in range(80):
        await system.complete(model=ODD_NAME, tenant=ODD_NAME[:20])
    rows = await ended(system, 20)
    assert {row["outcome"] for row in rows} == {"refused"}
    assert (rows[0]["model"], rows[0]["code"], rows[0]["answers"]) == (ODD_NAME, "model_not_found", 0)
    history = system.gateway.requests.log.history
    assert history.num_ended["refused"] == 80
    assert history.last_number < 75  # as many as have lines
    assert [row["code"] for row in (await read(system, "/dashboard/requests?outcome=finished"))["requests"]] == [""]
    assert (await read(system, f"/dashboard/requests/@{rows[0]['number']}"))["answers"] == []


async def test_the_list_is_searched_and_paged(make_system: Any, pair: Any) -> None:
    system = await make_system()
    await system.add_pair(pair)
    for number in range(7):
        tenant = "acme" if number % 2 else "globex"
        await system.complete(max_tokens=1, tenant=tenant)
    await ended(system, 7)
    found = await read(system, "/dashboard/requests?limit=2&q=ACME")
    assert [row["tenant"] for row in found["requests"]] == ["acme"] * 2
    assert (found["has_more"], found["kept"]) == (True, 7)
    before = found["requests"][-1]["number"]
    found = await read(system, f"/dashboard/requests?limit=2&q=acme&before={before}")
    assert ([row["tenant"] for row in found["requests"]], found["has_more"]) == (["acme"], False)
    assert len((await read(system, "/dashboard/requests?tenant=globex"))["requests"]) == 4
    assert len((await read(system, "/dashboard/requests?worker=decode-0&service_class=normal"))["requests"]) == 7


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/dashboard/requests?limit=0", "limit"),
        ("/dashboard/requests?limit=201", "limit"),
        ("/dashboard/requests?limit=ten", "limit"),
        ("/dashboard/requests?before=-1", "before"),
        ("/dashboard/requests?before=1e3", "before"),
        ("/dashboard/requests?colour=red", "query"),
        ("/dashboard/requests?q=" + "x" * 257, "q"),
        ("/dashboard/data?seconds=0", "seconds"),
        ("/dashboard/data?seconds=901", "seconds"),
        ("/dashboard/data?second=1", "query"),
    ],
)
async def test_a_parameter_that_breaks_its_rule_is_named(make_system: Any, path: str, field: str) -> None:
    system = await make_system()
    reply = await system.http.get(path)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


async def test_what_is_not_remembered_is_not_found(make_system: Any) -> None:
    system = await make_system()
    for name in ("nobody", "@1", "@999999999999999", "@x", ODD_NAME.replace("/", "")):
        reply = await system.http.get(f"/dashboard/requests/{name}")
        assert reply.status_code == 404, name
        assert ODD_NAME not in reply.text


async def test_prompts_and_answers_are_nowhere(make_system: Any, pair: Any) -> None:
    system = await make_system()
    await system.add_pair(pair)
    await system.http.post("/v1/completions", json={"prompt": MARKER, "max_tokens": 100})
    await system.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": MARKER}], "top_p": 7})
    await ended(system, 2)
    for path in ("data", "requests", "requests/@1", "requests/@2"):
        text = (await system.http.get(f"/dashboard/{path}")).text
        assert MARKER not in text
        assert "café" not in text


async def test_the_page_needs_no_key_and_its_data_an_admins(make_system: Any, keys: Any) -> None:
    system = await make_system(api_keys=keys)
    page = await system.http.get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for name in FILES[1:]:
        reply = await system.http.get(f"/dashboard/{name}")
        assert (reply.status_code, reply.headers["x-content-type-options"]) == (200, "nosniff"), name
    reply = await system.http.get("/dashboard/")
    assert (reply.status_code, str(reply.next_request.url.path)) == (308, "/dashboard")
    closed = ("data", "events", "requests", "requests/@1", "../cluster")
    missing = ("nothing.js", "style.css/x")
    for path in closed + missing:
        url = f"/dashboard/{path}"
        assert (await system.http.get(url)).status_code == 401, path
        status_code = 403 if path in closed else 404
        assert (await system.http.get(url, headers=shows(PLAIN))).status_code == status_code, path
    assert await read(system, "/dashboard/data", **shows(ADMIN))
    assert await read(system, "/dashboard/requests", **shows(ADMIN))


async def test_the_operators_address_asks_for_an_admins_key_and_says_that_the_api_is_elsewhere(
    make_system: Any, keys: Any
) -> None:
    system = await make_system(api_keys=keys, admin_port=0)
    system.http.base_url = f"http://127.0.0.1:{system.gateway.admin_port}"
    assert (await system.http.get("/dashboard")).status_code == 200
    assert (await system.http.get("/dashboard/data")).status_code == 401
    shown = await read(system, "/dashboard/data", **shows(ADMIN))
    assert shown["api"] == {"is_here": False, "port": system.gateway.http_port}
    assert (await system.http.get("/v1/models", headers=shows(ADMIN))).status_code == 404


def test_the_page_brings_all_its_files_and_loads_nothing_from_elsewhere() -> None:
    """As they are installed: a wheel has what the package's folder has here."""
    folder = resources.files("gateway.dashboard").joinpath("static")
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(FILES)
    for name in FILES:
        text = folder.joinpath(name).read_text()
        addresses = {url for url in re.findall(r"(?:https?:)?//[a-z][^\s\"'`)]*", text) if "w3.org" not in url}
        assert not addresses, name
        assert "innerHTML" not in text
        assert "eval(" not in text
    page = folder.joinpath("index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    for address in re.findall(r"(?:src|href)=\"([^#\"]+)\"", page):
        assert folder.joinpath(address.removeprefix("dashboard/")).is_file(), address
    for name in FILES:
        for address in re.findall(r"from \"\./([^\"]+)\"", folder.joinpath(name).read_text()):
            assert folder.joinpath(address).is_file(), address


def test_the_handbook_names_what_there_is() -> None:
    """Paths, parameters, and pictures that are small enough to be looked at everywhere."""
    text = (ROOT / "docs/dashboard.md").read_text()
    asked = re.search(r"/dashboard/requests\?([^`]+)`", text)
    assert asked is not None
    assert {name.split("=")[0] for name in asked[1].split("&")} == set(Query.__struct_fields__)
    pictures = [ROOT / "docs" / name for name in re.findall(r"images/[a-z-]+\.png", text)]
    assert len(pictures) == 4
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 200_000


def test_a_wheel_would_have_them() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    matched = {
        path.name for pattern in data["gateway.dashboard"] for path in (ROOT / "gateway/dashboard").glob(pattern)
    }
    assert matched == set(FILES)
