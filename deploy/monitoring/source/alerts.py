"""The alerts on what requests meet: errors, waits, and no room. Those on parts of the cluster are in `parts`."""

from deploy.monitoring.source import thresholds as limit
from deploy.monitoring.source.model import Alert
from deploy.monitoring.source.recording import errors


def _burn(factor: float, long: str, short: str, severity: str, for_: str) -> Alert:
    return Alert(
        name=f"TandemErrorBudgetBurn{long}",
        expr=f"{errors(long)} > {factor:g} * {limit.ERROR_BUDGET:g} and "
        f"{errors(short)} > {factor:g} * {limit.ERROR_BUDGET:g}",
        for_=for_,
        severity="critical" if severity == "critical" else "warning",
        summary=f"{{{{ $value | humanizePercentage }}}} of the requests of {long} ended with an error of the server",
        meaning=f"Requests fail {factor:g} times as often as the error budget allows, over {long} and over {short}.",
        look="tandem_refused_requests_total by code, the request log's failed lines, traces of failed requests.",
        action="Take what changed last back; for one code, see its entry in docs/operations.md.",
    )


ALERTS = (
    _burn(14.4, "1h", "5m", "critical", "2m"),
    _burn(6, "6h", "30m", "critical", "15m"),
    _burn(3, "1d", "2h", "warning", "1h"),
    _burn(1, "3d", "6h", "warning", "3h"),
    Alert(
        name="TandemTimeToFirstTokenHigh",
        expr=f"tandem:ttft_seconds:p99 > {limit.TTFT_P99_S:g}",
        for_="10m",
        severity="warning",
        summary="p99 of the time to the first token of {{ $labels.model }} is {{ $value | humanizeDuration }}",
        meaning=f"People wait longer than {limit.TTFT_P99_S:g} s for the beginning of one answer in a hundred.",
        look="the phases queue and prefill of the model's dashboard, and the utilisation of prefill workers.",
        action="Add prefill workers; if the queue alone is long, see TandemQueueLong.",
    ),
    Alert(
        name="TandemInterTokenLatencyHigh",
        expr=f"tandem:itl_seconds:p99 > {limit.ITL_P99_S:g}",
        for_="10m",
        severity="warning",
        summary="p99 of the time of a token of {{ $labels.model }} is {{ $value | humanizeDuration }}",
        meaning=f"One token in a hundred takes more than {limit.ITL_P99_S:g} s: answers stutter.",
        look="step times, batch sizes and preemptions of the decode workers, and the gateway's event loop.",
        action="Add decode workers or lower --max-batch; if pages are short, see TandemKvNearlyFull.",
    ),
    Alert(
        name="TandemQueueLong",
        expr=f'tandem:requests{{state="queued"}} > {limit.QUEUED_REQUESTS} and on (model) '
        '(tandem:requests{state="queued"} - ignoring (state) tandem:requests{state="running"} > 0)',
        for_="5m",
        severity="warning",
        summary="{{ $value }} requests for {{ $labels.model }} wait for workers",
        meaning="More requests wait than are answered: the cluster gets more work than it does.",
        look="ready workers, utilisation by role, and whether one tenant sends most of it.",
        action="Add workers of the busier role, or lower --max-queued-requests so that clients hear of it sooner.",
    ),
    Alert(
        name="TandemOverloaded",
        expr="sum by (reason) (rate(tandem_overload_refusals_total[5m])) > "
        "0.05 * scalar(sum(rate(tandem_request_duration_seconds_count[5m])))",
        for_="5m",
        severity="warning",
        summary="{{ $value | humanize }} requests a second are refused for {{ $labels.reason }}",
        meaning="More than 5 % of the requests are refused because the cluster is full; `reason` says what is short.",
        look="the panel of refusals: pages and itl point at decode workers, ttft and deadline at prefill workers.",
        action="Add workers of that role; clients that obey Retry-After come back by themselves.",
    ),
    Alert(
        name="TandemCacheHitsCollapsed",
        expr=f"tandem:cache_hits:ratio_rate30m < 0.5 * tandem:cache_hits:ratio_rate1d and "
        f"tandem:cache_hits:ratio_rate1d > {limit.CACHE_HITS_LOW:g}",
        for_="30m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the prompt tokens of {{ $labels.model }} are found in a cache",
        meaning="Prompts share less with earlier ones than over the last day, so prefill workers compute more.",
        look="restarts of workers, a changed system prompt or chat template, and `--routing`.",
        action="Put what varies in a prompt behind what does not; a restart's cold caches fill by themselves.",
    ),
    Alert(
        name="TandemRequestQuarantined",
        expr="increase(tandem_quarantined_requests_total[15m]) > 0",
        for_="0m",
        severity="warning",
        summary="a request was quarantined: workers died of it",
        meaning="One request killed worker after worker, and is refused from now on.",
        look="the gateway's log for its id, and the last words of the workers that died.",
        action="Reproduce it on one worker apart; block the tenant that sends it until it is repaired.",
    ),
    Alert(
        name="TandemFallbacks",
        expr="sum by (asked, answering) (rate(tandem_fallbacks_total[15m])) > 0",
        for_="15m",
        severity="info",
        summary="{{ $labels.answering }} answers requests for {{ $labels.asked }}",
        meaning="Requests for a model are answered by another one, as the catalog allows.",
        look="whether the model asked for has workers and room.",
        action="Add workers of the model, or take the fallback out of the catalog.",
    ),
)
