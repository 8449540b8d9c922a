"""The simulator against our own running clusters: `python -m benchmarks.step_times [--rate 6] [--shapes 1:1 2:2]`.

`tandem profile` measures an idle 1P1D; then each shape of cluster runs the same made-up load, and so does the simulator
with the measured step times. Aim: mean TTFT and TPOT within 15 %. Workers share the cores of this machine, which the
simulator does not know.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.cluster import Cluster, running_cluster
from benchmarks.report import Ratio, add_arguments, leave
from cli.bench_load import Ask, Endpoint, Load, Reply, measured_words
from cli.main import main as tandem
from cli.replay import ReplaySettings, cluster_spec
from demo import DEMO_MODEL
from planning.simulator.cluster import simulate
from planning.simulator.measured import Measured, read_measured
from planning.simulator.report import tpot_s, ttft_s
from planning.simulator.traces import Trace, TraceRequest
from services.runtime.tls import client_context

MAX_ERROR = 0.15
NUM_WARM = 40
"""Requests before those that count: the workers of a shape that was not profiled begin cold, and learn their speeds."""


def asks(arguments: argparse.Namespace) -> list[Ask]:
    """Returns Poisson arrivals of prompts and answers of many lengths."""
    draw, now_s, found = random.Random(arguments.seed), 0.0, []
    for number in range(NUM_WARM + arguments.requests):
        now_s += draw.expovariate(arguments.rate)
        found.append(Ask(now_s, ((5_000_000 + number, draw.randrange(32, 512)),), draw.randrange(32, 128)))
    return found


async def run(cluster: Cluster, load: list[Ask]) -> list[Reply]:
    """Returns the replies in the order of the requests. Raises RuntimeError if one failed."""
    fields = {"ignore_eos": True, "temperature": 0}
    endpoint = Endpoint(
        url=cluster.http, model="tandem-demo", is_chat=False, api_key=None, fields=fields, timeout_s=120.0
    )
    replies: list[Reply] = []
    async with endpoint.client(client_context(None, None, None)) as client:
        sender = Load(endpoint, client, tokens_per_word=await measured_words(endpoint, client))
        await sender.open_loop(load, replies.append)
    if failed := [one.error for one in replies if one.error]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return sorted(replies, key=lambda one: one.ask.at_s)


def simulated(replies: list[Reply], measured: Measured, shape: tuple[int, int]) -> tuple[float, float]:
    """Returns the mean TTFT and TPOT of the same requests, in seconds, as the simulator has them."""
    requests = [TraceRequest(one.ask.at_s, one.num_prompt_tokens, one.num_tokens) for one in replies]
    trace = Trace("own", "csv", 0, tuple(requests))
    settings = ReplaySettings(trace=Path("own"), prefill=shape[0], decode=shape[1], max_batch=measured.max_batch or 64)
    jobs = simulate(trace, cluster_spec(settings, trace, speeds=measured.profile), "hybrid").jobs[NUM_WARM:]
    return statistics.mean(map(ttft_s, jobs)), statistics.mean(map(tpot_s, jobs))


def main() -> None:
    """Measures, simulates, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--shapes", nargs="+", default=["1:1", "2:2"], metavar="P:D")
    parser.add_argument("--repeats", type=int, default=20, help="times that each step is measured")
    parser.add_argument("--seed", type=int, default=1)
    add_arguments(parser)
    arguments = parser.parse_args()
    load, figures, worst = asks(arguments), [], 0.0
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        file = Path(folder) / "measured.json"
        for text in arguments.shapes:
            prefill, decode = map(int, text.split(":"))
            with running_cluster("--threads=1", model=DEMO_MODEL, prefill=prefill, decode=decode) as cluster:
                if not file.exists():
                    words = ["--prompts", "16,64,128,256,512", "--batches", "1,2,4,8", "--contexts", "32,256"]
                    words += ["--url", cluster.http, "--repeats", str(arguments.repeats)]
                    code = tandem(["profile", str(file), *words])
                    assert code == 0, "the cluster can be measured"
                replies = asyncio.run(run(cluster, load))
            counted = replies[NUM_WARM:]
            real = (
                statistics.mean(one.ttft_s for one in counted),
                statistics.mean(one.tpot_s for one in counted if one.tpot_s is not None),
            )
            found = simulated(replies, read_measured(file), (prefill, decode))
            errors = [simulated_s / real_s - 1 for simulated_s, real_s in zip(found, real, strict=True)]
            worst = max(worst, *map(abs, errors))
            figure = {
                "shape": text,
                "ttft_ms": round(1e3 * real[0], 2),
                "simulated_ttft_ms": round(1e3 * found[0], 2),
                "tpot_ms": round(1e3 * real[1], 3),
                "simulated_tpot_ms": round(1e3 * found[1], 3),
                "errors": [round(error, 3) for error in errors],
            }
            print(figure, flush=True)
            figures.append(figure)
    ratios = {"worst error of the simulator": Ratio(worst, MAX_ERROR, lower_is_better=True)}
    leave(arguments, "step_times", {"shapes": figures}, ratios)


if __name__ == "__main__":
    main()
