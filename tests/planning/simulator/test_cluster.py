"""The simulated cluster: nothing is lost, the same comes out twice, and it agrees with what queueing theory knows."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.simulator.cluster import DEADLINE, PUSHED_OUT, QUEUE_FULL, TOO_LONG, Run, simulate
from planning.simulator.jobs import Job
from planning.simulator.report import Targets, answered, e2e_s, series, summary, tpot_s, ttft_s
from planning.simulator.traces import TraceRequest
from services.scheduling.overload import Targets as Limits
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed
from services.scheduling.routing.policies import POLICY_NAMES
from tests.examples import examples
from tests.planning.simulator.small import DECODE, PREFILL, cluster_spec, trace_of, worker_spec

TARGETS = Targets(1.0, 0.1)


def some_requests(seed: int, num_requests: int, rate_per_s: float, *, with_blocks: bool) -> list[TraceRequest]:
    """Prompts that share prefixes of 16-token blocks, if told; some answers have one token only."""
    source, ids, now_s, requests = random.Random(seed), dict[object, int](), 0.0, []
    for _ in range(num_requests):
        now_s += source.expovariate(rate_per_s) if source.random() < 0.7 else 0.0
        num_prompt_tokens = source.randrange(1, 400)
        turn = tuple(source.randrange(2) for _ in range(-(-num_prompt_tokens // 16)))
        blocks = tuple(ids.setdefault(turn[: end + 1], len(ids)) for end in range(len(turn))) if with_blocks else ()
        requests.append(
            TraceRequest(
                arrival_s=now_s,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=source.choice((1, 2, source.randrange(1, 80))),
                block_ids=blocks,
                tenant=source.choice(("a", "b")),
                service_class=source.choice(("interactive", "normal", "batch")),
            )
        )
    return requests


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_prefill=st.integers(0, 3),
    num_decode=st.integers(1, 3),
    policy=st.sampled_from(POLICY_NAMES),
    with_blocks=st.booleans(),
    local=st.sampled_from([None, 0, 100]),
    num_pages=st.sampled_from([20, 40, 200]),
    chunk_tokens=st.sampled_from([7, 64, 1000]),
    max_batch=st.sampled_from([1, 3, 100]),
    max_waiting=st.sampled_from([3, 1000]),
    max_queue_wait_s=st.sampled_from([0.5, math.inf]),
    eviction=st.sampled_from(["lru", "lru-leaf-first"]),
    strategy=st.sampled_from(["fcfs", "priority", "sla", "fair"]),
    limits=st.sampled_from([None, Limits(0.3, 0.02)]),
)
def test_every_request_ends_exactly_once_and_every_page_comes_back(
    seed: int,
    num_prefill: int,
    num_decode: int,
    policy: str,
    with_blocks: bool,
    local: int | None,
    num_pages: int,
    chunk_tokens: int,
    max_batch: int,
    max_waiting: int,
    max_queue_wait_s: float,
    eviction: str,
    strategy: str,
    limits: Limits | None,
) -> None:
    requests = some_requests(seed, 60, 40.0, with_blocks=with_blocks)
    worker = worker_spec(num_pages=num_pages, chunk_tokens=chunk_tokens, max_batch=max_batch, eviction=eviction)
    spec = cluster_spec(
        num_prefill,
        num_decode,
        prefill=worker,
        decode=worker,
        local_prefill_tokens=local,
        max_waiting=max_waiting,
        max_queue_wait_s=max_queue_wait_s,
        queue_strategy=strategy,
    )
    spec = replace(spec, targets=limits)
    run = simulate(trace_of(requests, 16 if with_blocks else 0), spec, policy, seed=seed)  # checks pages at its end
    assert len(run.jobs) == len(requests)
    for job in run.jobs:
        assert bool(job.refusal) != (job.end_s is not None)
        if job.refusal:
            assert job.refusal in (TOO_LONG, QUEUE_FULL, PUSHED_OUT, DEADLINE, "ttft", "itl", "pages")
            assert job.first_token_s is None
            assert job.dispatched_s is None
        else:
            check_order(job)
    refused = summary(run, TARGETS)["requests"]["refused"]
    assert sum(refused.values()) + len(answered(run)) == len(requests)
    assert all(0 <= busy.total <= run.end_s * (1 + 1e-9) for busy in run.busy.values())


def check_order(job: Job) -> None:
    assert job.dispatched_s is not None
    assert job.prefill_began_s is not None
    assert job.first_token_s is not None
    assert job.end_s is not None
    assert job.arrival_s <= job.dispatched_s <= job.prefill_began_s < job.first_token_s <= job.end_s
    assert job.num_computed_tokens == job.num_prompt_tokens > job.num_cached_tokens
    if job.num_output_tokens > 1:
        assert job.joined_s is not None
        assert job.first_token_s <= job.joined_s < job.end_s


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    trace = trace_of(some_requests(1, 200, 20.0, with_blocks=True), 16)
    spec = cluster_spec(3, 3)
    runs = [simulate(trace, spec, "random", seed=seed) for seed in (5, 5, 6)]
    numbers = [(summary(run, TARGETS), series(run), [job.end_s for job in run.jobs]) for run in runs]
    assert numbers[0] == numbers[1] != numbers[2]


@pytest.mark.parametrize("num_prompt_tokens", [1, 17, 2000])
def test_alone_a_request_takes_what_the_closed_forms_say(num_prompt_tokens: int) -> None:
    run = simulate(trace_of([TraceRequest(0.0, num_prompt_tokens, 5)]), cluster_spec(), "hybrid")
    (job,) = run.jobs
    assert ttft_s(job) == pytest.approx(PREFILL.time_s(num_prompt_tokens), rel=1e-12)
    steps_s = sum(DECODE.step_s(1, num_prompt_tokens + generated) for generated in range(1, 5))
    transfer_s = 0.001 + num_prompt_tokens * 1000 / 1e9
    assert e2e_s(job) - ttft_s(job) == pytest.approx(transfer_s + steps_s, rel=1e-12)


@pytest.mark.parametrize("local_prefill_tokens", [0, 10**6])
def test_what_is_spent_outside_workers_delays_tokens_and_takes_no_workers_time(local_prefill_tokens: int) -> None:
    requests = trace_of([TraceRequest(0.01 * number, 500, 5) for number in range(20)])
    spec = cluster_spec(local_prefill_tokens=local_prefill_tokens)
    near = simulate(requests, spec, "hybrid")
    outside = replace(spec, prefill=replace(spec.prefill, outside_s=0.25), decode=replace(spec.decode, outside_s=0.125))
    far = simulate(requests, outside, "hybrid")
    more_s = 0.25 if local_prefill_tokens == 0 else 0.125
    assert [ttft_s(job) for job in far.jobs] == pytest.approx([ttft_s(job) + more_s for job in near.jobs])
    assert [e2e_s(job) for job in far.jobs] == pytest.approx([e2e_s(job) + more_s for job in near.jobs])
    assert {name: one.total for name, one in far.busy.items()} == {name: one.total for name, one in near.busy.items()}


def test_at_low_load_every_first_token_comes_when_the_law_says() -> None:
    source = random.Random(3)
    requests = [TraceRequest(10.0 * index, source.randrange(1, 5000), 3) for index in range(50)]
    run = simulate(trace_of(requests), cluster_spec(2, 2), "hybrid")
    for job in run.jobs:
        assert ttft_s(job) == pytest.approx(PREFILL.time_s(job.num_prompt_tokens), rel=1e-9)


def test_chunks_cost_one_overhead_each_and_nothing_else() -> None:
    spec = cluster_spec(prefill=worker_spec(chunk_tokens=100))
    run = simulate(trace_of([TraceRequest(0.0, 1000, 1)]), spec, "hybrid")
    assert ttft_s(run.jobs[0]) == pytest.approx(PREFILL.time_s(1000) + 9 * PREFILL.overhead_s, rel=1e-12)


def test_pages_travel_while_later_chunks_are_computed() -> None:
    link = LinkSpeed(0.5, 1e7)
    spec = cluster_spec(prefill=worker_spec(chunk_tokens=100, link=link))
    run = simulate(trace_of([TraceRequest(0.0, 1000, 2)]), spec, "hybrid")
    (job,) = run.jobs
    first_chunk_s = PREFILL.time_s(100)
    assert job.joined_s is not None
    # 1000 tokens take 0.1 s on the link, more than the computation behind the first chunk leaves
    per_chunk_s = 100 * 1000 / 1e7
    assert per_chunk_s < first_chunk_s
    assert job.joined_s == pytest.approx(ttft_s(job) + per_chunk_s + 0.5, rel=1e-9)


def test_a_slow_link_carries_one_byte_after_the_other() -> None:
    """Two prompts at once: the second one's pages wait until the first one's are through."""
    spec = cluster_spec(prefill=worker_spec(chunk_tokens=100, link=LinkSpeed(0.25, 1e6)))
    run = simulate(trace_of([TraceRequest(0.0, 1000, 2), TraceRequest(0.0, 500, 2)]), spec, "hybrid")
    first_chunk_s = PREFILL.time_s(100)
    first, second = (job.joined_s or 0.0 for job in run.jobs)
    assert first == pytest.approx(first_chunk_s + 1000 * 1000 / 1e6 + 0.25, rel=1e-9)
    assert second == pytest.approx(first_chunk_s + 1500 * 1000 / 1e6 + 0.25, rel=0.01)  # within a decode step


@pytest.mark.parametrize("load", [*(pytest.param(load, marks=pytest.mark.slow) for load in (0.3, 0.5)), 0.7])
def test_mean_wait_is_that_of_an_m_d_1_queue(load: float) -> None:
    """Poisson arrivals, equal prompts, one at a time.

    Each wait is Lindley's (W' = max(0, W + service - gap)), their mean Pollaczek and Khinchine's within 3 %.
    """
    service_s, num_requests, source, now_s, requests = 0.02, 30_000, random.Random(1), 0.0, []
    for _ in range(num_requests):
        now_s += source.expovariate(load / service_s)
        requests.append(TraceRequest(now_s, 100, 1))
    prefill = worker_spec(prefill=PrefillSpeed(0.0, service_s / 100), chunk_tokens=100, num_pages=10**7)
    decode = worker_spec(num_pages=10**7)
    run = simulate(trace_of(requests), cluster_spec(prefill=prefill, decode=decode), "round_robin")
    waits_s, wait_s, before_s = [], 0.0, -math.inf
    for job in run.jobs:
        wait_s = max(0.0, wait_s + service_s - (job.arrival_s - before_s))
        before_s = job.arrival_s
        waits_s.append(wait_s)
        assert ttft_s(job) - service_s == pytest.approx(wait_s, abs=1e-9)
    expected_s = load * service_s / (2 * (1 - load))
    assert sum(waits_s) / num_requests == pytest.approx(expected_s, rel=0.03)
    assert run.busy["p0"].total / run.end_s == pytest.approx(load, rel=0.02)


def step_by_step(jobs: Sequence[Job], max_batch: int, decode: DecodeSpeed) -> dict[int, float]:
    """When each answer ends, computed one step after the other from when the sequences have come."""
    ready = sorted((job.first_token_s or 0.0, job.index, job) for job in jobs)  # the test's link takes no time
    running: dict[int, list[int]] = {}
    ends, now_s, waiting = {}, 0.0, []
    while ready or waiting or running:
        if not running and not waiting:
            now_s = max(now_s, ready[0][0])
        while ready and ready[0][0] <= now_s:
            waiting.append(ready.pop(0)[2])
        while waiting and len(running) < max_batch:
            job = waiting.pop(0)
            running[job.index] = [job.num_prompt_tokens + 1, job.num_output_tokens - 1]
        now_s += decode.step_s(len(running), sum(context for context, _ in running.values()))
        for index, state in list(running.items()):
            state[0] += 1
            state[1] -= 1
            if state[1] == 0:
                ends[index] = now_s
                del running[index]
    return ends


@pytest.mark.parametrize(("seed", "max_batch"), list(itertools.product(range(8), (2, 5, 100))))
def test_many_steps_as_one_event_are_the_steps_one_by_one(seed: int, max_batch: int) -> None:
    source, now_s, requests = random.Random(seed), 0.0, []
    for _ in range(60):
        now_s += source.expovariate(12.0)
        requests.append(TraceRequest(now_s, source.randrange(1, 500), source.randrange(2, 60)))
    decode = DecodeSpeed(0.004, 3e-4, 2e-6)
    spec = cluster_spec(
        prefill=worker_spec(link=LinkSpeed(0.0, 1e30)), decode=worker_spec(decode=decode, max_batch=max_batch)
    )
    run = simulate(trace_of(requests), spec, "hybrid")
    expected = step_by_step(run.jobs, max_batch, decode)
    for job in run.jobs:
        assert job.end_s == pytest.approx(expected[job.index], rel=1e-9)


def mean_ttft_s(run: Run) -> float:
    return sum(map(ttft_s, run.jobs)) / len(run.jobs)


@pytest.mark.parametrize("policy", ["least_loaded", "hybrid"])
def test_more_of_anything_is_not_worse(policy: str) -> None:
    trace = trace_of(some_requests(7, 400, 60.0, with_blocks=True), 16)
    times = [mean_ttft_s(simulate(trace, cluster_spec(number, 4), policy)) for number in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    slow = [worker_spec(prefill=PrefillSpeed(0.01 * factor, 1e-4 * factor)) for factor in (4, 2, 1)]
    times = [mean_ttft_s(simulate(trace, cluster_spec(2, 4, prefill=one), policy)) for one in slow]
    assert times == sorted(times, reverse=True)


def test_a_cached_prefix_is_not_computed_again_nor_sent_again() -> None:
    blocks = tuple(range(10))
    link = LinkSpeed(0.0, 1e6)
    spec = cluster_spec(prefill=worker_spec(link=link))
    requests = [TraceRequest(0.0, 160, 2, blocks), TraceRequest(9.0, 176, 2, (*blocks, 10))]
    run = simulate(trace_of(requests, 16), spec, "hybrid")
    first, second = run.jobs
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 160)
    assert ttft_s(second) == pytest.approx(PREFILL.time_s(16, 160), rel=1e-9)
    assert second.joined_s is not None
    assert second.joined_s - (second.first_token_s or 0.0) == pytest.approx(16 * 1000 / 1e6, rel=1e-9)
    # Asked for once more, all but the last token is cached; its page is not computed by halves.
    again = simulate(trace_of([*requests, TraceRequest(20.0, 160, 2, blocks)], 16), spec, "hybrid").jobs[2]
    assert again.num_cached_tokens == 159


def test_refusals_say_why() -> None:
    decode = worker_spec(num_pages=10)
    spec = cluster_spec(decode=decode, max_waiting=1, max_queue_wait_s=0.05)
    requests = [
        TraceRequest(0.00, 100, 50),
        TraceRequest(0.01, 100, 50, service_class="batch"),
        TraceRequest(0.02, 100, 50, service_class="interactive"),
        TraceRequest(0.03, 100, 50, service_class="interactive"),
        TraceRequest(0.04, 100, 1000),
    ]
    run = simulate(trace_of(requests), spec, "hybrid")
    assert [job.refusal for job in run.jobs] == ["", PUSHED_OUT, DEADLINE, QUEUE_FULL, TOO_LONG]
    assert summary(run, TARGETS)["slo"]["met_both"] == 0.2


def test_what_would_miss_its_targets_is_refused_and_the_rest_is_served_in_time() -> None:
    requests = [TraceRequest(0.02 * index, 400, 100) for index in range(600)]
    spec = cluster_spec(2, 1, decode=worker_spec(num_pages=400))
    unguarded = simulate(trace_of(requests), spec, "hybrid")
    guarded = simulate(trace_of(requests), replace(spec, targets=Limits(2.0, 0.1)), "hybrid")
    assert all(not job.refusal for job in unguarded.jobs)
    assert 0 < len(answered(guarded)) < len(requests)
    limits = Targets(2.0, 0.1)
    assert summary(guarded, limits)["slo"]["met_both"] > 3 * summary(unguarded, limits)["slo"]["met_both"]
    assert summary(guarded, limits)["requests"]["refused"].keys() == {"ttft"}


def test_a_run_says_how_far_it_is() -> None:
    told: list[tuple[int, int, float]] = []
    trace = trace_of(some_requests(2, 50, 10.0, with_blocks=False))
    simulate(trace, cluster_spec(), "hybrid", progress=lambda *args: told.append(args))
    assert len(told) == 10
    assert [one[0] for one in told] == sorted(one[0] for one in told)
    assert told[-1][1] == 50


def test_time_per_token_is_that_of_the_steps() -> None:
    run = simulate(trace_of([TraceRequest(0.0, 10, 101)]), cluster_spec(), "hybrid")
    assert tpot_s(run.jobs[0]) == pytest.approx(DECODE.step_s(1, 60), rel=0.01)
