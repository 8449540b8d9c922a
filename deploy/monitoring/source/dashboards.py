"""The dashboards: the cluster, a model, a worker, a tenant, and money."""

from deploy.monitoring.source import thresholds as limit
from deploy.monitoring.source.panels import Panel, choice, dashboard, number
from deploy.monitoring.source.recording import OF_GATEWAY, errors, quantile

_RATE = "$__rate_interval"
_TWO_SIDES = ((limit.UTILISATION_LOW, "green"), (limit.UTILISATION_HIGH, "red"))
_NO_GPU = "no worker has a GPU that can be asked."
_NOTHING_YET = "nothing of the kind has happened."


def _per_s(by: str, metric: str, select: str = "", how: str = "sum") -> str:
    """Returns the expression of a counter's rate by labels; `how`: `max` for what every gateway says."""
    return f"{how} by ({by}) (rate({metric}{{{select}}}[{_RATE}]))"


def _times(name: str, about: str, metric: str, *, high: float, by: str = "", select: str = "") -> Panel:
    """Returns a panel of p50, p90 and p99 of a histogram."""
    labels = f"{by}, le" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return Panel(
        title=name,
        about=about,
        unit="s",
        steps=((high, "red"),),
        has_exemplars=True,
        queries={
            f"{legend}p{share * 100:g}": f"histogram_quantile({share}, "
            f"sum by ({labels}) (rate({metric}_bucket{{{select}}}[{_RATE}])))"
            for share in (0.5, 0.9, 0.99)
        },
    )


def _below(high: float, full: float) -> tuple[tuple[float, str], ...]:
    return ((high, "orange"), (full, "red"))


_UTILISATION = Panel(
    title="Utilisation",
    about="Share of the time in which engines compute. Between the lines, workers are neither idle nor make queues.",
    unit="percentunit",
    steps=_TWO_SIDES,
    queries={"{{role}} {{model}}": "avg by (role, model) (tandem:worker_utilisation:ratio)"},
)
_KV_USE = Panel(
    title="KV pages in use",
    about="Share of KV pages that running answers hold or have reserved; cached pages count as free.",
    unit="percentunit",
    steps=_below(limit.KV_USE_HIGH, limit.KV_USE_FULL),
    queries={"{{role}} {{worker}}": "tandem:kv_use:ratio"},
)

