"""The alerts on gateways, workers, handoffs and Redis: what is broken, or soon will be."""

from deploy.monitoring.source import thresholds as limit
from deploy.monitoring.source.model import Alert

_LOOK = "`tandem status` and `tandem doctor`, which name cause and remedy."


def _certificate(days: int, severity: str) -> Alert:
    return Alert(
        name=f"TandemCertificateEnds{'Now' if severity == 'critical' else 'Soon'}",
        expr=f"tandem_tls_certificate_end_timestamp_seconds - time() < {days} * 86400",
        for_="0m",
        severity="critical" if severity == "critical" else "warning",
        summary="the certificate of {{ $labels.instance }} has {{ $value | humanizeDuration }} left",
        meaning="When it has ended, no process of the cluster accepts this one any longer.",
        look="what renews it (cert-manager, a timer), and whether the files have changed.",
        action="Renew it and replace the files; they are read again without a restart.",
    )


GATEWAYS = (
    Alert(
        name="TandemNoGateway",
        expr='absent(tandem_build_info{program="gateway"})',
        for_="1m",
        severity="critical",
        summary="no gateway can be scraped",
        meaning="Nothing answers requests, or Prometheus cannot reach what does.",
        look="the gateways' processes or pods, their /health, and Prometheus' page of targets.",
        action="Start one; a gateway needs Redis at its start and serves when a decode worker is ready.",
    ),
    Alert(
        name="TandemGatewayDown",
        expr='up{job=~".*tandem-gateway.*"} == 0',
        for_="2m",
        severity="warning",
        summary="the gateway {{ $labels.instance }} cannot be scraped",
        meaning="The process has ended, hangs, or asks for a key that Prometheus does not show.",
        look="its log and /health; Prometheus' page of targets has the error.",
        action="Restart it; clients of its streams continue at another gateway where they have named their requests.",
    ),
    Alert(
        name="TandemGatewaysFewer",
        expr=f"tandem:gateways < max_over_time(tandem:gateways[{limit.REPLICAS_LOOK_BACK}])",
        for_="5m",
        severity="warning",
        summary="only {{ $value }} gateways are left",
        meaning="Fewer gateways run than within the last half hour. It ends by itself after a wanted scaling down.",
        look="pods that are pending or evicted, and nodes that are gone.",
        action="Bring the replicas back; the others serve all requests meanwhile, if they have room.",
    ),
    Alert(
        name="TandemGatewayBusy",
        expr=f"avg_over_time(tandem_event_loop_busy_ratio[5m]) > {limit.EVENT_LOOP_BUSY:g}",
        for_="10m",
        severity="warning",
        summary="the gateway {{ $labels.instance }} works {{ $value | humanizePercentage }} of the time",
        meaning="A gateway has one thread. Near 1, tokens wait for it, however fast workers are.",
        look="tandem_token_hold_seconds and the number of connections.",
        action="Add gateways behind the balancer.",
    ),
    Alert(
        name="TandemFileDescriptorsNearlyGone",
        expr='process_open_fds{job=~".*tandem-.*"} / process_max_fds > 0.85',
        for_="5m",
        severity="warning",
        summary="{{ $labels.instance }} has {{ $value | humanizePercentage }} of its file descriptors open",
        meaning="At the limit, no connection is accepted.",
        look="tandem_http_connections and `--max-connections`.",
        action="Raise the limit of open files (LimitNOFILE), or add gateways.",
    ),
)

