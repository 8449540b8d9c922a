"""The handbook's exercise and ten further questions for `tandem plan`, each answer simulated with other arrivals.

python benchmarks/plan_questions.py [NUMBER …]
"""

import sys
import time

from planning.planner import page
from planning.planner.question import LatencyTargets, Question, Workload, kinds_for
from planning.planner.search import answer, outcome
from planning.simulator.profiles import profiles

CHECKED_WITH = (11, 12, 13)
"""Seeds that no plan has seen."""
MODELS = {
    "70B": ("llama-3.1-70b", ("h100",), "h100-"),
    "8B": ("llama-3.1-8b", ("h100",), "h100-"),
    "70B on A100": ("llama-3.1-70b", ("a100",), "a100-"),
}
QUESTIONS: list[tuple[str, str, float, tuple[int, int], LatencyTargets, int, int]] = [
    # The exercise: 10,000 users, a request each 30 s.
    (
        "the exercise: 10,000 users, 2 s to the last token",
        "70B",
        10_000 / 30,
        (500, 200),
        LatencyTargets(e2e_s=2.0),
        10**6,
        0,
    ),
    (
        "2 s to the first token, 50 ms between tokens",
        "70B",
        10_000 / 30,
        (500, 200),
        LatencyTargets(2.0, 0.05),
        10**6,
        0,
    ),
    (
        "the exercise, with one worker of each role to lose",
        "70B",
        10_000 / 30,
        (500, 200),
        LatencyTargets(e2e_s=2.0),
        10**6,
        1,
    ),
    ("the exercise in 1.5 s", "70B", 10_000 / 30, (500, 200), LatencyTargets(e2e_s=1.5), 10**6, 0),
    ("the exercise on at most 64 GPUs", "70B", 10_000 / 30, (500, 200), LatencyTargets(e2e_s=2.0), 64, 0),
    ("long prompts, short answers", "70B", 10.0, (8000, 100), LatencyTargets(3.0, 0.05), 10**6, 0),
    ("short prompts, long answers", "70B", 10.0, (200, 1500), LatencyTargets(1.0, 0.03), 10**6, 0),
    ("a small model, quick", "8B", 50.0, (1000, 200), LatencyTargets(0.3, 0.012), 10**6, 0),
    ("a small model, patient", "8B", 50.0, (1000, 200), LatencyTargets(5.0, 0.05), 10**6, 0),
    ("older GPUs", "70B on A100", 5.0, (1000, 300), LatencyTargets(2.0, 0.05), 10**6, 0),
    ("older GPUs, too quick", "70B on A100", 5.0, (1000, 300), LatencyTargets(2.0, 0.015), 10**6, 0),
]


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:]] or range(len(QUESTIONS))
    known = profiles()
    for number in numbers:
        words, model, rate_per_s, lengths, targets, max_gpus, redundancy = QUESTIONS[number]
        name, gpus, prefix = MODELS[model]
        kinds = kinds_for(name, {key: one for key, one in known.items() if key.startswith(prefix)}, gpus=gpus)
        asked = Question(Workload(rate_per_s, [lengths]), targets, kinds, max_gpus, redundancy)
        began_s = time.process_time()
        found = answer(asked)
        spent_s = time.process_time() - began_s
        print(f"{number}. {words}: {model}, {rate_per_s:.0f}/s, {lengths[0]} in, {lengths[1]} out ({spent_s:.0f} s)")
        print(page.text(page.facts(asked, found)), end="")
        for plan in (found.best, found.one_pool):
            if plan is not None:
                missed = [outcome(asked, plan.shape, seed=seed).missed(targets) for seed in CHECKED_WITH]
                print(f"  checked with {len(missed)} other arrivals: {missed.count([])} keep the targets", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