_CLUSTER = dashboard(
    "tandem-cluster",
    "Tandem: cluster",
    "Whether the cluster does its work, and what is short if not.",
    (
        Panel(
            title="Requests",
            about="Ended requests a second by outcome.",
            unit="reqps",
            queries={"{{outcome}}": _per_s("outcome", "tandem_request_duration_seconds_count")},
        ),
        Panel(
            title="Errors of the server",
            about="Share of requests that ended with an error of the server. The line is the error budget.",
            unit="percentunit",
            steps=((limit.ERROR_BUDGET, "red"),),
            queries={"5 minutes": errors("5m"), "1 hour": errors("1h")},
        ),
        Panel(
            title="Refusals by code",
            about="Requests answered with an error, a second.",
            unit="reqps",
            queries={"{{code}}": f"sum by (code) (rate(tandem_refused_requests_total[{_RATE}])) > 0"},
            may_be_empty=_NOTHING_YET,
        ),
        _times(
            "Time to first token",
            "From arrival to the first token.",
            "tandem_time_to_first_token_seconds",
            high=limit.TTFT_P99_S,
        ),
        _times(
            "Time of a token",
            "Each token after the first.",
            "tandem_inter_token_latency_seconds",
            high=limit.ITL_P99_S,
        ),
        _times(
            "Duration",
            "Requests that finished.",
            "tandem_request_duration_seconds",
            high=limit.DURATION_P99_S,
            select='outcome="finished"',
        ),
        Panel(
            title="Queue",
            about="Answers that wait for workers, and that run.",
            steps=((limit.QUEUED_REQUESTS, "red"),),
            queries={"{{model}} {{state}}": "tandem:requests"},
        ),
        Panel(
            title="Refused for want of room",
            about="A second, by what is short.",
            unit="reqps",
            steps=((0.1, "orange"),),
            queries={"{{reason}}": _per_s("reason", "tandem_overload_refusals_total")},
        ),
        Panel(
            title="Workers",
            about="By role and state.",
            queries={"{{role}} {{state}}": "max by (role, state) (tandem_workers) > 0"},
        ),
        _UTILISATION,
        _KV_USE,
        Panel(
            title="Tokens generated",
            about="A second, by model.",
            queries={"{{model}}": "tandem:generated_tokens:rate5m"},
        ),
        Panel(
            title="Prompt tokens found in a cache",
            about="Share over 30 minutes. Below the line a cache does not pay.",
            unit="percentunit",
            kind="floor",
            steps=((limit.CACHE_HITS_LOW, "green"),),
            queries={"{{model}}": "tandem:cache_hits:ratio_rate30m"},
        ),
        Panel(
            title="Failed attempts and retries",
            about="A second, by reason.",
            queries={"{{reason}}": _per_s("reason", "tandem_retries_total")},
        ),
        Panel(
            title="Handoffs",
            about="Time of a handoff that computing did not hide, and payload by transport.",
            unit="s",
            queries={"p99 {{model}}": quantile(0.99, "tandem_handoff_exposed_seconds", window=_RATE)},
        ),
        Panel(
            title="Handoff payload",
            about="Bytes a second by transport.",
            unit="Bps",
            queries={"{{transport}}": _per_s("transport", "tandem_handoff_bytes_total")},
        ),
        Panel(
            title="Gateways' event loops",
            about="Share of the time in which a gateway's one thread works.",
            unit="percentunit",
            steps=((limit.EVENT_LOOP_BUSY, "red"),),
            queries={"{{instance}}": "tandem_event_loop_busy_ratio"},
        ),
        Panel(
            title="Redis",
            about="Mean time of a call.",
            unit="s",
            steps=((limit.REDIS_ROUND_TRIP_S, "red"),),
            queries={"{{instance}}": "tandem_redis_round_trip_seconds"},
        ),
        Panel(
            title="Troubles",
            about="What the gateways know of; `tandem doctor` has causes and remedies.",
            steps=((1, "red"),),
            queries={"{{kind}}": "max by (kind) (tandem_troubles)"},
        ),
        Panel(
            title="Memory of processes",
            about="Resident memory.",
            unit="bytes",
            queries={"{{instance}}": 'process_resident_memory_bytes{job=~".*tandem-.*"}'},
        ),
        Panel(
            title="Versions",
            about="Processes by program and version.",
            queries={"{{program}} {{version}}": "count by (program, version) (tandem_build_info)"},
        ),
    ),
)

_OF_MODEL = 'model=~"$model"'
_MODEL = dashboard(
    "tandem-model",
    "Tandem: model",
    "What people who use a model meet.",
    (
        _times(
            "Time to first token",
            "From arrival to the first token.",
            "tandem_time_to_first_token_seconds",
            high=limit.TTFT_P99_S,
            by="service_class",
            select=_OF_MODEL,
        ),
        _times(
            "Time of a token",
            "Each token after the first.",
            "tandem_inter_token_latency_seconds",
            high=limit.ITL_P99_S,
            by="service_class",
            select=_OF_MODEL,
        ),
        Panel(
            title="Where the time goes",
            about="Mean seconds of a request by phase.",
            unit="s",
            queries={
                "{{phase}}": _per_s("phase", "tandem_request_phase_seconds_sum", _OF_MODEL)
                + f" / sum by (phase) (rate(tandem_request_phase_seconds_count{{{_OF_MODEL}}}[{_RATE}]))"
            },
        ),
        Panel(
            title="Requests by outcome",
            about="A second.",
            unit="reqps",
            queries={"{{outcome}}": _per_s("outcome", "tandem_request_duration_seconds_count", _OF_MODEL)},
        ),
        Panel(
            title="Answers now",
            about="Waiting and running, by service class.",
            steps=((limit.QUEUED_REQUESTS, "red"),),
            queries={
                "{{service_class}} {{state}}": f"sum by (service_class, state) (tandem_requests{{{_OF_MODEL}}}) > 0"
            },
            may_be_empty="no request waits or runs at this moment.",
        ),
        Panel(
            title="Tokens",
            about="Prompt and generated tokens a second.",
            queries={
                "generated {{model}}": _per_s("model", "tandem_generated_tokens_total", _OF_MODEL),
                "prompt {{model}}": _per_s("model", "tandem_prompt_tokens_total", _OF_MODEL),
            },
        ),
        Panel(
            title="Lengths",
            about="Median and p95 of prompts and answers, in tokens.",
            queries={
                f"{what} p{share * 100:g}": f"histogram_quantile({share}, sum by (le) "
                f"(rate(tandem_request_{what}_tokens_bucket{{{_OF_MODEL}}}[{_RATE}])))"
                for what in ("prompt", "generated")
                for share in (0.5, 0.95)
            },
        ),
        Panel(
            title="Prompt tokens found in a cache",
            about="Share over 30 minutes.",
            unit="percentunit",
            kind="floor",
            steps=((limit.CACHE_HITS_LOW, "green"),),
            queries={"{{model}}": f"tandem:cache_hits:ratio_rate30m{{{_OF_MODEL}}}"},
        ),
        Panel(
            title="Predictions",
            about="Median of measured over predicted time: 1 is right, more is later.",
            steps=((1.5, "orange"),),
            queries={
                "{{token}}": f"histogram_quantile(0.5, sum by (token, le) "
                f"(rate(tandem_token_prediction_ratio_bucket{{{_OF_MODEL}}}[{_RATE}])))"
            },
        ),
        Panel(
            title="Utilisation of its workers",
            about=_UTILISATION.about,
            unit="percentunit",
            steps=_TWO_SIDES,
            queries={"{{role}}": f"avg by (role) (tandem:worker_utilisation:ratio{{{_OF_MODEL}}})"},
        ),
        Panel(
            title="Answers continued elsewhere",
            about="A second.",
            queries={"{{model}}": _per_s("model", "tandem_failovers_total", _OF_MODEL)},
        ),
        Panel(
            title="Ends of answers",
            about="A second, by reason.",
            queries={"{{finish_reason}}": _per_s("finish_reason", "tandem_answers_total", _OF_MODEL)},
        ),
    ),
    (choice("model", "label_values(tandem_requests, model)", label="Model"),),
)

