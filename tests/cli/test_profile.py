"""`tandem profile` against an endpoint that takes known times."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cli.bench_load import Ask, Reply
from cli.main import main
from cli.profile import NUM_BESIDE, _step_s
from planning.simulator.measured import read_measured


def test_an_endpoint_is_measured_and_the_file_is_taken_by_plan_and_replay(
    api: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running: list[None] = []
    beside: dict[str, list[int]] = {"local": [], "remote": [], "": []}

    def answer() -> list[Any]:
        headers, body = api.answered
        num_prompt, num_new = len(body["prompt"].split()), body["max_tokens"]
        beside[headers.get("x-tandem-prefill", "")].append(len(running))

        def pieces() -> Any:
            time.sleep(0.005 + num_prompt * 5e-5)
            running.extend([None] * (num_new == NUM_BESIDE))
            for number in range(num_new):
                if number:
                    time.sleep(0.004)
                yield {"choices": [{"text": "x"}]}
            yield {"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new}}
            yield b"data: [DONE]\n\n"

        return pieces()  # type: ignore[no-any-return]  # the fake stands for an untyped iterator

    worker = {"role": "decode", "model": "m", "kv_bytes_per_token": 100, "page_tokens": 16, "max_running": 4}
    others = [{"role": "prefill", "model": "m"}, {"role": "prefill", "model": "other"}]
    api.routes["GET /v1/models"] = (200, {"data": [{"id": "m"}]})
    api.routes["GET /cluster"] = (200, {"workers": [*others, {**worker, "pages": {"total": 100}}]})
    api.routes["POST /v1/completions"] = answer
    file = tmp_path / "m.json"
    words = ["--url", api.url, "--prompts", "20,100,200", "--batches", "1,2", "--contexts", "20,100"]
    assert main(["profile", str(file), *words, "--new-tokens", "16", "--repeats", "2"]) == 0
    told = capsys.readouterr().out
    assert "m: prompts: error mean" in told
    assert "m: prompts at decode workers: error mean" in told
    found = read_measured(file)
    assert (found.kv_tokens, found.max_batch, found.kv_bytes_per_token) == (1600, 4, 100)
    assert [one.way for one in found.prompts] == ["local"] * 3 + ["remote"] * 3
    assert max(beside["local"]) == 0 < max(beside["remote"]), "an answer runs beside prefill workers"
    law = found.profile.law
    # A busy machine makes the endpoint slower than it means to be, never faster.
    assert law.prefill.time_s(100) + found.profile.outside_s[0] >= 0.008
    assert law.decode_at(2).step_s(2, 100) >= 0.004
    assert main(["plan", "--measured", str(file), "--rate", "1", "--input", "50", "--output", "20", "--ttft", "1"]) == 0
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * n, "input_length": 50, "output_length": 8, "hash_ids": [n]} for n in range(5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", str(trace), "--measured", str(file)]) == 0


def test_a_second_run_finds_none_of_its_prompts_in_a_cache(api: Any, tmp_path: Path) -> None:
    def answer() -> list[Any]:
        usage = {"prompt_tokens": 20, "completion_tokens": 16}

        def pieces() -> Any:
            for _ in range(api.requests[-1][1]["max_tokens"]):
                time.sleep(0.001)
                yield {"choices": [{"text": "x"}]}
            yield {"choices": [], "usage": usage}
            yield b"data: [DONE]\n\n"

        return pieces()  # type: ignore[no-any-return]  # the fake stands for an untyped iterator

    api.routes["GET /v1/models"] = (200, {"data": [{"id": "m"}]})
    api.routes["GET /cluster"] = (404, {"error": {"message": "no such page"}})
    api.routes["POST /v1/completions"] = answer
    words = ["--url", api.url, "--prompts", "20,21,22", "--batches", "1", "--contexts", "20,30,40", "--repeats", "1"]
    runs = []
    for _ in range(2):
        num_before = len(api.requests)
        assert main(["profile", str(tmp_path / "m.json"), *words, "--new-tokens", "16"]) == 0
        bodies = [body for _, body in api.requests[num_before:] if body and "prompt" in body]
        runs.append({body["prompt"][:60] for body in bodies if body["max_tokens"] > 1})  # others tell a word's tokens
    assert len(runs[0]) >= 6
    assert not runs[0] & runs[1]


def test_steps_are_those_in_which_all_answers_run() -> None:
    early = Reply(Ask(0.0, (), 11), 0.0, [n * 0.01 for n in range(11)], 0.1, 1, 11)
    late = Reply(Ask(0.0, (), 11), 0.0, [0.05 + n * 0.02 for n in range(11)], 0.25, 1, 11)
    assert _step_s([early, late]) == pytest.approx(0.015)
    two_each = Reply(Ask(0.0, (), 21), 0.0, [n * 0.01 for n in range(11)], 0.1, 1, 21)
    assert _step_s([two_each]) == pytest.approx(0.005)
    alone = Reply(Ask(0.0, (), 3), 0.0, [0.0, 0.02], 0.02, 1, 3)
    assert _step_s([alone]) == pytest.approx(0.01)
