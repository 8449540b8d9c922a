"""Each rule about manifests is broken once, and says so."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.deploy.manifests import COMPONENT, DEPLOY, KUBERNETES, Object, copied, render, render_with, title
from tests.deploy.rules import RULES, violations

pytestmark = pytest.mark.deploy

Found: TypeAlias = Callable[[str], Object]
Change: TypeAlias = Callable[[Found], object]


@pytest.fixture(scope="module")
def manifests() -> Sequence[Object]:
    """The overlay with the most in it."""
    return render(KUBERNETES / "overlays" / "several-nodes")


@pytest.fixture(scope="module")
def base() -> Sequence[Object]:
    return render(KUBERNETES / "base")


def pod(one: Object) -> Object:
    spec: Object = one["spec"]["template"]["spec"]
    return spec


def container(one: Object) -> Object:
    first: Object = pod(one)["containers"][0]
    return first


def variable(one: Object, name: str) -> Object:
    return next(each for each in container(one)["env"] if each["name"] == name)


def put(target: Any, key: Any, value: Any) -> None:
    """Sets a member, or takes it away."""
    if value is None:
        del target[key]
    else:
        target[key] = value


GATEWAY, DECODE, PREFILL = "Deployment tandem-gateway", "StatefulSet tandem-decode", "StatefulSet tandem-prefill"
CHANGES: list[tuple[str, str, Change]] = [
    # Rule, what it says, what is broken.
    (
        "selectors_mean_their_pods",
        "PodMonitor tandem-workers selects ['prefill']",
        lambda at: at("PodMonitor tandem-workers")["spec"]["selector"]["matchExpressions"][0]["values"].pop(),
    ),
    (
        "selectors_mean_their_pods",
        "Service tandem-decode selects []",
        lambda at: put(at("Service tandem-decode")["spec"]["selector"], COMPONENT, "decoder"),
    ),
    (
        "selectors_mean_their_pods",
        "NetworkPolicy tandem-default-deny selects []",
        lambda at: put(at("NetworkPolicy tandem-default-deny")["spec"], "podSelector", {"matchLabels": {"app": "x"}}),
    ),
    (
        "selectors_mean_their_pods",
        "not in the table",
        lambda at: put(at("Service tandem-decode")["metadata"], "name", "tandem-decoders"),
    ),
    (
        "selectors_mean_their_pods",
        "has a selector that takes",
        lambda at: put(
            pod(at(DECODE))["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"], COMPONENT, None
        ),
    ),
    (
        "selectors_mean_their_pods",
        "does not spread its pods",
        lambda at: put(pod(at(PREFILL)), "topologySpreadConstraints", None),
    ),
    (
        "budgets_protect_what_serves",
        "selects []",
        lambda at: put(
            at("PodDisruptionBudget tandem-decode")["spec"]["selector"]["matchLabels"], COMPONENT, "decoding"
        ),
    ),
    (
        "budgets_protect_what_serves",
        "does not let one pod at a time go",
        lambda at: put(at("PodDisruptionBudget tandem-gateway")["spec"], "maxUnavailable", 0),
    ),
    (
        "ports_agree",
        "which tandem-gateway has not",
        lambda at: put(at("Service tandem-gateway")["spec"]["ports"][0], "targetPort", "web"),
    ),
    ("ports_agree", "port 80 is 8000", lambda at: put(at("Service tandem-gateway")["spec"]["ports"][0], "port", 80)),
    (
        "ports_agree",
        "readinessProbe asks port 7070",
        lambda at: put(container(at(DECODE))["readinessProbe"], "grpc", {"port": 7070}),
    ),
    (
        "ports_agree",
        "TANDEM_TRANSFER_PORT is 7001, but its port transfer is 7002",
        lambda at: put(container(at(DECODE))["ports"][1], "containerPort", 7002),
    ),
    (
        "ports_agree",
        "scrapes a port prometheus",
        lambda at: put(at("PodMonitor tandem-workers")["spec"]["podMetricsEndpoints"][0], "port", "prometheus"),
    ),
    (
        "ports_agree",
        "ServiceMonitor tandem-gateway selects 2 Services",
        lambda at: put(at("Service tandem-gateway")["metadata"]["labels"], COMPONENT, "gateway-metrics"),
    ),
    (
        "policies_let_pass_what_is_dialled",
        "only one side lets pass: ('prefill', 'decode', 7001)",
        lambda at: at("NetworkPolicy tandem-prefill")["spec"]["egress"][0]["ports"].pop(),
    ),
    (
        "policies_let_pass_what_is_dialled",
        "policies let pass: ('anybody', 'decode', 7000)",
        lambda at: put(at("NetworkPolicy tandem-decode")["spec"]["ingress"][0], "from", None),
    ),
    (
        "policies_let_pass_what_is_dialled",
        "only one side lets pass: ('gateway', 'decode', 7000)",
        lambda at: put(at("NetworkPolicy tandem-decode")["spec"]["ingress"][0]["ports"][0], "port", "metrics"),
    ),
    (
        "policies_let_pass_what_is_dialled",
        "('anybody', 'prefill', 0)",
        lambda at: (
            put(at("NetworkPolicy tandem-default-deny")["spec"], "policyTypes", ["Egress"]),
            put(at("NetworkPolicy tandem-prefill")["spec"], "policyTypes", ["Egress"]),
            put(at("NetworkPolicy tandem-metrics")["spec"], "policyTypes", []),
        ),
    ),
    (
        "graces_suffice",
        "StatefulSet tandem-decode has 30 s to end, and needs 60 s",
        lambda at: put(pod(at(DECODE)), "terminationGracePeriodSeconds", 30),
    ),
    (
        "graces_suffice",
        "nobody takes over its answers: 600 s",
        lambda at: put(at(DECODE)["spec"], "replicas", 1),
    ),
    (
        "graces_suffice",
        "Deployment tandem-gateway sleeps 2 s",
        lambda at: put(container(at(GATEWAY))["lifecycle"]["preStop"]["sleep"], "seconds", 2),
    ),
    (
        "graces_suffice",
        "in which its KV cache cannot move",
        lambda at: container(at(DECODE))["env"].append({"name": "TANDEM_KV_MEMORY", "value": "64GiB"}),
    ),
    (
        "graces_suffice",
        "Deployment tandem-gateway has 620 s to end, and needs 1220 s",
        lambda at: container(at(GATEWAY))["env"].extend(
            [{"name": "TANDEM_MAX_REQUEST_S", "value": "1200"}, {"name": "TANDEM_DRAIN_S", "value": "1200"}]
        ),
    ),
    (
        "probes_mean_one_thing",
        "'liveness': '/ready'",
        lambda at: put(container(at(GATEWAY))["livenessProbe"]["httpGet"], "path", "/ready"),
    ),
    (
        "probes_mean_one_thing",
        "StatefulSet tandem-decode has 50 s to start, and 16GiB need 292 s",
        lambda at: put(container(at(DECODE))["startupProbe"], "failureThreshold", 10),
    ),
    (
        "probes_mean_one_thing",
        "does not say how large its weights are",
        lambda at: put(at(DECODE)["spec"]["template"]["metadata"], "annotations", None),
    ),
    (
        "probes_mean_one_thing",
        "'readiness': 'nothing'",
        lambda at: put(container(at(PREFILL)), "readinessProbe", None),
    ),
    (
        "images_have_versions",
        "tandem-gateway:latest has no version",
        lambda at: put(container(at(GATEWAY)), "image", "registry.example.com:5000/tandem-gateway:latest"),
    ),
    (
        "images_have_versions",
        "is not of version",
        lambda at: put(container(at(DECODE)), "image", "tandem-worker-cuda:9.9.9"),
    ),
    ("images_have_versions", "has no version", lambda at: put(container(at(DECODE)), "image", "tandem-worker")),
    (
        "pods_are_restricted",
        "may run as root",
        lambda at: put(pod(at(DECODE))["securityContext"], "runAsNonRoot", None),
    ),
    (
        "pods_are_restricted",
        "has no seccomp profile",
        lambda at: put(pod(at(GATEWAY))["securityContext"]["seccompProfile"], "type", "Unconfined"),
    ),
    (
        "pods_are_restricted",
        "may gain privileges",
        lambda at: put(container(at(DECODE))["securityContext"], "allowPrivilegeEscalation", True),
    ),
    (
        "pods_are_restricted",
        "has capabilities",
        lambda at: put(container(at(DECODE))["securityContext"]["capabilities"], "add", ["IPC_LOCK"]),
    ),
    (
        "pods_are_restricted",
        "may write to its root",
        lambda at: put(container(at(GATEWAY))["securityContext"], "readOnlyRootFilesystem", False),
    ),
    ("pods_are_restricted", "hostIPC is set", lambda at: put(pod(at(DECODE)), "hostIPC", True)),
    (
        "pods_are_restricted",
        "restricted refuses",
        lambda at: pod(at(DECODE))["volumes"].append({"name": "models", "hostPath": {"path": "/srv"}}),
    ),
    ("pods_are_restricted", "takes port 7000", lambda at: put(container(at(DECODE))["ports"][0], "hostPort", 7000)),
    ("pods_are_restricted", "have a token", lambda at: put(pod(at(DECODE)), "automountServiceAccountToken", None)),
    ("pods_are_restricted", "taken for settings", lambda at: put(pod(at(GATEWAY)), "enableServiceLinks", None)),
    (
        "pods_are_restricted",
        "ServiceAccount tandem-decode has a token",
        lambda at: put(at("ServiceAccount tandem-decode"), "automountServiceAccountToken", None),
    ),
    (
        "pods_are_restricted",
        "does not enforce restricted",
        lambda at: put(at("Namespace tandem")["metadata"], "labels", {}),
    ),
    (
        "rights_are_those_of_the_autoscaler",
        "StatefulSet tandem-decode has a token",
        lambda at: pod(at(DECODE))["volumes"].append(
            {"name": "account", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
        ),
    ),
    (
        "settings_exist",
        "TANDEM_TTFT_TARGET is no setting of its program",
        lambda at: container(at(GATEWAY))["env"].append({"name": "TANDEM_TTFT_TARGET", "value": "2"}),
    ),
    (
        "settings_exist",
        "TANDEM_ROUTING is no setting of its program",
        lambda at: container(at(DECODE))["env"].append({"name": "TANDEM_ROUTING", "value": "random"}),
    ),
    (
        "settings_exist",
        "TANDEM_THREADS is '0'",
        lambda at: (
            container(at(PREFILL))["env"].remove(variable(at(PREFILL), "TANDEM_THREADS")),
            container(at(PREFILL))["env"].append({"name": "TANDEM_THREADS", "value": "0"}),
        ),
    ),
    (
        "settings_exist",
        "which names a variable not set before it",
        lambda at: container(at(DECODE))["env"].reverse(),
    ),
    (
        "settings_exist",
        "where neither its image nor a volume has anything",
        lambda at: container(at(GATEWAY))["volumeMounts"].pop(),
    ),
    (
        "settings_exist",
        "TANDEM_INSECURE leaves pages unencrypted",
        lambda at: container(at(DECODE))["env"].append({"name": "TANDEM_INSECURE", "value": "true"}),
    ),
    (
        "preflight_sees_what_the_worker_gets",
        "StatefulSet tandem-decode: preflight has another image than worker",
        lambda at: put(
            pod(at(DECODE)), "initContainers", [{**container(at(DECODE)), "name": "preflight", "image": "x:1.2.3"}]
        ),
    ),
    (
        "preflight_sees_what_the_worker_gets",
        "StatefulSet tandem-decode: preflight looks at --ports=7000,9000",
        lambda at: put(
            pod(at(DECODE)),
            "initContainers",
            [{**container(at(DECODE)), "name": "preflight", "args": ["cli.main", "doctor", "--ports=7000,9000"]}],
        ),
    ),
    (
        "references_exist",
        "names ConfigMap tandem-tuning",
        lambda at: container(at(DECODE))["envFrom"].append({"configMapRef": {"name": "tandem-tuning"}}),
    ),
    (
        "references_exist",
        "names Secret tandem-decoder-tls",
        lambda at: put(
            next(one for one in pod(at(DECODE))["volumes"] if one["name"] == "tls")["secret"],
            "secretName",
            "tandem-decoder-tls",
        ),
    ),
    ("references_exist", "names PriorityClass high", lambda at: put(pod(at(DECODE)), "priorityClassName", "high")),
    ("references_exist", "names ServiceAccount x", lambda at: put(pod(at(DECODE)), "serviceAccountName", "x")),
    ("references_exist", "names Service tandem", lambda at: put(at(DECODE)["spec"], "serviceName", "tandem")),
    ("references_exist", "which is no volume of it", lambda at: pod(at(DECODE))["volumes"].pop()),
    ("references_exist", "that nothing mounts", lambda at: container(at(DECODE))["volumeMounts"].pop()),
    (
        "references_exist",
        "mounts two volumes at /tmp",
        lambda at: [put(mount, "mountPath", "/tmp") for mount in container(at(DECODE))["volumeMounts"]],
    ),
    (
        "references_exist",
        "scales StatefulSet tandem-decoder",
        lambda at: put(at("ScaledObject tandem-decode")["spec"]["scaleTargetRef"], "name", "tandem-decoder"),
    ),
    (
        "references_exist",
        "is issued by letsencrypt",
        lambda at: put(at("Certificate tandem-decode")["spec"]["issuerRef"], "name", "letsencrypt"),
    ),
    (
        "autoscalers_own_the_number",
        "StatefulSet tandem-decode has 4 replicas, and 1 autoscalers",
        lambda at: put(at(DECODE)["spec"], "replicas", 4),
    ),
    (
        "autoscalers_own_the_number",
        "is scaled twice",
        lambda at: put(at("ScaledObject tandem-prefill")["spec"]["scaleTargetRef"], "name", "tandem-decode"),
    ),
    (
        "autoscalers_own_the_number",
        "may leave a single pod",
        lambda at: put(at("ScaledObject tandem-decode")["spec"], "minReplicaCount", 1),
    ),
    (
        "resources_are_named",
        "does not say what it needs",
        lambda at: put(container(at(DECODE))["resources"]["limits"], "memory", None),
    ),
    (
        "resources_are_named",
        "without last words",
        lambda at: put(container(at(GATEWAY)), "terminationMessagePolicy", None),
    ),
    (
        "tls_is_spoken",
        "StatefulSet tandem-decode: livenessProbe does not speak TLS",
        lambda at: put(container(at(DECODE)), "livenessProbe", {"grpc": {"port": 7000}}),
    ),
    (
        "tls_is_spoken",
        "ServiceMonitor tandem-gateway does not speak as tandem-gateway does",
        lambda at: put(at("ServiceMonitor tandem-gateway")["spec"]["endpoints"][0], "scheme", None),
    ),
    (
        "tls_is_spoken",
        "does not say what its ports speak",
        lambda at: put(at("Service tandem-gateway")["spec"]["ports"][1], "appProtocol", "kubernetes.io/h2c"),
    ),
    (
        "ports_agree",
        "livenessProbe asks port 7070",
        lambda at: put(container(at(DECODE))["livenessProbe"]["exec"]["command"], -1, "localhost:7070"),
    ),
    (
        "names_are_let_in",
        "refuses requests for tandem-gateway.tandem.svc",
        lambda at: put(variable(at(GATEWAY), "TANDEM_ALLOWED_HOSTS"), "value", "tandem-gateway"),
    ),
    (
        "names_are_let_in",
        "does not name the role prefill",
        lambda at: put(at("Certificate tandem-prefill")["spec"], "uris", ["spiffe://tandem/decode"]),
    ),
    (
        "names_are_let_in",
        "Certificate tandem-decode is not for decode-0.tandem-decode.tandem.svc",
        lambda at: put(at("Certificate tandem-decode")["spec"], "dnsNames", ["tandem-decode.tandem.svc"]),
    ),
    (
        "namespaces_agree",
        "is in the namespace default",
        lambda at: put(at("Service tandem-decode")["metadata"], "namespace", "default"),
    ),
    (
        "namespaces_agree",
        "lacks the labels",
        lambda at: put(at(DECODE)["spec"]["template"]["metadata"]["labels"], COMPONENT, None),
    ),
    (
        "namespaces_agree",
        "StatefulSet tandem-decode exists twice",
        lambda at: put(at(PREFILL)["metadata"], "name", "tandem-decode"),
    ),
    (
        "queries_name_metrics",
        "tandem_queue_depth",
        lambda at: put(
            at("ScaledObject tandem-prefill")["spec"]["triggers"][0]["metadata"], "query", "sum(tandem_queue_depth)"
        ),
    ),
]


@pytest.mark.parametrize(("rule", "said", "change"), CHANGES, ids=[f"{one[0]}-{one[1][:40]}" for one in CHANGES])
def test_a_rule_finds_what_breaks_it(manifests: Sequence[Object], rule: str, said: str, change: Change) -> None:
    assert violations(manifests) == []
    objects = copied(manifests)
    change(lambda name: next(one for one in objects if title(one) == name))
    found = [each for each in violations(objects) if each.startswith(f"{rule}: ")]
    assert any(said in each for each in found), found or violations(objects)


def test_every_rule_is_broken_once() -> None:
    assert {rule.__name__ for rule in RULES} == {rule for rule, _, _ in CHANGES}


def test_the_base_has_its_own_redis_and_lets_nobody_else_in(base: Sequence[Object]) -> None:
    assert violations(base) == []
    objects = copied(base)
    policy = next(one for one in objects if title(one) == "NetworkPolicy tandem-redis")
    del policy["spec"]["ingress"][0]["from"]
    assert "policies let pass: ('anybody', 'redis', 6379)" in "\n".join(violations(objects))


def test_a_route_that_leads_nowhere_is_found(base: Sequence[Object]) -> None:
    backend = {"name": "tandem-gateway", "port": 8001}
    spec = {"hostnames": ["tandem.example.com"], "rules": [{"backendRefs": [backend]}]}
    route = {"kind": "HTTPRoute", "metadata": {"name": "tandem", "namespace": "tandem"}, "spec": spec}
    found = violations([*base, route])
    assert "ports_agree: HTTPRoute tandem leads to tandem-gateway:8001, which no Service has" in found
    assert "names_are_let_in: Deployment tandem-gateway refuses requests for tandem.example.com" in found
    objects = copied([*base, route])
    gateway = next(one for one in objects if title(one) == GATEWAY)
    container(gateway)["env"].append({"name": "TANDEM_TLS_CERT", "value": "/etc/tandem/tls/tls.crt"})
    assert "tls_is_spoken: the routes do not speak as tandem-gateway does" in violations(objects)


def test_two_tracks_of_decode_workers_finish_their_answers_themselves(base: Sequence[Object]) -> None:
    objects = copied(base)
    green = copied([next(one for one in objects if title(one) == DECODE)])[0]
    green["metadata"]["name"] = "tandem-decode-green"
    for labels in (green["spec"]["template"]["metadata"]["labels"], green["spec"]["selector"]["matchLabels"]):
        labels["tandem/track"] = "green"
    found = "\n".join(violations([*objects, green]))
    assert "StatefulSet tandem-decode drains for 50 s, but nobody takes over its answers: 600 s" in found
    assert "budgets protect" in found


def test_the_autoscalers_rights_are_to_scale_and_no_more(tmp_path: Path) -> None:
    tree = tmp_path / "deploy"
    shutil.copytree(DEPLOY, tree)
    objects = render_with("cpu-demo", "autoscaler", tree)
    assert violations(objects) == []
    found = copied(objects)
    role = next(one for one in found if title(one) == "Role tandem-autoscaler")
    role["rules"][0] |= {"resources": ["pods"], "verbs": ["get", "patch", "delete"]}
    binding = next(one for one in found if title(one) == "RoleBinding tandem-autoscaler")
    binding["subjects"].append({"kind": "ServiceAccount", "name": "tandem-gateway", "namespace": "tandem"})
    said = "\n".join(violations(found))
    assert "Role tandem-autoscaler may ['get', 'patch', 'delete'] ['pods']" in said
    assert "gives rights to ['tandem-autoscaler', 'tandem-gateway']" in said
    deployment = next(one for one in copied(objects) if title(one) == "StatefulSet tandem-prefill")
    deployment["spec"]["replicas"] = 2
    others = [one for one in objects if title(one) != "StatefulSet tandem-prefill"]
    assert "StatefulSet tandem-prefill has 2 replicas, and 1 autoscalers" in "\n".join(
        violations([*others, deployment])
    )