WORKERS = (
    Alert(
        name="TandemNoDecodeWorkerReady",
        expr='tandem:workers_ready{role="decode"} == 0',
        for_="1m",
        severity="critical",
        summary="no decode worker is ready",
        meaning="No request can be answered: they wait, and then fail with 503.",
        look=_LOOK,
        action="Start decode workers; where they start and leave again, their last log lines say why.",
    ),
    Alert(
        name="TandemNoPrefillWorkerReady",
        expr='tandem:workers_ready{role="prefill"} == 0 and '
        "(max_over_time(tandem:workers_ready[6h]) > 0 "
        "or on (role) max by (role) (tandem_expected_workers) > 0)",
        for_="1m",
        severity="critical",
        summary="no prefill worker is ready",
        meaning="Decode workers compute prompts themselves, and running answers stutter. A cluster that never had "
        "prefill workers and expects none does not fire this.",
        look=_LOOK,
        action="Start prefill workers; where they start and leave again, their last log lines say why.",
    ),
    Alert(
        name="TandemWorkersMissing",
        expr="max by (role) (tandem_expected_workers) - on (role) tandem:workers_ready > 0",
        for_="10m",
        severity="warning",
        summary="{{ $value }} {{ $labels.role }} workers are missing",
        meaning="Fewer workers are ready than `--expect` names.",
        look=_LOOK,
        action="Start them, or change `--expect`.",
    ),
    Alert(
        name="TandemWorkersFlapping",
        expr="max by (role) (increase(tandem_vanished_workers_total[30m])) > 2",
        for_="0m",
        severity="warning",
        summary="{{ $labels.role }} workers keep vanishing",
        meaning="Workers died, or lost their lease, several times within half an hour.",
        look="out-of-memory kills, the last log lines of the workers, `dmesg` for Xid errors.",
        action="Take the machine or the GPU out; if one request kills them, it is quarantined by itself.",
    ),
    Alert(
        name="TandemWorkerFenced",
        expr='max by (role, worker) (tandem_worker_circuit{state=~"open|half_open|suspected"}) > 0',
        for_="3m",
        severity="warning",
        summary="{{ $labels.worker }} is kept from work",
        meaning="A gateway has found the worker slow, silent or erring, or its GPU in trouble.",
        look="/cluster or `tandem status`, which say which of them, and the worker's log.",
        action="Nothing if it comes back by itself; else drain it and restart it elsewhere.",
    ),
    Alert(
        name="TandemCircuitsFlapping",
        expr="sum by (cause) (delta(tandem_circuit_openings[30m])) > 5",
        for_="0m",
        severity="warning",
        summary="workers are taken out and in again: {{ $labels.cause }}",
        meaning="Circuits opened more than five times within half an hour.",
        look="which workers: tandem_worker_circuit over the last hour.",
        action="Take the worker out by `tandem drain`, and look at its machine.",
    ),
    Alert(
        name="TandemWorkerUnscraped",
        expr='up{job=~".*tandem-workers.*"} == 0',
        for_="5m",
        severity="info",
        summary="the metrics of the worker {{ $labels.instance }} cannot be scraped",
        meaning="Utilisation, steps and transfers of this worker are not known. It may work all the same.",
        look="Prometheus' page of targets, and network policies.",
        action="Open the metrics port to Prometheus.",
    ),
    Alert(
        name="TandemKvNearlyFull",
        expr='avg by (role, model) (tandem:kv_use:ratio{role="decode"} * on (role, worker) group_left (model) '
        f"tandem:worker_info) > {limit.KV_USE_FULL:g}",
        for_="5m",
        severity="warning",
        summary="decode workers of {{ $labels.model }} use {{ $value | humanizePercentage }} of their KV pages",
        meaning="New answers wait for pages, and running ones are preempted.",
        look="preemptions, lengths of prompts and answers, and refusals for `pages`.",
        action="Add decode workers, raise --kv-memory, or give them a host tier.",
    ),
    Alert(
        name="TandemWorkersSaturated",
        expr=f"avg by (role, model) (tandem:worker_utilisation:ratio) > {limit.UTILISATION_HIGH:g}",
        for_="30m",
        severity="info",
        summary="{{ $labels.role }} workers of {{ $labels.model }} are {{ $value | humanizePercentage }} busy",
        meaning=f"Above {limit.UTILISATION_HIGH:.0%} queues grow with each burst.",
        look="the trend of the last days.",
        action="Add workers of the role.",
    ),
    Alert(
        name="TandemHeldBack",
        expr='max by (model, role, resource) (tandem_bottleneck{work="urgent"}) > 0',
        for_="10m",
        severity="info",
        summary="{{ $labels.model }} is held back by: {{ $labels.role }}, {{ $labels.resource }}",
        meaning="This resource has had no time or room left for ten minutes, so requests wait for it; of work that "
        "nobody waits for (batch) this is not said.",
        look="`tandem top`, the dashboard or /cluster, which say what one more worker of each role would bring, and "
        "tandem_resource_load_ratio.",
        action="compute: add a worker of the role, or change the role of one that has time; pages: add decode "
        "workers or raise --kv-memory; link: look after the network, or raise --local-prefill-tokens; "
        "gateway: add gateways; queue: see circuits and `--tenants`.",
    ),
    Alert(
        name="TandemLayoutMismatch",
        expr="count by (model) (count by (model, layout) (tandem:worker_info)) > 1 "
        'or sum by (reason) (increase(tandem_retries_total{reason="layout_mismatch"}[15m])) > 0',
        for_="5m",
        severity="warning",
        summary="workers of one model have pages of different layouts",
        meaning="Such workers cannot hand over to one another, so they are paired only within a layout.",
        look="tandem_worker_info by layout; it is wanted during a blue/green change, and at no other time.",
        action="Give all workers of a model the same --page-size, --dtype and degrees of parallelism.",
    ),
    Alert(
        name="TandemGpuInTrouble",
        expr='max by (role, worker) (tandem_worker_gpu{state=~"degraded|out"}) > 0 '
        f"or max by (role, worker) (tandem_worker_gpu_temperature_celsius) > {limit.GPU_TEMPERATURE_C}",
        for_="3m",
        severity="warning",
        summary="the GPU of {{ $labels.worker }} is in trouble",
        meaning="It is throttled or too hot, or has had errors; it gets less work, or none.",
        look="`tandem status`, `nvidia-smi -q`, and `dmesg` for Xid errors.",
        action="Drain the worker, and have the machine seen to.",
    ),
)