_OF_WORKER = 'worker=~"$worker"'
_OPEN = f'{_OF_WORKER},state!="closed"'
_ACCEPTED, _PROPOSED = (f"tandem_worker_speculative_{what}_tokens_total" for what in ("accepted", "proposed"))
_WORKER = dashboard(
    "tandem-worker",
    "Tandem: worker",
    "What single workers do; the panels of steps and transfers need the workers' own /metrics.",
    (
        Panel(
            title="Utilisation",
            about=_UTILISATION.about,
            unit="percentunit",
            steps=_TWO_SIDES,
            queries={"{{worker}}": f"tandem:worker_utilisation:ratio{{{_OF_WORKER}}}"},
        ),
        Panel(
            title="KV pages in use",
            about=_KV_USE.about,
            unit="percentunit",
            steps=_below(limit.KV_USE_HIGH, limit.KV_USE_FULL),
            queries={"{{worker}}": f"tandem:kv_use:ratio{{{_OF_WORKER}}}"},
        ),
        Panel(
            title="Sequences",
            about="Running and waiting.",
            queries={
                "{{worker}} {{state}}": f"max by (worker, state) (tandem_worker_sequences{{{_OF_WORKER}}})",
            },
        ),
        Panel(
            title="Step time",
            about="p50 and p99 of an engine step.",
            unit="s",
            queries={
                f"{{{{worker}}}} p{share * 100:g}": f"histogram_quantile({share}, sum by (worker, le) "
                f"(rate(tandem_step_seconds_bucket{{{_OF_WORKER}}}[{_RATE}])))"
                for share in (0.5, 0.99)
            },
        ),
        Panel(
            title="Batch",
            about="Mean number of sequences in a step.",
            queries={
                "{{worker}}": _per_s("worker", "tandem_step_sequences_sum", _OF_WORKER)
                + f" / sum by (worker) (rate(tandem_step_sequences_count{{{_OF_WORKER}}}[{_RATE}]))"
            },
        ),
        Panel(
            title="Tokens computed",
            about="A second.",
            queries={"{{worker}}": _per_s("worker", "tandem_computed_tokens_total", _OF_WORKER)},
        ),
        Panel(
            title="Attempts by end",
            about="A second.",
            queries={"{{worker}} {{outcome}}": _per_s("worker, outcome", "tandem_attempts_total", _OF_WORKER)},
        ),
        Panel(
            title="Handoffs sent",
            about="Bytes a second that other workers committed.",
            unit="Bps",
            queries={"{{worker}}": _per_s("worker", "tandem_transferred_bytes_total", _OF_WORKER)},
        ),
        Panel(
            title="Faults of handoffs",
            about="A second, by reason.",
            queries={"{{worker}} {{reason}}": _per_s("worker, reason", "tandem_transfer_faults_total", _OF_WORKER)},
            may_be_empty="a reason appears with its first fault.",
        ),
        Panel(
            title="Preemptions",
            about="Sequences a second that others displaced.",
            queries={
                "{{worker}} {{reason}}": _per_s("worker, reason", "tandem_worker_preemptions_total", _OF_WORKER, "max")
            },
            may_be_empty=_NOTHING_YET,
        ),
        Panel(
            title="Proposed tokens that were right",
            about="Share of speculative tokens that the model chose.",
            unit="percentunit",
            queries={
                "{{worker}} {{source}}": _per_s("worker, source", _ACCEPTED, _OF_WORKER, "max")
                + " / "
                + _per_s("worker, source", _PROPOSED, _OF_WORKER, "max")
            },
            may_be_empty="no worker speculates, or none has proposed a token.",
        ),
        Panel(
            title="Circuit",
            about="1 while a worker is kept from work, or should be.",
            steps=((1, "red"),),
            queries={"{{worker}} {{state}}": f"max by (worker, state) (tandem_worker_circuit{{{_OPEN}}})"},
        ),
        Panel(
            title="GPU: busy",
            about="Share of the time, or of what it could do, by part.",
            unit="percentunit",
            queries={"{{worker}} {{part}}": f"tandem_gpu_busy_ratio{{{_OF_WORKER}}}"},
            may_be_empty=_NO_GPU,
        ),
        Panel(
            title="GPU: temperature",
            about="Of its chip.",
            unit="celsius",
            steps=((limit.GPU_TEMPERATURE_C, "red"),),
            queries={
                "{{worker}}": f"max by (worker) (tandem_worker_gpu_temperature_celsius{{{_OF_WORKER}}})",
            },
            may_be_empty=_NO_GPU,
        ),
        Panel(
            title="GPU: power",
            about="Watts now.",
            unit="watt",
            queries={"{{worker}}": f"tandem_gpu_power_watts{{{_OF_WORKER}}}"},
            may_be_empty=_NO_GPU,
        ),
        Panel(
            title="Host tier",
            about="Cached pages in the memory of the host.",
            queries={"{{worker}} {{state}}": f"max by (worker, state) (tandem_worker_host_tier_pages{{{_OF_WORKER}}})"},
            may_be_empty="no worker has a host tier.",
        ),
        Panel(
            title="Processor time",
            about="Cores in use by the process.",
            queries={
                "{{instance}}": f"rate(process_cpu_seconds_total[{_RATE}])"
                f" * on (instance) group_left (worker) max by (instance, worker) "
                f"(tandem_running_sequences{{{_OF_WORKER}}} * 0 + 1)"
            },
        ),
    ),
    (choice("worker", "label_values(tandem_worker_info, worker)", label="Worker"),),
)

