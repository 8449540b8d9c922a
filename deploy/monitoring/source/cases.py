"""The series of promtool's tests: for each alert some on which it fires, and some that come near and must not.

What fires lies less than a quarter beyond the limit, and what does not less than a fifth within it; beside them stand
series that would be counted if a label were not asked for. `make test-alert-mutants` breaks each rule in each of these
ways and sees a test fail.
"""

from collections.abc import Mapping, Sequence

from deploy.monitoring.source import thresholds as limit
from deploy.monitoring.source.model import MINUTE, TEN_MINUTES, Case, RecordedCase, Series
from gateway.observability.metrics import SERVER_ERRORS

_ENDED = 'tandem_request_duration_seconds_count{outcome="finished"}'
_OTHER_TARGET = 'up{job="other",instance="o"}'
_LIFE = "tandem_tls_certificate_end_timestamp_seconds"
_DAY_S = 86400


def _refused(code: str) -> str:
    return f'tandem_refused_requests_total{{code="{code}"}}'


def _burn(factor: float, long_steps: int, *, at: int, step_minutes: int = TEN_MINUTES) -> Case:
    """Returns errors just above the budget's `factor`; and a burst, then errors just below it.

    After the burst first the short window alone is above, then the long one alone.
    """
    num_requests = 1_000_000
    limit_errors = factor * limit.ERROR_BUDGET * num_requests
    burst, after = int(0.46 * long_steps), int(0.28 * long_steps)
    length = long_steps + burst + after + 3
    beyond, below = 2 * limit_errors, 0.9 * limit_errors
    errors = f"0x{long_steps} 0+{beyond:.0f}x{burst} {beyond * burst + below:.0f}+{below:.0f}x{after}"
    every = {_refused(code): f"0+{1.1 * limit_errors / len(SERVER_ERRORS):.0f}x{length}" for code in SERVER_ERRORS}
    asked = {_ENDED: f"0+{num_requests}x{length}"}
    return Case(
        fires={**asked, **every},
        quiet={**asked, _refused("internal_error"): errors, _refused("invalid_request"): f"0+{num_requests}x{length}"},
        at=at,
        until=(length - 1) * step_minutes,
        step_minutes=step_minutes,
    )


def _times(metric: str, *, usual: str, slow: str, nearly: str) -> tuple[Case, ...]:
    """Returns cases in which 15 of 100 times lie between `usual` and `slow` s or, quiet, `nearly` s."""

    def buckets(service_class: str, last: str, first: int = 85) -> Series:
        of = f'{metric}_bucket{{model="m",service_class="{service_class}",le="%s"}}'
        return {of % usual: f"0+{first}x40", of % last: "0+100x40", of % "+Inf": "0+100x40"}

    return tuple(
        Case(
            fires=buckets(service_class, slow),
            quiet={**buckets(service_class, nearly), **buckets("batch", slow, first=0)},
            at=11,
            labels={"model": "m"},
        )
        for service_class in limit.FAST_CLASSES.split("|")
    )


def _requests(model: str, state: str, service_class: str = "normal") -> str:
    return f'tandem_requests{{model="{model}",service_class="{service_class}",state="{state}"}}'


def _prompts(hits: str, model: str = "m") -> Series:
    """Returns a gateway's figures, in which 100 tokens are asked for, and those of a worker, which do not count."""
    asked, found = "tandem_prefix_queried_tokens_total", "tandem_prefix_hit_tokens_total"
    return {
        f'{asked}{{model="{model}"}}': "0+100x160",
        f'{found}{{model="{model}"}}': hits,
        f'{asked}{{model="{model}",worker="p-0"}}': "0+1000x160",
        f'{found}{{model="{model}",worker="p-0"}}': "0+50x160",
    }


def _certificate(days: int) -> Case:
    return Case(
        fires={f'{_LIFE}{{instance="g"}}': f"{days * _DAY_S + 300}x40"},
        quiet={f'{_LIFE}{{instance="g"}}': f"{(days + 0.1) * _DAY_S:.0f}x40"},
        at=6,
        labels={"instance": "g"},
    )


def _workers(role: str, state: str) -> str:
    return f'tandem_workers{{role="{role}",state="{state}"}}'


