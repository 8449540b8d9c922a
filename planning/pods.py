"""The time that Kubernetes gives a pod to end in order. Knows no Kubernetes.

`tests/deploy` holds the manifests in `deploy/kubernetes` to these formulas; docs/kubernetes.md has them in words.
"""

ENDPOINT_LAG_S = 10.0
"""From the moment that a gateway's pod is told to end until nothing sends it new connections."""
EXIT_MARGIN_S = 10.0
"""From the last answer to the end of the process: servers close, spans are exported, a GPU's memory is freed."""
LINK_FLOOR_BYTES_PER_S = 125e6
"""The slowest network between decode workers that is reckoned with: 1 Gbit/s."""


def grace_s(longest_work_s: float, *, endpoint_lag_s: float = 0.0) -> float:
    """Returns the least grace period: new work stops coming, what there is gets done, the process ends.

    `longest_work_s` is a worker's longest handover, and a gateway's longest answer. Only work that comes by way of a
    Service has an `endpoint_lag_s`: gateways hear from a worker itself that it leaves.
    """
    return endpoint_lag_s + longest_work_s + EXIT_MARGIN_S


def longest_work_s(*, max_request_s: float, drain_s: float, can_hand_over: bool) -> float:
    """Returns how long a process that leaves needs for the work that it has.

    Where others can take its answers over, it is the limit of its drain, `drain_s`: an answer that has not moved by
    then is computed again elsewhere, whatever the model. Where nobody can, it is the longest answer.
    """
    return drain_s if can_hand_over else max(drain_s, max_request_s)


def handover_s(kv_bytes: int, *, bytes_per_s: float = LINK_FLOOR_BYTES_PER_S) -> float:
    """Returns how long a full KV cache takes to another worker: a drain of less has answers computed again."""
    return kv_bytes / bytes_per_s
