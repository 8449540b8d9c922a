"""How fast simulated time passes: tokens of a second of one core, with few workers and with 40 and 70.

    python -m benchmarks.simulator_speed [--rounds 3] [--loads PART …] [--json FILE]

Counted are the requests that were answered: the tokens of their answers, and those of prompts and answers together.
Seconds are CPU time, the best of the rounds, without reading a trace. The limit beside it is the bare event loop:
the last column says how many events that do nothing it could have had in the time of one request, and holds on other
machines too. Many steps of a batch are one event; a decision looks at all workers. The aim is one million answer
tokens in a second.

- mooncake: the conversation trace, as fast for its number of workers as it was recorded for 16; roles of equal size;
- a100, h100, hh: splitwise-sim's machines and rates (`tests/planning/simulator/splitwise.py`): 70 and 40
  machines that do both, 25 + 15 with roles; they route by load, and with `hybrid` as a gateway does;
- sine: 1 to 24 requests/s, 8,000 tokens in, 1,000 out, and an autoscaler that chooses the workers.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Ratio, add_arguments, leave
from planning.autoscaler.policy import AutoscalerSettings
from planning.simulator.cluster import Run, simulate
from planning.simulator.events import EventLoop
from planning.simulator.jobs import WorkerSpec
from planning.simulator.profiles import DEFAULT_LINK, profile
from planning.simulator.report import answered
from planning.simulator.traces import compressed, read_trace
from tests.planning.autoscaler.small import run as scaled
from tests.planning.autoscaler.small import sine
from tests.planning.simulator.splitwise import machines, requests, separate

MOONCAKE = Path(__file__).parent / "traces" / "mooncake_fast25_conversation.jsonl.gz"
AIM_TOKENS_PER_S = 1e6
NUM_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class Speed:
    """One load: what was simulated, and the CPU seconds that it took."""

    num_requests: int
    prompt_tokens: int
    answer_tokens: int
    time_s: float


def mooncake(num_workers: int) -> Callable[[], Run]:
    """Returns what simulates the whole trace."""
    trace, speeds = compressed(read_trace(MOONCAKE), speed=num_workers / 16), profile("a100-llama-3.1-70b-bf16-tp8")
    worker = WorkerSpec(
        num_pages=400_000 // trace.block_tokens,
        page_size=trace.block_tokens,
        law=speeds.law,
        link=DEFAULT_LINK,
        kv_bytes_per_token=speeds.kv_bytes_per_token,
        chunk_tokens=8192,
        max_batch=256,
    )
    spec = separate(worker, num_workers // 2, num_workers // 2)
    return lambda: simulate(trace, spec, "hybrid")


def splitwise(design: str, *, rate: int, policy: str) -> Callable[[], Run]:
    """Returns what simulates a design of splitwise-sim at a rate."""
    spec, trace = machines(design), requests(rate)
    return lambda: simulate(trace, spec, policy)


def wave() -> Run:
    """Simulates the wave with the autoscaler."""
    settings = AutoscalerSettings(start_up_s=120.0, interval_s=5.0, settle_s=10.0, headroom=1.0)
    return scaled(sine, lambda _: (8000, 1000), 900, settings).run


LOADS: dict[str, Callable[[], Callable[[], Run]]] = {
    "mooncake 8+8": lambda: mooncake(16),
    "mooncake 20+20": lambda: mooncake(40),
    "mooncake 35+35": lambda: mooncake(70),
    "a100 70 by load": lambda: splitwise("Baseline-A100", rate=50, policy="least_loaded"),
    "h100 40 by load": lambda: splitwise("Baseline-H100", rate=120, policy="least_loaded"),
    "hh 25+15 by load": lambda: splitwise("Splitwise-HH(25P,15T)", rate=120, policy="least_loaded"),
    "a100 70 hybrid": lambda: splitwise("Baseline-A100", rate=50, policy="hybrid"),
    "h100 40 hybrid": lambda: splitwise("Baseline-H100", rate=120, policy="hybrid"),
    "hh 25+15 hybrid": lambda: splitwise("Splitwise-HH(25P,15T)", rate=120, policy="hybrid"),
    "sine": lambda: wave,
}
"""What reads a load's trace, and returns what simulates it."""


def main() -> None:
    """Prints a line for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts")
    parser.add_argument("--loads", nargs="*", default=[""], metavar="PART", help="only loads with this in their names")
    add_arguments(parser)
    arguments = parser.parse_args()
    loads = {name: load() for name, load in LOADS.items() if any(part in name for part in arguments.loads)}
    found: dict[str, list[Speed]] = {name: [] for name in loads}
    event_s = math.inf
    for _ in range(arguments.rounds):
        for name, load in loads.items():
            event_s = min(event_s, bare_event_s())
            found[name].append(measured(load))
    best = {name: min(speeds, key=lambda speed: speed.time_s) for name, speeds in found.items()}
    print(f"a bare event: {1e9 * event_s:.0f} ns of CPU")
    print(
        f"{'load':18} {'requests':>8} {'answer tokens/s':>16} {'all tokens/s':>13} {'a request':>10} {'in events':>9}"
    )
    for name, speed in best.items():
        request_s, all_tokens = speed.time_s / speed.num_requests, speed.prompt_tokens + speed.answer_tokens
        print(
            f"{name:18} {speed.num_requests:>8} {speed.answer_tokens / speed.time_s / 1e6:>14.2f} M "
            f"{all_tokens / speed.time_s / 1e6:>11.1f} M {1e6 * request_s:>7.0f} us {request_s / event_s:>9.0f}"
        )
    least = min((speed.answer_tokens / speed.time_s for speed in best.values()), default=math.nan)
    print(f"least: {least / 1e6:.2f} M answer tokens/s; aim {AIM_TOKENS_PER_S / 1e6:g}")
    ratios = {
        f"a request in events, {name}": Ratio(speed.time_s / speed.num_requests / event_s, lower_is_better=True)
        for name, speed in best.items()
    }
    figures = {name: [speed.time_s for speed in speeds] for name, speeds in found.items()}
    leave(arguments, "simulator_speed", {"bare_event_s": event_s, "time_s": figures}, ratios)


def measured(load: Callable[[], Run]) -> Speed:
    """Simulates a load once."""
    began_s = time.process_time()
    run = load()
    time_s, jobs = time.process_time() - began_s, answered(run)
    answer_tokens = sum(job.num_output_tokens for job in jobs)
    return Speed(len(jobs), sum(job.num_prompt_tokens for job in jobs), answer_tokens, time_s)


def bare_event_s() -> float:
    """Returns the CPU seconds of an event that does nothing, with a thousand others ahead."""
    loop = EventLoop()
    num_left = NUM_EVENTS

    def happen() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left >= 1000:
            loop.at(loop.now_s + 1.0, happen)

    for number in range(1000):
        loop.at(number / 1000, happen)
    began_s = time.process_time()
    loop.run()
    return (time.process_time() - began_s) / NUM_EVENTS


if __name__ == "__main__":
    main()