def _pages(state: str, role: str = "decode") -> str:
    return f'tandem_kv_pages{{role="{role}",worker="{role}-0",state="{state}"}}'


def _info(role: str, worker: str, *, layout: str = "f", model: str = "m") -> str:
    facts = f'model="{model}",version="1",host="h",region="",layout="{layout}"'
    return f'tandem_worker_info{{role="{role}",worker="{worker}",{facts}}}'


def _computing(role: str, worker: str, seconds: int, *, model: str = "m") -> Series:
    """Returns the series of a worker that computes in `seconds` of each minute."""
    return {
        _info(role, worker, model=model): "1x60",
        f'tandem_step_seconds_sum{{worker="{worker}"}}': f"0+{seconds}x60",
    }


def _held_back(work: str = "urgent", gateway: str = "g") -> str:
    where = 'model="m",role="prefill",resource="compute"'
    return f'tandem_bottleneck{{{where},work="{work}",instance="{gateway}"}}'


def _gpu(state: str) -> str:
    return f'tandem_worker_gpu{{role="decode",worker="d-0",state="{state}"}}'


_TEMPERATURE = 'tandem_worker_gpu_temperature_celsius{role="decode",worker="d-0"}'
_OF_WORKER = {"role": "decode", "worker": "d-0"}
_PAGES_USED = {
    _pages("used"): "47x40",
    _pages("reserved"): "47x40",
    _pages("free"): "3x40",
    _pages("cached"): "3x40",
}

