"""`tandem bench` against an endpoint whose pace is known."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from typing import ClassVar

import pytest

from cli.bench import BenchSettings, asks_of, figures_of, run
from cli.bench_load import Ask, Reply, poisson, text_of
from services.runtime.errors import ConfigError

FIRST_S, GAP_S = 0.05, 0.01


class Endpoint(BaseHTTPRequestHandler):
    """Answers each prompt with as many events as tokens were asked for; a prompt counts two tokens for each word."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict]] = []
    open_now = 0
    most_open = 0

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).bodies.append(body)
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        if len(self.bodies) % 5 == 0:
            return self.answer(429, json.dumps({"error": {"message": "busy", "code": "overloaded"}}))
        type(self).open_now += 1
        type(self).most_open = max(self.most_open, self.open_now)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        sleep(FIRST_S)
        for number in range(body["max_tokens"]):
            sleep(GAP_S if number else 0)
            piece = {"text": "a"} if "prompt" in body else {"delta": {"content": "a"}}
            self.event({"choices": [piece]})
        usage = {"prompt_tokens": 2 * len(text.split()), "completion_tokens": body["max_tokens"]}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        type(self).open_now -= 1
        return None

    def event(self, event: dict) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Endpoint.bodies, Endpoint.open_now, Endpoint.most_open = [], 0, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("api", "suffix"), [("completions", ""), ("chat", "/v1")])
def test_an_endpoint_is_measured_and_its_refusals_counted(url: str, api: str, suffix: str, tmp_path: Path) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    settings = BenchSettings(
        url=url + suffix, api=api, requests=10, concurrency=2, prompt_tokens=60, new_tokens=5,
        json=tmp_path / "figures.json", report=tmp_path / "report.html",
    )  # fmt: skip
    assert run(settings, stdout, stderr=stderr) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["requests"], figures["answered"], figures["errors"]) == (10, 8, {"429 overloaded": 2})
    assert figures["ttft_s"]["p50"] >= FIRST_S
    assert figures["itl_s"]["p50"] >= GAP_S * 0.9
    assert figures["tokens_per_s"] * figures["span_s"] == pytest.approx(40)
    assert {row["prompt_tokens"] for row in figures["replies"] if not row["error"]} == {60}
    assert Endpoint.most_open == 2
    assert "8 of 10 requests to m were answered" in stdout.getvalue()
    assert "goodput" in stdout.getvalue()
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "10 of 10" in stderr.getvalue()


def test_requests_leave_at_their_times_whether_others_have_ended(url: str) -> None:
    settings = BenchSettings(url=url, requests=8, rate=200.0, new_tokens=20, prompt_tokens=4)
    run(settings, io.StringIO(), stderr=io.StringIO())
    assert Endpoint.most_open > 2


def test_nothing_but_errors_is_a_failure(url: str) -> None:
    stdout = io.StringIO()
    Endpoint.bodies = [{}] * 2  # the fifth is the first after the two that count words
    settings = BenchSettings(url=url, requests=1, new_tokens=2)
    assert run(settings, stdout, stderr=io.StringIO()) == 1
    assert "1 failed: 429 overloaded" in stdout.getvalue()


def test_a_trace_keeps_its_lengths_and_what_its_prompts_share(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [1, 2]},
        {"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [1, 3]},
        {"timestamp": 3000, "input_length": 90_000, "output_length": 9, "hash_ids": list(range(176))},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asks, left_out = asks_of(BenchSettings(trace=trace, speed=2.0, max_context_tokens=4096))
    assert left_out == 1
    assert [(ask.at_s, ask.num_prompt_tokens, ask.num_new_tokens) for ask in asks] == [(0.0, 1000, 7), (1.0, 600, 9)]
    assert asks[0].parts[0] == asks[1].parts[0] == (1, 512)
    with pytest.raises(ConfigError, match="no request of"):
        asks_of(BenchSettings(trace=trace, max_context_tokens=100))


def test_goodput_counts_answers_within_both_targets() -> None:
    ask = Ask(0.0, ((0, 4),), 3)
    good = Reply(ask, 1.0, at_s=[1.5, 1.6, 1.7], end_s=1.8, num_prompt_tokens=4, num_tokens=3)
    late = Reply(ask, 1.0, at_s=[3.5, 3.6, 3.7], end_s=3.8, num_prompt_tokens=4, num_tokens=3)
    slow = Reply(ask, 1.0, at_s=[1.5, 2.5, 3.5], end_s=3.6, num_prompt_tokens=4, num_tokens=3)
    figures = figures_of([good, late, slow, Reply(ask, 1.0, error="x", end_s=4.0)], slo_ttft_s=1.0, slo_tpot_s=0.5)
    assert (figures["within_targets"], figures["goodput_per_s"]) == (1, 0.25)
    assert figures["ttft_s"]["max"] == 2.5
    assert figures["itl_s"]["max"] == 1.0
    assert figures["tpot_s"]["max"] == 1.0


def test_load_is_the_same_for_the_same_seed() -> None:
    one, two, other = (list(poisson([(9, 3)] * 4, rate_per_s=2.0, seed=seed)) for seed in (1, 1, 2))
    assert one == two != other
    assert len({text_of(ask.parts[0][0], 9) for ask in one}) == 4
    with pytest.raises(ConfigError, match="both given"):
        BenchSettings(rate=1.0, concurrency=1)


def test_an_endpoint_that_is_not_one_is_told(url: str) -> None:
    from services.runtime.api_client import ApiUnreachable

    with pytest.raises(ApiUnreachable):
        run(BenchSettings(url="http://127.0.0.1:9"), io.StringIO(), stderr=io.StringIO())
