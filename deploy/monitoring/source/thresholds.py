"""The limits that dashboards draw and alerts are about, each once. Change them here, and write both anew.

They are a serving handbook's usual ones for chats; a cluster for other work has others.
"""

TTFT_P99_S = 2.0
"""Time to the first token that 99 of 100 requests of the classes of people should not exceed."""
ITL_P99_S = 0.2
"""Time of each token after the first: slower than people read."""
DURATION_P99_S = 60.0
QUEUED_REQUESTS = 20
"""The requests of a model that may wait, unless as many are being answered."""
UTILISATION_LOW, UTILISATION_HIGH = 0.70, 0.85
"""The share of the time in which a worker should compute: below, workers are idle; above, queues grow."""
KV_USE_HIGH, KV_USE_FULL = 0.85, 0.95
"""The share of KV pages that running answers may take."""
CACHE_HITS_LOW = 0.10
"""A share of cached prompt tokens below which a cache does not pay."""
ERROR_BUDGET = 0.001
"""The share of requests that may end with an error of the server: 99.9 % are to succeed."""
HANDOFF_FAILURES = 0.01
"""The share of handoffs that may fail: each costs a prompt that is computed again."""
FAILOVERS = 0.05
"""The share of answers that may be continued by other workers than began them."""
REDIS_ROUND_TRIP_S = 0.05
EVENT_LOOP_BUSY = 0.9
"""The share of the time in which a gateway's one thread may work."""
CERTIFICATE_WARNING_DAYS, CERTIFICATE_CRITICAL_DAYS = 7, 1
GPU_TEMPERATURE_C = 87
REPLICAS_LOOK_BACK = "30m"
"""For this time after a gateway has gone, fewer gateways than before are an alert."""
FAST_CLASSES = "critical|interactive|normal"
"""The service classes of people who wait; `low` and `batch` may be late."""
