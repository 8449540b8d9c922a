"""`tandem up` with the demo model and the real services: what a user does in the first five minutes, and worse."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG_LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
TANDEM = [sys.executable, "-m", "cli.main"]
QUESTION = "Write a function that returns the length of a list."


class Running:
    """A `tandem up` that has printed its ready line."""

    def __init__(self, folder: Path, *flags: str, size: tuple[str, ...] = ("--kv-pages", "512")) -> None:
        self.errors = folder / "up.err"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*TANDEM, "up", "--http-port", "0", "--grpc-port", "0", "--threads", "1", *size, *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=os.environ | {"TMPDIR": str(folder)},
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready http="), self.errors.read_text()
        self.url = line.split()[1].removeprefix("http=")

    def workers(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + "/cluster", timeout=HANG_LIMIT_S) as answer:
            return {worker["id"]: worker for worker in json.load(answer)["workers"]}

    def tandem(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [*TANDEM, arguments[0], "--url", self.url, *arguments[1:]]
        return subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )

    def complete(self, **fields: Any) -> Any:
        body = {"prompt": "def main():", "max_tokens": 8, "temperature": 0, **fields}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HANG_LIMIT_S) as answer:
            return json.load(answer)["choices"][0]["text"]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(*flags: str, **settings: Any) -> Running:
        running.append(Running(tmp_path, *flags, **settings))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_from_ready_to_a_clean_end(up: Callable[..., Running], tmp_path: Path) -> None:
    cluster = up("--prefill", "1", "--decode", "1")

    workers = cluster.workers()
    assert sorted(workers) == ["decode-0", "prefill-0"]
    assert {worker["state"] for worker in workers.values()} == {"ready"}

    chat = cluster.tandem("chat", "--message", QUESTION, "--max-tokens", "12", "--temperature", "0")
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()
    assert "TTFT" in chat.stderr

    status = cluster.tandem("status", "--json")
    assert status.returncode == 0
    assert {worker["id"] for worker in json.loads(status.stdout)["workers"]} == set(workers)

    expected = cluster.complete()
    victim = workers["decode-0"]["pid"]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: cluster.workers().get("decode-0", {}).get("pid") not in (None, victim))
    wait_until(lambda: cluster.workers().get("decode-0", {}).get("state") == "ready")
    assert cluster.complete() == expected

    pids = [worker["pid"] for worker in cluster.workers().values()]
    cluster.process.terminate()
    assert cluster.process.wait(HANG_LIMIT_S) == 0, cluster.errors.read_text()
    assert not any(map(lives, pids))
    assert [path.name for path in tmp_path.iterdir()] == ["up.err"]


def test_a_worker_changes_its_role_under_load_and_has_it_when_it_is_started_again(
    up: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    logs = tmp_path / "logs"
    cluster = up("--prefill", "1", "--decode", "2", f"--log-dir={logs}")
    expected = cluster.complete(max_tokens=300)
    before = cluster.workers()["decode-1"]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(cluster.complete, max_tokens=300) for _ in range(24)]
        changed = cluster.tandem("role", "decode-1", "prefill")
        assert (changed.stdout, changed.stderr) == ("decode-1 is a prefill worker now\n", "")
        assert {answer.result() for answer in answers} == {expected}
    after = cluster.workers()["decode-1"]
    assert (after["role"], after["pid"], after["state"]) == ("prefill", before["pid"], "ready")
    assert after["incarnation"] != before["incarnation"]

    assert "decode-0 is the only decode worker" in cluster.tandem("role", "decode-0", "prefill").stderr
    scaled = cluster.tandem("scale", "--prefill", "1", "--decode", "2")
    assert scaled.stdout == "changed: decode-1 is a decode worker now\nstarted: none\ndrained: none\n", scaled.stderr
    assert cluster.workers()["decode-1"]["pid"] == before["pid"], "the same process all the time"

    kept = cluster.tandem("scale", "--prefill", "2", "--decode", "1", "--timeout", "0")
    assert "keeps its role" in kept.stderr
    assert (logs / "expected.txt").read_text() == "prefill=1,decode=2", "no worker is missed that kept its role"

    assert cluster.tandem("role", "decode-1", "prefill").returncode == 0
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: cluster.workers().get("decode-1", {}).get("pid") not in (None, before["pid"]))
    wait_until(lambda: cluster.workers()["decode-1"]["state"] == "ready")
    assert cluster.workers()["decode-1"]["role"] == "prefill"
    assert cluster.complete(max_tokens=300) == expected


@pytest.mark.slow
def test_where_the_mix_turns_the_autoscaler_changes_roles_and_no_answer(
    up: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers may run and do: three prefill workers, when short prompts with long answers come."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    logs = tmp_path / "logs"
    scaling = ("--autoscale=1:4", "--scale-every=1", "--scale-start-up=10", "--scale-settle=3", f"--log-dir={logs}")
    cluster = up("--prefill=3", "--decode=1", *scaling)
    expected = cluster.complete(max_tokens=400)
    pids = {name: worker["pid"] for name, worker in cluster.workers().items()}
    until_s = time.monotonic() + HANG_LIMIT_S

    def ask() -> set[str]:
        found = set()
        while time.monotonic() < until_s and num_decode() < 2:
            found.add(cluster.complete(max_tokens=400))
        return found

    def num_decode() -> int:
        return sum((one["role"], one["state"]) == ("decode", "ready") for one in cluster.workers().values())

    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(ask) for _ in range(24)]
        assert set().union(*(answer.result() for answer in answers)) == {expected}
    assert num_decode() >= 2
    turned = [name for name, one in cluster.workers().items() if name.startswith("prefill") and one["role"] == "decode"]
    assert turned
    assert all(cluster.workers()[name]["pid"] == pids[name] for name in turned), "nothing was started again"
    assert "by a change of role" in (logs / "decisions.jsonl").read_text()


@pytest.mark.gpu
@pytest.mark.timeout(600)  # two starts, the first of which compiles all kernels
def test_two_workers_on_one_gpu_hand_prompts_over_and_answer_as_one_does(
    up: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both size their pools by themselves, at the same time, of one GPU's memory."""
    monkeypatch.setenv("TANDEM_DEVICE", "cuda")
    monkeypatch.setenv("TANDEM_LOCAL_PREFILL_TOKENS", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    answers = []
    for num_prefill in (0, 1):
        cluster = up("--prefill", str(num_prefill), "--dtype", "float32", size=())
        answers.append(cluster.complete(prompt=QUESTION * 20, max_tokens=32, ignore_eos=True))
        with urllib.request.urlopen(cluster.url + "/metrics", timeout=HANG_LIMIT_S) as page:
            handoffs = re.findall(r"^tandem_handoff_bytes_total{.*} (\S+)$", page.read().decode(), re.MULTILINE)
        assert (sum(map(float, handoffs)) > 0) == (num_prefill == 1)
        cluster.process.terminate()
        assert cluster.process.wait(HANG_LIMIT_S) == 0, cluster.errors.read_text()
    assert answers[0] == answers[1]


def test_the_end_does_not_wait_longer_than_the_grace_for_running_requests(up: Callable[..., Running]) -> None:
    cluster = up("--stop-grace", "0.5")

    def is_cut_off() -> bool:
        try:
            cluster.complete(max_tokens=1900, ignore_eos=True)
        except (OSError, http.client.HTTPException):
            return True
        return False

    with ThreadPoolExecutor(8) as clients:
        responses = [clients.submit(is_cut_off) for _ in range(8)]
        wait_until(lambda: any(worker["running"] for worker in cluster.workers().values()))
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(HANG_LIMIT_S) == 0, cluster.errors.read_text()
        assert any(response.result() for response in responses)


def test_a_cluster_that_asks_for_keys(up: Callable[..., Running], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = {}
    for role, flags in (("user", ()), ("admin", ("--admin",))):
        made = subprocess.run(
            [*TANDEM, "keys", "new", "--tenant", role, *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_LIMIT_S,
            check=True,
        )
        keys[role] = made.stderr.split()[-1]
        with file.open("a") as entries:
            entries.write(made.stdout)

    # It was ready, so `up` itself has been let in, though its own key stands in no file.
    cluster = up("--prefill", "0", "--decode", "1", "--api-keys", str(file))
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.complete()
    with refused.value as answer:
        assert (answer.code, json.load(answer)["error"]["code"]) == (401, "invalid_api_key")

    chat = ("chat", "--message", QUESTION, "--max-tokens", "4", "--temperature", "0")
    assert cluster.tandem(*chat).returncode == 1
    assert cluster.tandem("status").returncode == 1
    for role, shows_status in (("user", False), ("admin", True)):
        key = {"TANDEM_API_KEY": keys[role]}
        answer = cluster.tandem(*chat, environment=key)
        assert (answer.returncode, bool(answer.stdout.strip())) == (0, True), answer.stderr
        status = cluster.tandem("status", "--json", environment=key)
        assert status.returncode == (0 if shows_status else 1)
    assert [worker["id"] for worker in json.loads(status.stdout)["workers"]] == ["decode-0"]

    cluster.process.terminate()
    assert cluster.process.wait(HANG_LIMIT_S) == 0, cluster.errors.read_text()


def test_kill_9_leaves_no_process(up: Callable[..., Running]) -> None:
    cluster = up("--prefill", "0")
    assert cluster.complete()
    pids = [worker["pid"] for worker in cluster.workers().values()]
    cluster.process.kill()
    wait_until(lambda: not any(map(lives, pids)))


def test_weights_that_are_no_weights_are_exit_code_2(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((ROOT / "demo" / "model" / name).read_bytes())
    (model / "model.safetensors").write_bytes(b"these are no weights")
    ended = subprocess.run(
        [*TANDEM, "up", "--model", str(model), "--http-port", "0", "--grpc-port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.strip().splitlines()[-1].startswith("error: ")
