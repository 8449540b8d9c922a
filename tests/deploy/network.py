"""Which pods may dial which, by the NetworkPolicies of both sides: what a network plugin enforces, evaluated here."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tests.deploy.manifests import NAME, Object, Workload, of_kind, selected, selects, workloads

Flow: TypeAlias = tuple[str, str, int]
"""The component that dials, the one that is dialled, the port. Outside of Tandem: anybody, DNS, a namespace, …"""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
DNS = ({"kube-system", "169.254.0.0/16"}, 53)


def flows(objects: Sequence[Object]) -> tuple[set[Flow], set[Flow]]:
    """Returns what may pass, and what one side would let pass and the other does not."""
    outgoing, incoming = set(_allowed(objects, "egress")), set(_allowed(objects, "ingress"))
    components = {workload.component for workload in workloads(objects)}
    inner_out = {flow for flow in outgoing if flow[1] in components}
    inner_in = {flow for flow in incoming if flow[0] in components}
    outside = (outgoing - inner_out) | (incoming - inner_in)
    for source, port in {(flow[0], flow[2]) for flow in outside if flow[1] in DNS[0] and flow[2] == DNS[1]}:
        outside -= {(source, target, port) for target in DNS[0]}
        outside.add((source, "DNS", port))
    return (inner_out & inner_in) | outside, inner_out ^ inner_in


def _allowed(objects: Sequence[Object], direction: str) -> Iterator[Flow]:
    policies = [
        one for one in of_kind(objects, "NetworkPolicy") if direction.capitalize() in one["spec"]["policyTypes"]
    ]
    for workload in workloads(objects):
        own = [policy["spec"] for policy in policies if selects(policy["spec"]["podSelector"], workload.labels)]
        if not own:
            # Nothing is enforced for a pod that no policy selects.
            yield from _flow(direction, workload.component, "anybody", 0)
        for policy in own:
            for rule in policy.get(direction, ()):
                for peer, targets in _peers(objects, rule, "to" if direction == "egress" else "from"):
                    for port in _ports(rule, targets if direction == "egress" else [workload]):
                        yield from _flow(direction, workload.component, peer, port)


def _flow(direction: str, component: str, peer: str, port: int) -> Iterator[Flow]:
    yield (component, peer, port) if direction == "egress" else (peer, component, port)


def _peers(objects: Sequence[Object], rule: Mapping[str, Any], key: str) -> Iterator[tuple[str, list[Workload]]]:
    if key not in rule:
        yield "anybody", []
    for peer in rule.get(key, ()):
        if "ipBlock" in peer:
            yield peer["ipBlock"]["cidr"], []
        elif "namespaceSelector" in peer:
            yield peer["namespaceSelector"]["matchLabels"][NAMESPACE_LABEL], []
        else:
            found = selected(objects, peer["podSelector"])
            assert all(workload.labels.get(NAME) == "tandem" for workload in found)
            if not found:
                yield "no pod at all", []
            for component in {workload.component for workload in found}:
                yield component, [workload for workload in found if workload.component == component]


def _ports(rule: Mapping[str, Any], targets: Sequence[Workload]) -> Iterator[int]:
    if "ports" not in rule:
        yield 0
    for entry in rule.get("ports", ()):
        port = entry["port"]
        if isinstance(port, int):
            yield port
            continue
        # A name is that of the dialled pod's port; a policy with one that it has not lets nothing pass.
        yield from {target.ports[port] for target in targets if port in target.ports}
