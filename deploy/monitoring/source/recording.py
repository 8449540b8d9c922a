"""Recorded series: what several alerts and panels ask for, computed once."""

from collections.abc import Mapping

from deploy.monitoring.source.thresholds import FAST_CLASSES
from gateway.observability.metrics import SERVER_ERRORS

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
"""The windows of the burn rates of the error budget."""
OF_GATEWAY = 'worker=""'
"""Selects a gateway's series of a name that workers have too."""


def errors(window: str) -> str:
    """Returns the name of the share of requests that ended with an error of the server, over a window."""
    return f"tandem:request_errors:ratio_rate{window}"


def quantile(share: float, metric: str, *, by: str = "model", select: str = "", window: str = "5m") -> str:
    """Returns the expression of a histogram's quantile over a window."""
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({metric}_bucket{{{select}}}[{window}])))"


def recorded() -> Mapping[str, str]:
    """Returns each recorded series' expression, in the order in which they are evaluated."""
    people = f'service_class=~"{FAST_CLASSES}"'
    return {
        **{
            errors(window): f'sum(rate(tandem_refused_requests_total{{code=~"{"|".join(SERVER_ERRORS)}"}}[{window}]))'
            f" / sum(rate(tandem_request_duration_seconds_count[{window}]))"
            for window in WINDOWS
        },
        "tandem:worker_info": "max by (role, worker, model, layout, version, host) (tandem_worker_info)",
        "tandem:workers_ready": 'max by (role) (tandem_workers{state="ready"})',
        "tandem:gateways": 'count(tandem_build_info{program="gateway"})',
        "tandem:requests": "sum by (model, state) (tandem_requests)",
        "tandem:ttft_seconds:p99": quantile(0.99, "tandem_time_to_first_token_seconds", select=people),
        "tandem:itl_seconds:p99": quantile(0.99, "tandem_inter_token_latency_seconds", select=people),
        "tandem:duration_seconds:p99": quantile(
            0.99, "tandem_request_duration_seconds", select=f'outcome="finished",{people}'
        ),
        "tandem:generated_tokens:rate5m": "sum by (model) (rate(tandem_generated_tokens_total[5m]))",
        "tandem:kv_use:ratio": "max by (role, worker) ("
        'sum without (state) (tandem_kv_pages{role!="",state=~"reserved|used"})'
        " / sum without (state) (tandem_kv_pages))",
        "tandem:worker_utilisation:ratio": "clamp_max(sum by (worker) (rate(tandem_step_seconds_sum[5m])), 1)"
        " * on (worker) group_left (role, model) max by (worker, role, model) (tandem:worker_info)",
        **{
            f"tandem:cache_hits:ratio_rate{window}": "sum by (model) (rate("
            f"tandem_prefix_hit_tokens_total{{{OF_GATEWAY}}}[{window}])) / sum by (model) (rate("
            f"tandem_prefix_queried_tokens_total{{{OF_GATEWAY}}}[{window}]))"
            for window in ("30m", "1d")
        },
    }