_NO_KEYS = "there is no file of API keys, so no tenant is known."
_OF_TENANT = 'tenant=~"$tenant"'
_TENANT = dashboard(
    "tandem-tenant",
    "Tandem: tenant",
    "Who uses the cluster: the first 100 tenants that the file of keys names; others are (other).",
    (
        Panel(
            title="Requests",
            about="Ended requests a second by outcome.",
            unit="reqps",
            queries={"{{tenant}} {{outcome}}": _per_s("tenant, outcome", "tandem_tenant_requests_total", _OF_TENANT)},
            may_be_empty=_NO_KEYS,
        ),
        Panel(
            title="Tokens",
            about="A second, by kind.",
            queries={"{{tenant}} {{kind}}": _per_s("tenant, kind", "tandem_tenant_tokens_total", _OF_TENANT)},
            may_be_empty=_NO_KEYS,
        ),
        Panel(
            title="Share of the tokens",
            about="Of all tokens of all tenants.",
            unit="percentunit",
            queries={
                "{{tenant}}": _per_s("tenant", "tandem_tenant_tokens_total", _OF_TENANT)
                + f" / scalar(sum(rate(tandem_tenant_tokens_total[{_RATE}])))"
            },
            may_be_empty=_NO_KEYS,
        ),
        Panel(
            title="Share of failed requests",
            about="Requests of a tenant that failed.",
            unit="percentunit",
            steps=((limit.ERROR_BUDGET, "red"),),
            queries={
                "{{tenant}}": _per_s("tenant", "tandem_tenant_requests_total", f'{_OF_TENANT},outcome="failed"')
                + f" / sum by (tenant) (rate(tandem_tenant_requests_total{{{_OF_TENANT}}}[{_RATE}]))"
            },
            may_be_empty="no request of a tenant has failed.",
        ),
        Panel(
            title="Refused for a limit",
            about="Requests of all tenants a second, by the limit that was reached.",
            unit="reqps",
            queries={"{{limit}}": _per_s("limit", "tandem_tenant_refusals_total")},
            may_be_empty=_NOTHING_YET,
        ),
        Panel(
            title="Memory of Redis",
            about="Files with batches, and journals of named requests.",
            unit="bytes",
            queries={"{{kind}}": "max by (kind) (tandem_redis_memory_bytes)"},
        ),
    ),
    (choice("tenant", "label_values(tandem_tenant_requests_total, tenant)", label="Tenant"),),
)

