"""The processes of a worker's ranks: what happens when one of them, or rank 0, ends or stops."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.engine import Engine, EngineParts, load_engine
from services.engine.parallel import processes
from services.engine.parallel.processes import RankProcesses
from services.engine.steps.sequence import Sampling
from services.runtime.errors import ModelError, WorkerLost
from tests.waiting import HANG_LIMIT_S, wait_until

# However busy the machine is.
LIMIT_S = HANG_LIMIT_S


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    """Two processes beside this one, which wait for what to load."""
    made = RankProcesses(3)
    made.start()
    yield made
    made.close()
    assert not any(map(is_running, made.pids))


def test_a_rank_that_is_killed_takes_the_others_along(ranks: RankProcesses) -> None:
    os.kill(ranks.pids[1], signal.SIGKILL)
    wait_until(lambda: ranks.loss)
    assert isinstance(ranks.loss, WorkerLost)
    assert ranks.loss.message == "rank 2 of the worker has ended with SIGKILL"
    wait_until(lambda: not is_running(ranks.pids[0]))
    assert ranks.explain(OSError("broken pipe")) is ranks.loss


def test_a_rank_that_is_stopped_is_dead_in_time(ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SILENCE_S", 1.0)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    began_s = time.monotonic()
    while time.monotonic() < began_s + 1.5:  # loading may take its time
        assert ranks.loss is None
        time.sleep(0.05)
    ranks.begin_serving()
    wait_until(lambda: ranks.loss)
    assert "nothing was heard of rank 1" in str(ranks.loss)
    wait_until(lambda: not any(map(is_running, ranks.pids)))


def test_closing_ends_them_without_a_loss(ranks: RankProcesses) -> None:
    ranks.close()
    ranks.close()
    assert ranks.loss is None
    assert not any(map(is_running, ranks.pids))


PARENT = """
import sys, time
from services.engine.parallel.processes import RankProcesses
ranks = RankProcesses(3)
ranks.start()
print(*ranks.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_is_left_behind(end: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        try:
            wait_until(lambda: num_threads(pids[0]) > 1)  # it has begun to watch rank 0
            os.kill(pids[0], signal.SIGSTOP)  # and cannot now
            assert all(map(is_running, pids))
        finally:
            parent.send_signal(end)
    wait_until(lambda: not any(map(is_running, pids)))


def test_time_in_which_rank_0_was_stopped_is_nobodys_silence() -> None:
    script = PARENT.replace("time.sleep(600)", "ranks.begin_serving(); sys.stdin.readline(); print(ranks.loss)")
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.send_signal(signal.SIGSTOP)
        time.sleep(processes.SILENCE_S + 1.0)
        parent.send_signal(signal.SIGCONT)
        answer, _ = parent.communicate("\n", timeout=LIMIT_S)
    assert answer == "None\n"


@pytest.fixture
def load(checkpoint: Any) -> Iterator[Callable[..., EngineParts]]:
    made: list[EngineParts] = []

    def make(folder: Path, **settings: Any) -> EngineParts:
        made.append(load_engine(folder, num_pages=64, threads=1, **settings))
        return made[-1]

    yield make
    for parts in made:
        parts.close()


PROMPTS = [list(range(3, 60)), [7, 8, 9], list(range(100, 135))]
SAMPLINGS = [
    Sampling(max_tokens=6),
    Sampling(max_tokens=6, temperature=0.9, top_p=0.9, seed=7, logprobs=2),
    Sampling(max_tokens=6, temperature=1.3, seed=8, repetition_penalty=1.2, prompt_logprobs=1),
]


def test_answers_and_pages_are_those_of_one_process_until_a_rank_is_killed(checkpoint: Any, load: Any) -> None:
    folder = checkpoint("llama3-gqa-tied")
    one, two = load(folder), load(folder, tensor_parallel=2)
    assert two.fingerprint == one.fingerprint
    assert two.model.exact
    assert two.parallelism.tensor == 2
    outputs = [run_all(parts) for parts in (one, two)]
    assert outputs[0] == outputs[1]
    assert bool((one.pool.bytes == two.pool.bytes).all())
    assert two.loss is None

    engine = Engine(two)
    engine.add(PROMPTS[0], Sampling(max_tokens=400))
    engine.step()
    os.kill(two.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerLost, match="rank 1 of the worker has ended with SIGKILL"):
        step_for_ever(engine)
    assert two.loss is not None


def step_for_ever(engine: Engine) -> None:
    while True:
        engine.step()


def run_all(parts: EngineParts) -> list[Any]:
    """What each step says of each sequence."""
    engine = Engine(parts, chunk_tokens=24)
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        engine.add(prompt, sampling)
    outputs = []
    while engine.has_work:
        outputs += [(output.sequence.sequence_id, output.outcome) for output in engine.step()]
    return outputs


def test_a_rank_that_stops_in_a_step_ends_it(checkpoint: Any, load: Any) -> None:
    parts = load(checkpoint("llama-mha"), pipeline_parallel=2)
    engine = Engine(parts)
    engine.add(PROMPTS[0], Sampling(max_tokens=400))
    engine.step()
    os.kill(parts.ranks.pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerLost, match="nothing was heard of rank 1"):
        step_for_ever(engine)


def test_what_a_rank_cannot_load_is_said(checkpoint: Any, load: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = checkpoint("llama-mha")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]  # which rank 0 does not read
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.2\.mlp\.down_proj"):
        load(tmp_path, pipeline_parallel=3)