HANDOFFS = (
    Alert(
        name="TandemHandoffsFailing",
        expr='sum(rate(tandem_retries_total{reason="transfer_failed"}[10m])) / '
        f'sum(rate(tandem_sent_attempts_total{{role="prefill"}}[10m])) > {limit.HANDOFF_FAILURES:g}',
        for_="5m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the handoffs fail",
        meaning="Pages do not arrive as they left; each failure costs a prompt that is computed again.",
        look="tandem_transfer_faults_total by reason, and the trouble `link` (packets that are too large).",
        action="Look after the network between the workers; `--transport tcp` takes shared memory and GPUs out.",
    ),
    Alert(
        name="TandemAnswersComputedAgain",
        expr="sum by (model) (rate(tandem_failovers_total[10m])) / "
        f"sum by (model) (rate(tandem_request_generated_tokens_count[10m])) > {limit.FAILOVERS:g}",
        for_="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the answers of {{ $labels.model }} begin again elsewhere",
        meaning="Workers fail in the middle of answers. Clients notice a pause only; the work is done twice.",
        look="tandem_retries_total by reason.",
        action="For worker_lost see TandemWorkersFlapping, for transfer_failed TandemHandoffsFailing.",
    ),
    Alert(
        name="TandemRetriesDelayed",
        expr="increase(tandem_delayed_retries_total[10m]) > 10",
        for_="0m",
        severity="warning",
        summary="retries have to wait on {{ $labels.instance }}",
        meaning="So much fails that retries would be a load of their own; they are slowed down.",
        look="tandem_retries_total by reason, and the workers that went.",
        action="Repair what fails; the budget of retries refills by itself.",
    ),
)

STORE = (
    Alert(
        name="TandemRedisAway",
        expr="min(tandem_redis_up) == 0",
        for_="1m",
        severity="critical",
        summary="Redis does not answer a gateway, or denies its commands",
        meaning="Running and new requests continue, but no worker can join, and files and batches wait.",
        look="Redis itself and the network to it; the gateway's log has the error.",
        action="Start Redis, or grant the missing rights. Leases return within 3 s. An empty Redis harms no request.",
    ),
    Alert(
        name="TandemRedisSlow",
        expr=f"tandem_redis_round_trip_seconds > {limit.REDIS_ROUND_TRIP_S:g}",
        for_="5m",
        severity="warning",
        summary="a call to Redis takes {{ $value | humanizeDuration }}",
        meaning="Limits of tenants and named requests wait for one call each.",
        look="what else uses Redis or its machine.",
        action="Move Redis nearer to the gateways.",
    ),
    Alert(
        name="TandemRedisMemoryShort",
        expr="max by (kind) (tandem_redis_memory_bytes / (tandem_redis_memory_limit_bytes > 0)) > 0.9 "
        "or max(tandem_redis_evicted_keys) > 0",
        for_="5m",
        severity="warning",
        summary="Redis runs out of memory: {{ $labels.kind }}",
        meaning="Files or journals are refused when it is full; keys that it evicts are lost.",
        look="tandem_redis_memory_bytes by kind, and old files and batches.",
        action="Delete files, or raise maxmemory and --file-storage; maxmemory-policy must be noeviction.",
    ),
    _certificate(limit.CERTIFICATE_WARNING_DAYS, "warning"),
    _certificate(limit.CERTIFICATE_CRITICAL_DAYS, "critical"),
    Alert(
        name="TandemKeyFileBroken",
        expr='max(tandem_troubles{kind="api_keys"}) > 0',
        for_="1m",
        severity="warning",
        summary="the file of API keys cannot be read",
        meaning="Keys that were added do not work, and keys that were taken out still do.",
        look="the gateway's log, which names line and rule.",
        action="Repair the file; it is read again within a second.",
    ),
    Alert(
        name="TandemTrouble",
        expr="max by (kind) "
        '(tandem_troubles{kind=~"background_task|clock|flapping|kernels|left_out|link|log|unreachable|storage"}) > 0',
        for_="5m",
        severity="warning",
        summary="the gateways know of a trouble: {{ $labels.kind }}",
        meaning="A background task or a worker keeps failing, a clock is wrong, a worker is excluded or unreachable or "
        "computes without compiled kernels, a link loses packets, a log cannot be written, or Redis needs care.",
        look=_LOOK,
        action="What `tandem doctor` says.",
    ),
    Alert(
        name="TandemSpansDropped",
        expr="rate(tandem_spans_dropped_total[10m]) > 0",
        for_="15m",
        severity="info",
        summary="{{ $labels.instance }} loses spans",
        meaning="The collector of traces does not take them; requests are not affected.",
        look="the collector, and OTEL_EXPORTER_OTLP_ENDPOINT.",
        action="Repair the collector, or sample less.",
    ),
    Alert(
        name="TandemVersionsDiffer",
        expr="count(count by (version) (tandem_build_info)) > 1",
        for_="2h",
        severity="info",
        summary="{{ $value }} versions of Tandem run at once",
        meaning="A rollout has stopped half way.",
        look="tandem_build_info by version and instance.",
        action="Finish it or take it back.",
    ),
)
