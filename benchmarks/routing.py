"""What choosing workers costs: a decision among 2 to 8,192 of them, beside the least that any choice must do.

The limit is one pass in plain Python over the views that reads one number of each; a decision cannot look at all
workers in less. Both are measured in turn, the best of many rounds counts: other programs only ever add time. Every
worker holds another part of the prompt, which is the most expensive case. `gateway` is the same decision beginning with
what the gateway knows of the workers' sessions.

    python -m benchmarks.routing [--policy hybrid] [--rounds 200]
"""

import argparse
import asyncio
import random
import time
from collections.abc import Callable

from gateway.topology.members import Topology
from gateway.topology.reports import WorkerLoad
from services.cluster.registry import WorkerRecord
from services.scheduling.health import WorkerHealth
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed
from services.scheduling.routing.policies import POLICY_NAMES
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import RouteRequest, WorkerView

PAGE_SIZE = 16
PROMPT_PAGES = 200
SIZES = ((1, 1), (4, 4), (32, 32), (64, 64), (256, 256), (2048, 2048), (4096, 4096))
"""(prefill workers, decode workers)"""
TARGET_S = 0.2e-3
"""For 64 workers, of both roles together or of each."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--policy", choices=POLICY_NAMES, default=POLICY_NAMES[0])
    parser.add_argument("--rounds", type=int, default=200, help="measurements of each size")
    parser.add_argument("--seed", type=int, default=1, help="of the workers' loads")
    settings = parser.parse_args()
    rng = random.Random(settings.seed)
    print(f"policy {settings.policy}, prompt of {PROMPT_PAGES} pages; microseconds, best of {settings.rounds} rounds")
    print(f"{'workers':>12} {'route':>9} {'one pass':>9} {'ratio':>7} {'all routes':>11} {'gateway':>9}")
    for num_prefill, num_decode in SIZES:
        prefills, decodes = _workers(rng, "p", num_prefill), _workers(rng, "d", num_decode)
        route_s, pass_s, all_s = _measure(settings.policy, rng, prefills, decodes, settings.rounds)
        note = ""
        if num_prefill in (32, 64):
            note = f"   target {TARGET_S * 1e6:.0f}: {'met' if route_s < TARGET_S else 'MISSED'}"
        asked_s = asyncio.run(gateway_s(settings.policy, rng, num_prefill, num_decode, settings.rounds))
        name = f"{num_prefill}P + {num_decode}D"
        figures = f"{route_s * 1e6:>9.1f} {pass_s * 1e6:>9.1f} {route_s / pass_s:>7.1f} {all_s * 1e6:>11.0f}"
        print(f"{name:>12} {figures} {asked_s * 1e6:>9.1f}{note}")
    for num_workers in (8, 64, 512):
        print(f"health of {num_workers} workers: {health_s(num_workers) * 1e6:.1f} us a request, judging included")


def _measure(
    policy: str, rng: random.Random, prefills: list[WorkerView], decodes: list[WorkerView], rounds: int
) -> tuple[float, float, float]:
    """Seconds of a decision with its first route, of the limit, and of a decision with all its routes."""
    router = Router(policy)
    views = prefills + decodes
    request = RouteRequest(
        num_prompt_tokens=PROMPT_PAGES * PAGE_SIZE,
        max_new_tokens=256,
        model="m",
        tenant="t",
        affinity_key="user",
        cached_tokens={view.worker_id: rng.randrange(PROMPT_PAGES) * PAGE_SIZE for view in views},
        kv_bytes_per_token=128 * 1024,
    )

    def one_pass() -> tuple[str, int]:
        best, least = "", 1 << 60
        for view in views:
            if view.waiting_tokens < least:
                best, least = view.worker_id, view.waiting_tokens
        return best, least

    best = [1e9, 1e9]
    for _ in range(rounds):
        best[0] = min(best[0], _time_s(lambda: router.route(request, prefills, decodes, now_s=0.0)[0]))
        best[1] = min(best[1], _time_s(one_pass))
    all_s = min(_time_s(lambda: list(router.route(request, prefills, decodes, now_s=0.0))) for _ in range(3))
    return best[0], best[1], all_s


async def gateway_s(policy: str, rng: random.Random, num_prefill: int, num_decode: int, rounds: int) -> float:
    """Seconds of a decision with its first route, beginning with the workers as the gateway knows them."""
    topology = Topology(gateway_incarnation="0" * 32, on_change=lambda: None)
    views = {view.worker_id: view for view in _workers(rng, "p", num_prefill) + _workers(rng, "d", num_decode)}
    topology.take_membership([_record(view) for view in views.values()])
    for member in topology.members():
        member.session.is_up, member.session.load = True, _load(views[member.record.id])
    router = Router(policy)
    cached_tokens = {worker_id: rng.randrange(PROMPT_PAGES) * PAGE_SIZE for worker_id in views}

    def decide() -> object:
        prompt = (2, PROMPT_PAGES * PAGE_SIZE)
        request = RouteRequest(
            num_prompt_tokens=prompt[1],
            max_new_tokens=256,
            cached_tokens=cached_tokens,
            kv_bytes_per_token=topology.kv_bytes_per_token("m"),
        )
        usual, workers, now_s = topology.usual_speeds("m"), topology.workers("m"), topology.now_s()
        prefills = workers.prefill.views(usual, usual.prefill, prompt, now_s)
        decodes = workers.decode.views(usual, usual.local, prompt, now_s)
        return router.route(request, prefills, decodes, now_s=0.0)[0]

    best_s = min(_time_s(decide) for _ in range(rounds))
    await topology.close()
    return best_s


def _load(view: WorkerView) -> WorkerLoad:
    return WorkerLoad(
        pages_total=view.pages_total,
        pages_free=view.pages_available,
        running=view.num_running,
        waiting_tokens=view.waiting_tokens,
        context_tokens=view.context_tokens,
        prefill_speed=view.prefill_speed,
        decode_speed=view.decode_speed,
        link_speed=view.link_speed,
    )


def _record(view: WorkerView) -> WorkerRecord:
    """Returns the record of a worker without an address, so that nobody connects to it."""
    return WorkerRecord(
        id=view.worker_id,
        role="prefill" if view.worker_id.startswith("p") else "decode",
        pid=1,
        host="localhost",
        address="",
        incarnation=view.incarnation,
        started_unix_ns=0,
        state="starting",
        model="m",
        exact=True,
        page_size=PAGE_SIZE,
        layout_fingerprint="same",
        max_sequence_tokens=view.max_sequence_tokens,
        kv_bytes_per_token=128 * 1024,
    )


def health_s(num_workers: int) -> float:
    """Returns the seconds that a request costs: which workers may be asked, and two answers, at 1,000 requests/s."""
    health, group = WorkerHealth(), [f"w{number}" for number in range(num_workers)]
    rng, num_requests = random.Random(1), 2000
    best_s = 1e9
    for turn in range(3):
        began_s = time.perf_counter()
        for number in range(num_requests):
            now_s = turn * 10 + number / 1000
            health.out_of_rotation(group, now_s)
            worker_id = group[number % num_workers]
            health.begin(worker_id, now_s)
            health.note_load(worker_id, 1, 0.1, now_s)
            health.note_success(worker_id, rng.uniform(0.5, 1.5), now_s)
            health.note_success(worker_id, 1.0, now_s)
            health.note_load(worker_id, 0, 0.1, now_s)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s / num_requests


def _workers(rng: random.Random, role: str, number: int) -> list[WorkerView]:
    return [
        WorkerView(
            worker_id=f"{role}-{index}",
            incarnation=f"{index:032x}",
            pages_total=4096,
            pages_available=rng.randrange(4096),
            num_requests=rng.randrange(30),
            waiting_tokens=rng.choice((0, rng.randrange(20_000))),
            max_sequence_tokens=32_768,
            num_running=rng.randrange(30) if role == "d" else 0,
            context_tokens=rng.randrange(50_000) if role == "d" else 0,
            model="m",
            prefill_speed=PrefillSpeed(0.01, rng.uniform(0.5e-4, 2e-4), 1e-9),
            decode_speed=DecodeSpeed(0.01, rng.uniform(0.5e-4, 2e-4), 2e-8),
            link_speed=LinkSpeed(rng.uniform(0.001, 0.003), rng.uniform(0.8e9, 1.2e9)),
        )
        for index in range(number)
    ]


def _time_s(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