_DEVICES = "sum(max by (role, worker) (tandem_worker_devices))"
_PER_HOUR = f"$gpu_price * {_DEVICES}"
_PER_MILLION = f"({_PER_HOUR}) / 3600 * 1e6 / "
_MONEY = dashboard(
    "tandem-money",
    "Tandem: money",
    "What tokens cost, from the price of a GPU for an hour, typed in above. Idle GPUs cost as much as busy ones.",
    (
        Panel(
            title="Cost of an hour",
            about="The price times the devices of all workers.",
            unit="currencyUSD",
            queries={"all workers": _PER_HOUR},
        ),
        Panel(
            title="Cost per million generated tokens",
            about="All cost, for generated tokens alone.",
            unit="currencyUSD",
            queries={
                "1 hour": f"{_PER_MILLION}(sum(rate(tandem_generated_tokens_total[1h])) > 0)",
                "now": f"{_PER_MILLION}(sum(rate(tandem_generated_tokens_total[{_RATE}])) > 0)",
            },
        ),
        Panel(
            title="Cost per million tokens",
            about="All cost, for prompt and generated tokens together.",
            unit="currencyUSD",
            queries={
                "1 hour": f"{_PER_MILLION}(sum(rate(tandem_generated_tokens_total[1h]))"
                " + sum(rate(tandem_prompt_tokens_total[1h])) > 0)"
            },
        ),
        Panel(
            title="Cost by role",
            about="An hour of the workers of each role.",
            unit="currencyUSD",
            queries={"{{role}}": "$gpu_price * sum by (role) (max by (role, worker) (tandem_worker_devices))"},
        ),
        Panel(
            title="Paid and idle",
            about="Cost of an hour in which devices did not compute.",
            unit="currencyUSD",
            queries={
                "{{role}}": "$gpu_price * sum by (role) ((1 - tandem:worker_utilisation:ratio)"
                " * on (role, worker) max by (role, worker) (tandem_worker_devices))"
            },
        ),
        Panel(
            title="Saved by caches",
            about="Prompt tokens an hour that were not computed.",
            queries={
                "{{model}}": f"3600 * sum by (model) (rate(tandem_prefix_hit_tokens_total{{{OF_GATEWAY}}}[{_RATE}]))"
            },
        ),
        Panel(
            title="Cost of an hour by tenant",
            about="All cost, shared by tokens.",
            unit="currencyUSD",
            queries={
                "{{tenant}}": _per_s("tenant", "tandem_tenant_tokens_total")
                + f" / scalar(sum(rate(tandem_tenant_tokens_total[{_RATE}]))) * scalar({_PER_HOUR})"
            },
            may_be_empty=_NO_KEYS,
        ),
        Panel(
            title="Energy of a token",
            about="Joules for each generated token.",
            unit="joule",
            queries={
                "all workers": f"sum(rate(tandem_gpu_energy_joules_total[{_RATE}]))"
                f" / (sum(rate(tandem_generated_tokens_total[{_RATE}])) > 0)"
            },
            may_be_empty=_NO_GPU,
        ),
    ),
    (number("gpu_price", "2.50", label="Price of a GPU for an hour"),),
)

DASHBOARDS = (_CLUSTER, _MODEL, _WORKER, _TENANT, _MONEY)