CASES: Mapping[str, Sequence[Case]] = {
    "TandemErrorBudgetBurn1h": (_burn(14.4, 60, at=3, step_minutes=MINUTE),),
    "TandemErrorBudgetBurn6h": (_burn(6, 36, at=30),),
    "TandemErrorBudgetBurn1d": (_burn(3, 144, at=70),),
    "TandemErrorBudgetBurn3d": (_burn(1, 432, at=190),),
    "TandemTimeToFirstTokenHigh": _times("tandem_time_to_first_token_seconds", usual="1", slow="2.5", nearly="1.9"),
    "TandemInterTokenLatencyHigh": _times(
        "tandem_inter_token_latency_seconds", usual="0.1", slow="0.25", nearly="0.19"
    ),
    "TandemQueueLong": (
        Case(
            fires={
                _requests("m", "queued"): "12x40",
                _requests("m", "queued", "low"): "12x40",
                _requests("m", "running"): "23x40",
            },
            quiet={
                _requests("m", "queued"): "24x40",
                _requests("m", "running"): "24x40",
                _requests("n", "queued"): "18x40",
                _requests("n", "running"): "3x40",
            },
            at=5,
            labels={"model": "m"},
        ),
    ),
    "TandemOverloaded": (
        Case(
            fires={_ENDED: "0+1000x40", 'tandem_overload_refusals_total{reason="queue"}': "0+55x40"},
            quiet={_ENDED: "0+1000x40", 'tandem_overload_refusals_total{reason="queue"}': "0+45x40"},
            at=6,
            labels={"reason": "queue"},
        ),
    ),
    "TandemCacheHitsCollapsed": (
        Case(
            fires=_prompts("0+11x144 1589+5x15"),
            quiet={**_prompts("0+16x144 2313+9x15"), **_prompts("0+9x144 1299+3x15", model="n")},
            at=1500,
            until=1590,
            step_minutes=TEN_MINUTES,
            labels={"model": "m"},
        ),
    ),
    "TandemRequestQuarantined": (
        Case(
            fires={"tandem_quarantined_requests_total": "0x20 1x20"},
            quiet={"tandem_quarantined_requests_total": "1x40"},
            at=21,
        ),
    ),
    "TandemFallbacks": (
        Case(
            fires={'tandem_fallbacks_total{asked="a",answering="b",reason="overloaded"}': "0+1x40"},
            quiet={'tandem_fallbacks_total{asked="a",answering="b",reason="overloaded"}': "7x40"},
            at=16,
            labels={"asked": "a", "answering": "b"},
        ),
    ),
    "TandemNoGateway": (
        Case(
            fires={'tandem_build_info{program="decode-worker"}': "1x40"},
            quiet={'tandem_build_info{program="gateway"}': "1x40"},
            at=1,
        ),
    ),
    "TandemGatewayDown": (
        Case(
            fires={'up{job="tandem-gateway",instance="g"}': "0x40"},
            quiet={'up{job="tandem-gateway",instance="g"}': "1x40", _OTHER_TARGET: "0x40"},
            at=2,
            labels={"instance": "g"},
        ),
    ),
    "TandemGatewaysFewer": (
        Case(
            fires={
                'tandem_build_info{program="gateway",instance="a"}': "1x40",
                'tandem_build_info{program="gateway",instance="b"}': "1x20 stale",
            },
            quiet={
                'tandem_build_info{program="gateway",instance="a"}': "1x40",
                'tandem_build_info{program="decode-worker",instance="b"}': "1x20 stale",
            },
            at=26,
        ),
    ),
    "TandemGatewayBusy": (
        Case(
            fires={'tandem_event_loop_busy_ratio{instance="g"}': "1x40"},
            quiet={'tandem_event_loop_busy_ratio{instance="g"}': "0.8x40"},
            at=10,
            labels={"instance": "g"},
        ),
    ),
    "TandemFileDescriptorsNearlyGone": (
        Case(
            fires={
                'process_open_fds{job="tandem-gateway",instance="g"}': "900x40",
                'process_max_fds{job="tandem-gateway",instance="g"}': "1000x40",
            },
            quiet={
                'process_open_fds{job="tandem-gateway",instance="g"}': "800x40",
                'process_max_fds{job="tandem-gateway",instance="g"}': "1000x40",
                'process_open_fds{job="other",instance="o"}': "990x40",
                'process_max_fds{job="other",instance="o"}': "1000x40",
            },
            at=5,
            labels={"instance": "g"},
        ),
    ),
    "TandemNoDecodeWorkerReady": (
        Case(
            fires={_workers("decode", "ready"): "2x10 0x30", _workers("decode", "draining"): "1x40"},
            quiet={_workers("decode", "ready"): "1x40", _workers("prefill", "ready"): "0x40"},
            at=12,
            labels={"role": "decode"},
        ),
    ),
    "TandemNoPrefillWorkerReady": (
        Case(
            fires={_workers("prefill", "ready"): "1x10 0x30"},
            quiet={_workers("prefill", "ready"): "0x40"},
            at=12,
            labels={"role": "prefill"},
        ),
        Case(
            fires={_workers("prefill", "ready"): "0x40", 'tandem_expected_workers{role="prefill"}': "1x40"},
            quiet={
                _workers("prefill", "ready"): "1x40",
                'tandem_expected_workers{role="prefill"}': "2x40",
                _workers("decode", "ready"): "0x40",
                'tandem_expected_workers{role="decode"}': "1x40",
            },
            at=1,
        ),
    ),
    "TandemWorkersMissing": (
        Case(
            fires={_workers("decode", "ready"): "3x40", 'tandem_expected_workers{role="decode"}': "4x40"},
            quiet={_workers("decode", "ready"): "4x40", 'tandem_expected_workers{role="decode"}': "4x40"},
            at=10,
            labels={"role": "decode"},
        ),
    ),
    "TandemWorkersFlapping": (
        Case(
            fires={'tandem_vanished_workers_total{role="decode"}': "0x35 3x20"},
            quiet={'tandem_vanished_workers_total{role="decode"}': "0x35 2x20"},
            at=36,
            until=50,
            labels={"role": "decode"},
        ),
    ),
    "TandemWorkerFenced": tuple(
        Case(
            fires={f'tandem_worker_circuit{{role="decode",worker="d-0",state="{state}"}}': "1x40"},
            quiet={
                f'tandem_worker_circuit{{role="decode",worker="d-0",state="{state}"}}': "0x40",
                'tandem_worker_circuit{role="decode",worker="d-0",state="closed"}': "1x40",
            },
            at=3,
            labels=_OF_WORKER,
        )
        for state in ("open", "half_open", "suspected")
    ),
    "TandemCircuitsFlapping": (
        Case(
            fires={'tandem_circuit_openings{cause="slow"}': "0x35 6x20"},
            quiet={'tandem_circuit_openings{cause="slow"}': "0x35 5x20"},
            at=36,
            until=50,
            labels={"cause": "slow"},
        ),
    ),
    "TandemWorkerUnscraped": (
        Case(
            fires={'up{job="tandem-workers",instance="w"}': "0x40"},
            quiet={'up{job="tandem-workers",instance="w"}': "1x40", _OTHER_TARGET: "0x40"},
            at=5,
            labels={"instance": "w"},
        ),
    ),
    "TandemKvNearlyFull": (
        Case(
            fires={
                _info("decode", "decode-0"): "1x40",
                _pages("used"): "49x40",
                _pages("reserved"): "49x40",
                _pages("free"): "1x40",
                _pages("cached"): "1x40",
            },
            quiet={
                _info("decode", "decode-0"): "1x40",
                **_PAGES_USED,
                _info("prefill", "prefill-0"): "1x40",
                _pages("used", "prefill"): "99x40",
                _pages("free", "prefill"): "1x40",
            },
            at=5,
            labels={"role": "decode", "model": "m"},
        ),
    ),
    "TandemWorkersSaturated": (
        Case(
            fires=_computing("decode", "d-0", 57),
            # What is counted of a worker is its one engine: the first of them computes no more than all the time.
            quiet={**_computing("decode", "d-0", 75), **_computing("decode", "d-1", 36)},
            at=35,
            until=50,
            labels={"role": "decode", "model": "m"},
        ),
    ),
    "TandemHeldBack": (
        Case(
            fires={_held_back(): "1x5 _x40", _held_back(gateway="h"): "_x5 1x40"},
            quiet={_held_back("batch"): "1x40", _held_back(): "1x8 0x40"},
            at=10,
            labels={"model": "m", "role": "prefill", "resource": "compute"},
        ),
    ),
    "TandemLayoutMismatch": (
        Case(
            fires={
                _info("prefill", "p-0", layout="a"): "1x40",
                _info("decode", "d-0", layout="b"): "1x40",
            },
            quiet={_info("prefill", "p-0"): "1x40", _info("decode", "d-0"): "1x40"},
            at=5,
            labels={"model": "m"},
        ),
        Case(
            fires={'tandem_retries_total{reason="layout_mismatch"}': "0x20 1x20"},
            quiet={
                'tandem_retries_total{reason="layout_mismatch"}': "4x40",
                'tandem_retries_total{reason="transfer_failed"}': "0+1x40",
            },
            at=26,
            labels={"reason": "layout_mismatch"},
        ),
    ),
    "TandemGpuInTrouble": (
        *(
            Case(
                fires={_gpu(state): "1x40"},
                quiet={_gpu(state): "0x40", _gpu("ok"): "1x40"},
                at=3,
                labels=_OF_WORKER,
            )
            for state in ("degraded", "out")
        ),
        Case(fires={_TEMPERATURE: "95x40"}, quiet={_TEMPERATURE: "80x40"}, at=3, labels=_OF_WORKER),
    ),
    "TandemHandoffsFailing": (
        Case(
            fires={
                'tandem_retries_total{reason="transfer_failed"}': "0+11x40",
                'tandem_sent_attempts_total{role="prefill",worker="p-0"}': "0+1000x40",
                'tandem_sent_attempts_total{role="decode",worker="d-0"}': "0+1000x40",
            },
            quiet={
                'tandem_retries_total{reason="transfer_failed"}': "0+9x40",
                'tandem_retries_total{reason="worker_lost"}': "0+9x40",
                'tandem_sent_attempts_total{role="prefill",worker="p-0"}': "0+1000x40",
            },
            at=6,
        ),
    ),
    "TandemAnswersComputedAgain": (
        Case(
            fires={
                'tandem_failovers_total{model="m"}': "0+55x40",
                'tandem_request_generated_tokens_count{model="m"}': "0+1000x40",
            },
            quiet={
                'tandem_failovers_total{model="m"}': "0+45x40",
                'tandem_request_generated_tokens_count{model="m"}': "0+1000x40",
            },
            at=11,
            labels={"model": "m"},
        ),
    ),
    "TandemRetriesDelayed": (
        Case(
            fires={'tandem_delayed_retries_total{instance="g"}': "0x20 11x20"},
            quiet={'tandem_delayed_retries_total{instance="g"}': "0x20 10x20"},
            at=21,
            labels={"instance": "g"},
        ),
    ),
    "TandemRedisAway": (
        Case(
            fires={'tandem_redis_up{instance="a"}': "1x10 0x30", 'tandem_redis_up{instance="b"}': "1x40"},
            quiet={'tandem_redis_up{instance="a"}': "1x40"},
            at=12,
        ),
    ),
    "TandemRedisSlow": (
        Case(
            fires={'tandem_redis_round_trip_seconds{instance="g"}': "0.06x40"},
            quiet={'tandem_redis_round_trip_seconds{instance="g"}': "0.045x40"},
            at=5,
            labels={"instance": "g"},
        ),
    ),
    "TandemRedisMemoryShort": (
        Case(
            fires={
                'tandem_redis_memory_bytes{kind="used"}': "0.95x40",
                'tandem_redis_memory_limit_bytes{kind="used"}': "1x40",
            },
            quiet={
                'tandem_redis_memory_bytes{kind="used"}': "95x40",
                'tandem_redis_memory_limit_bytes{kind="used"}': "0x40",
                'tandem_redis_memory_bytes{kind="files"}': "80x40",
                'tandem_redis_memory_limit_bytes{kind="files"}': "100x40",
                "tandem_redis_evicted_keys": "0x40",
            },
            at=5,
            labels={"kind": "used"},
        ),
        Case(
            fires={"tandem_redis_evicted_keys": "1x40"},
            quiet={"tandem_redis_evicted_keys": "0x40"},
            at=5,
        ),
    ),
    "TandemCertificateEndsSoon": (_certificate(limit.CERTIFICATE_WARNING_DAYS),),
    "TandemCertificateEndsNow": (_certificate(limit.CERTIFICATE_CRITICAL_DAYS),),
    "TandemKeyFileBroken": (
        Case(
            fires={'tandem_troubles{kind="api_keys"}': "1x40"},
            quiet={'tandem_troubles{kind="api_keys"}': "0x40", 'tandem_troubles{kind="redis"}': "1x40"},
            at=1,
        ),
    ),
    "TandemTrouble": tuple(
        Case(
            fires={f'tandem_troubles{{kind="{kind}"}}': "1x40"},
            quiet={f'tandem_troubles{{kind="{kind}"}}': "0x40", 'tandem_troubles{kind="redis"}': "1x40"},
            at=5,
            labels={"kind": kind},
        )
        for kind in (
            "background_task",
            "clock",
            "flapping",
            "kernels",
            "left_out",
            "link",
            "log",
            "unreachable",
            "storage",
        )
    ),
    "TandemSpansDropped": (
        Case(
            fires={'tandem_spans_dropped_total{instance="g"}': "0+9x40"},
            quiet={'tandem_spans_dropped_total{instance="g"}': "9x40"},
            at=16,
            labels={"instance": "g"},
        ),
    ),
    "TandemVersionsDiffer": (
        Case(
            fires={
                'tandem_build_info{program="gateway",version="1"}': "1x200",
                'tandem_build_info{program="gateway",version="2"}': "1x200",
            },
            quiet={'tandem_build_info{program="gateway",version="1"}': "1x200"},
            at=120,
            until=180,
        ),
    ),
}

RECORDED: Mapping[str, RecordedCase] = {
    "tandem:worker_info": RecordedCase(
        {_info("decode", "d-0"): "1x10", _info("decode", "d-0").replace("role=", 'instance="g",role='): "1x10"},
        {'{role="decode",worker="d-0",model="m",layout="f",version="1",host="h"}': 1},
    ),
    # A worker's own page has no role, and a state more.
    "tandem:kv_use:ratio": RecordedCase(
        {**_PAGES_USED, 'tandem_kv_pages{worker="decode-0",state="used"}': "5x10"},
        {'{role="decode",worker="decode-0"}': 0.94},
    ),
}
"""Series of which labels or values matter to people alone, and what is recorded of them."""
