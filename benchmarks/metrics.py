"""What being seen costs the gateway: the metrics of a token, the line of a request, a scrape.

Times are CPU time of one thread, the best of the rounds with the median beside it. The same two figures of a token are
written with prometheus_client's own counter and histogram in rounds that take turns, for comparison.

    python -m benchmarks.metrics [--rounds 30] [--json FILE]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from benchmarks.report import add_arguments, leave
from gateway.limits import SERVICE_CLASSES
from gateway.observability.metrics import LONG_GAPS_S, TOKEN_BUCKETS_S, Metrics
from gateway.observability.request_log import CallFacts, RequestLog
from gateway.observability.tracing import NO_TRACE
from gateway.requests.call import AcceptedCall, AnswerSpec, RequestFacts, Totals
from gateway.types import Sampling
from services.runtime import logs
from services.runtime.clock import SYSTEM_CLOCK, Deadline

NUM_TOKENS = 20_000
NUM_REQUESTS = 500
NUM_SCRAPES = 3
NUM_MODELS = 4
GAPS_S = (0.004, 0.011, 0.02, 0.033, 0.06)

Round = Callable[[], int]
"""Does something a number of times and returns the number."""


def tokens_here() -> Round:
    """What `Requests._observe` writes for each token."""
    metrics = Metrics()
    figures = metrics.of("model", "normal")

    def work() -> int:
        for number in range(NUM_TOKENS):
            figures.generated_tokens.value += 1
            figures.itl_s.observe_often(GAPS_S[number % 5] / 1, 1)
        return NUM_TOKENS

    return work


def tokens_of_prometheus_client() -> Round:
    """Counts tokens with the library's own counters."""
    registry = CollectorRegistry()
    count = Counter("tokens", "Words.", registry=registry)
    buckets = (*TOKEN_BUCKETS_S, *LONG_GAPS_S)
    gaps_s = Histogram("gaps", "Words.", ("model", "class"), buckets=buckets, registry=registry).labels(
        "model", "normal"
    )

    def work() -> int:
        for number in range(NUM_TOKENS):
            count.inc(1)
            gaps_s.observe(GAPS_S[number % 5] / 1)
        return NUM_TOKENS

    return work


def loop_alone() -> Round:
    """What the loop of the two above costs by itself."""

    def work() -> int:
        for number in range(NUM_TOKENS):
            GAPS_S[number % 5] / 1
        return NUM_TOKENS

    return work


def calls() -> Round:
    """An accepted call alone, which the next one also makes."""

    def work() -> int:
        for number in range(NUM_REQUESTS):
            with _call(_spec(number)):
                pass
        return NUM_REQUESTS

    return work


def lines() -> Round:
    """From an accepted call to its line, written to nowhere."""
    metrics = Metrics()
    log = RequestLog(metrics, clock=SYSTEM_CLOCK)

    def work() -> int:
        for number in range(NUM_REQUESTS):
            spec = _spec(number)
            told = dict(
                arrived_s=spec.arrived_s,
                service_class=spec.facts.service_class,
                tenant=spec.facts.tenant,
            )
            opened = log.open([spec.request_id], **told)
            call = _call(spec)
            facts = CallFacts(spec.request_id, "", call.model, spec.facts.service_class, spec.facts.tenant)
            call.on_end(lambda error, opened=opened, facts=facts: log.note_end(opened, facts, error))
            with call:
                trace = log.trace(spec.request_id, **told)
                trace.num_attempts = 1
                trace.workers |= {"prefill-0": None, "decode-0": None}
                for phase in ("prefill", "transfer", "decode"):
                    trace.enter(phase, log.now_s())
                trace.end(None, log.now_s(), prompt_tokens=100, cached_tokens=16, new_tokens=200, finish_reason="stop")
        return NUM_REQUESTS

    return work


def scrapes() -> Round:
    """All series of some models, every class of which has been asked for."""
    metrics = Metrics()
    for model in range(NUM_MODELS):
        for service_class in SERVICE_CLASSES:
            metrics.of(f"model-{model}", service_class)

    def work() -> int:
        for _ in range(NUM_SCRAPES):
            metrics.render([])
        return NUM_SCRAPES

    return work


def measure(rounds: dict[str, Round], num_rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU per piece of work, of each round."""
    figures: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(num_rounds):
        for name, work in rounds.items():
            began_s = time.thread_time()
            number = work()
            figures[name].append((time.thread_time() - began_s) / number * 1e6)
    return figures


def _spec(number: int) -> AnswerSpec:
    sampling = Sampling(max_tokens=200, seed=1)
    return AnswerSpec(
        request_id=f"request-{number}.1.0",
        choice=0,
        model="model",
        eos_token_ids=(),
        prompt_token_ids=(1,) * 100,
        sampling=sampling,
        facts=RequestFacts(operation="chat", tenant="tenant"),
        deadline=Deadline.after(60.0),
        span=NO_TRACE,
        totals=Totals(),
        arrived_s=SYSTEM_CLOCK.monotonic(),
        arrived_unix_ns=0,
    )


def _call(spec: AnswerSpec) -> AcceptedCall:
    return AcceptedCall(
        [spec],
        request_id=spec.request_id,
        span=NO_TRACE,
        close=lambda: None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    add_arguments(parser)
    arguments = parser.parse_args()
    with open(os.devnull, "w") as nowhere:
        logs.setup("info", service="gateway", stream=nowhere)
        figures = measure(
            {
                "token": tokens_here(),
                "token, prometheus_client": tokens_of_prometheus_client(),
                "loop of these two": loop_alone(),
                "request's line": lines(),
                "request alone": calls(),
                "scrape": scrapes(),
            },
            arguments.rounds,
        )
    for name, each in figures.items():
        print(f"{name:28} {min(each):10.3f} us, median {statistics.median(each):10.3f}")
    best = {name: {"best_us": min(each), "median_us": statistics.median(each)} for name, each in figures.items()}
    leave(arguments, "metrics", best, {})


if __name__ == "__main__":
    main()
