"""What must hold of every rendered overlay: each rule takes the objects and returns what breaks it, in words.

`test_rules.py` breaks each of them once. Formulas of times are in `planning.pods`.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from decode_worker.config import DecodeWorkerConfig
from gateway.config import GatewayConfig
from planning.autoscaler.config import AutoscalerConfig
from planning.pods import ENDPOINT_LAG_S, grace_s, handover_s, longest_work_s
from prefill_worker.config import PrefillWorkerConfig
from services.runtime import config
from services.runtime.errors import ConfigError
from services.runtime.kinds import size_bytes
from services.runtime.model_size import start_budget_s
from tests.deploy.manifests import (
    CLUSTER_WIDE,
    COMPONENT,
    NAME,
    ROOT,
    TRACK,
    Object,
    Workload,
    of_kind,
    selected,
    selects,
    title,
    variables,
    workloads,
)
from tests.deploy.network import flows

Rule = Callable[[Sequence[Object]], Iterator[str]]

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
AUTOSCALER = "autoscaler"
PROGRAMS: dict[str, type] = {
    "gateway": GatewayConfig,
    "prefill": PrefillWorkerConfig,
    "decode": DecodeWorkerConfig,
    AUTOSCALER: AutoscalerConfig,
}
WORKERS = ("prefill", "decode")
PORT_VARIABLES = {
    "gateway": {"TANDEM_HTTP_PORT": "http", "TANDEM_GRPC_PORT": "grpc", "TANDEM_ADMIN_PORT": "metrics"},
    "prefill": {"TANDEM_PORT": "grpc", "TANDEM_TRANSFER_PORT": "transfer", "TANDEM_METRICS_PORT": "metrics"},
    "decode": {"TANDEM_PORT": "grpc", "TANDEM_TRANSFER_PORT": "transfer", "TANDEM_METRICS_PORT": "metrics"},
}
SERVING = frozenset(("gateway", *WORKERS))
CLIENTS = SERVING | {AUTOSCALER}
"""What dials Redis; an autoscaler is not in every cluster."""
MEANT = {
    "Service tandem-gateway": {"gateway"},
    "Service tandem-gateway-metrics": {"gateway"},
    "Service tandem-gateways": {"gateway"},
    "NetworkPolicy tandem-autoscaler": {AUTOSCALER},
    "NetworkPolicy tandem-autoscaled-gateways": {"gateway"},
    "Service tandem-prefill": {"prefill"},
    "Service tandem-decode": {"decode"},
    "Service tandem-redis": {"redis"},
    "PodMonitor tandem-workers": set(WORKERS),
    "NetworkPolicy tandem-default-deny": None,
    "NetworkPolicy tandem-dns": CLIENTS,
    "NetworkPolicy tandem-gateway": {"gateway"},
    "NetworkPolicy tandem-prefill": {"prefill"},
    "NetworkPolicy tandem-decode": {"decode"},
    "NetworkPolicy tandem-redis": {"redis"},
    "NetworkPolicy tandem-redis-clients": CLIENTS,
    "NetworkPolicy tandem-external-redis": CLIENTS,
    "NetworkPolicy tandem-metrics": SERVING,
    "NetworkPolicy tandem-traces": SERVING,
    "NetworkPolicy tandem-fetch": {"fetch"},
}
"""Which pods an object means; None: all of Tandem's."""
GIVEN_SECRETS = {"tandem-credentials", "tandem-redis-users", "tandem-public-tls", "tandem-fetch-token"}
GIVEN_TLS = {"tandem-gateway-tls", "tandem-prefill-tls", "tandem-decode-tls"}
"""Secrets that an operator makes; the second ones only where cert-manager does not."""
VOLUME_TYPES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""What the profile "restricted" of Kubernetes' pod security standards lets a pod mount."""
MAX_REQUEST_S = 600.0


def selectors_mean_their_pods(objects: Sequence[Object]) -> Iterator[str]:
    """Every selector takes exactly the pods that it means: of Services, monitors, policies, spreads, workloads."""
    for one in of_kind(objects, "Service", "PodMonitor", "NetworkPolicy"):
        spec = one["spec"]
        selector = {"matchLabels": spec["selector"]} if one["kind"] == "Service" else spec.get("selector")
        if one["kind"] == "NetworkPolicy":
            selector = spec["podSelector"]
        found = {workload.component for workload in selected(objects, selector or {})}
        if title(one) not in MEANT:
            yield f"{title(one)} is not in the table of what selectors mean"
            continue
        meant = MEANT[title(one)]
        present = {workload.component for workload in workloads(objects)}
        meant = present if meant is None else meant - ({AUTOSCALER} - present)
        if found != meant:
            yield f"{title(one)} selects {sorted(found)}, but means {sorted(meant)}"
    for workload in workloads(objects):
        own = [workload.name]
        constraints = [constraint["labelSelector"] for constraint in workload.pod.get("topologySpreadConstraints", ())]
        selector = workload.object["spec"].get("selector")
        for each in [*constraints, *([selector] if selector else [])]:
            if [other.name for other in selected(objects, each)] != own:
                yield f"{title(workload.object)} has a selector that takes {selected(objects, each)}"
        if not constraints and workload.component in SERVING:
            yield f"{title(workload.object)} does not spread its pods"


def budgets_protect_what_serves(objects: Sequence[Object]) -> Iterator[str]:
    """Every gateway and worker has one PodDisruptionBudget, of its own, under which a node can still be drained."""
    protected: list[str] = []
    for budget in of_kind(objects, "PodDisruptionBudget"):
        names = [workload.name for workload in selected(objects, budget["spec"]["selector"])]
        if len(names) != 1:
            yield f"{title(budget)} selects {names}, not the pods of one workload"
        if budget["spec"].get("maxUnavailable") != 1:
            yield f"{title(budget)} does not let one pod at a time go, so a node with a single one is never drained"
        protected += names
    serving = [workload.name for workload in workloads(objects) if workload.component in SERVING]
    if sorted(protected) != sorted(serving):
        yield f"budgets protect {sorted(protected)}, but {sorted(serving)} serve"


def ports_agree(objects: Sequence[Object]) -> Iterator[str]:
    """The port of a Service, of a container, of a probe, of a monitor and of the program's settings is one number."""
    for service in of_kind(objects, "Service"):
        for workload in selected(objects, {"matchLabels": service["spec"]["selector"]}):
            for port in service["spec"]["ports"]:
                number = workload.ports.get(port["targetPort"], port["targetPort"])
                if number not in workload.ports.values():
                    yield f"{title(service)}: port {port['name']} leads to {number}, which {workload.name} has not"
                elif number != port["port"]:
                    yield f"{title(service)}: port {port['port']} is {number} of {workload.name}"
    for workload in workloads(objects):
        for probe_name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = workload.main.get(probe_name, {})
            for how in ("httpGet", "tcpSocket", "grpc", "exec"):
                asked = probe.get(how, {}).get("port")
                if how in probe and how == "exec":
                    asked = int(probe["exec"]["command"][-1].rpartition(":")[2])
                if asked is not None and workload.ports.get(asked, asked) not in workload.ports.values():
                    yield f"{title(workload.object)}: {probe_name} asks port {asked}, which its container has not"
        environment = variables(objects, workload.main)
        for variable, name in PORT_VARIABLES.get(workload.component, {}).items():
            if str(workload.ports.get(name)) != environment.get(variable):
                said = environment.get(variable)
                has = workload.ports.get(name)
                yield f"{title(workload.object)}: {variable} is {said}, but its port {name} is {has}"
    yield from _monitors_find_ports(objects)
    yield from _routes_find_ports(objects)


def _monitors_find_ports(objects: Sequence[Object]) -> Iterator[str]:
    for monitor in of_kind(objects, "PodMonitor"):
        for workload in selected(objects, monitor["spec"]["selector"]):
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                if endpoint["port"] not in workload.ports:
                    yield f"{title(monitor)} scrapes a port {endpoint['port']}, which {workload.name} has not"
    for monitor in of_kind(objects, "ServiceMonitor"):
        services = [
            one
            for one in of_kind(objects, "Service")
            if selects(monitor["spec"]["selector"], one["metadata"].get("labels", {}))
        ]
        if len(services) != 1:
            yield f"{title(monitor)} selects {len(services)} Services"
        for service in services:
            names = {port["name"] for port in service["spec"]["ports"]}
            for endpoint in monitor["spec"]["endpoints"]:
                if endpoint["port"] not in names:
                    yield f"{title(monitor)} scrapes a port {endpoint['port']}, which {title(service)} has not"


def _routes_find_ports(objects: Sequence[Object]) -> Iterator[str]:
    services = {
        (one["metadata"]["name"], port["port"]) for one in of_kind(objects, "Service") for port in one["spec"]["ports"]
    }
    for route in of_kind(objects, "HTTPRoute", "GRPCRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                if (backend["name"], backend["port"]) not in services:
                    yield f"{title(route)} leads to {backend['name']}:{backend['port']}, which no Service has"


def policies_let_pass_what_is_dialled(objects: Sequence[Object]) -> Iterator[str]:
    """Both sides' policies let pass exactly what Tandem dials, and nothing else."""
    components = {workload.component for workload in workloads(objects)}
    expected = {
        ("anybody", "gateway", 8000),
        ("anybody", "gateway", 50051),
        ("gateway", "prefill", 7000),
        ("gateway", "decode", 7000),
        *((sender, receiver, port) for sender in WORKERS for receiver in WORKERS for port in (7000, 7001)),
        *((component, "DNS", 53) for component in components - {"redis"}),
    }
    if "redis" in components:
        expected |= {(component, "redis", 6379) for component in CLIENTS & components}
    else:
        expected |= {(component, "10.0.0.0/8", port) for component in CLIENTS & components for port in (6379, 26379)}
    if AUTOSCALER in components:
        expected |= {(AUTOSCALER, "gateway", 9000), (AUTOSCALER, "anybody", 443), (AUTOSCALER, "anybody", 6443)}
    names = {one["metadata"]["name"] for one in of_kind(objects, "NetworkPolicy")}
    if "tandem-metrics" in names:
        expected |= {("monitoring", component, 9000) for component in SERVING}
    if "tandem-traces" in names:
        expected |= {(component, "observability", 4317) for component in SERVING}
    if "fetch" in components:
        expected.add(("fetch", "anybody", 443))
    found, one_sided = flows(objects)
    yield from (f"only one side lets pass: {flow}" for flow in sorted(one_sided, key=str))
    yield from (f"no policy lets pass: {flow}" for flow in sorted(expected - found, key=str))
    yield from (f"policies let pass: {flow}" for flow in sorted(found - expected, key=str))


def graces_suffice(objects: Sequence[Object]) -> Iterator[str]:
    """Every pod has the time that `planning.pods` says it needs to end in order, and its program uses it."""
    for workload in workloads(objects):
        if workload.component not in SERVING:
            continue
        environment = variables(objects, workload.main)
        max_request_s = MAX_REQUEST_S
        if workload.component == "gateway":
            max_request_s = float(environment.get("TANDEM_MAX_REQUEST_S", MAX_REQUEST_S))
            drain_s = float(environment.get("TANDEM_DRAIN_S", 30))
            lag_s = float(workload.main.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
            if lag_s < ENDPOINT_LAG_S:
                yield f"{title(workload.object)} sleeps {lag_s:g} s before its end, not {ENDPOINT_LAG_S:g} s"
        else:
            drain_s, lag_s = float(environment.get("TANDEM_DRAIN_TIMEOUT", "inf")), 0.0
            pool = size_bytes().parse(environment.get("TANDEM_KV_MEMORY", "1GiB"))
            if drain_s < handover_s(pool):
                yield f"{title(workload.object)} drains for {drain_s:g} s, in which its KV cache cannot move"
        can = _can_hand_over(workload, objects)
        needed_s = longest_work_s(max_request_s=max_request_s, drain_s=drain_s, can_hand_over=can)
        if drain_s < needed_s:
            drains = f"{title(workload.object)} drains for {drain_s:g} s"
            yield f"{drains}, but nobody takes over its answers: {needed_s:g} s"
        has_s = workload.pod.get("terminationGracePeriodSeconds", 30)
        if has_s < grace_s(needed_s, endpoint_lag_s=lag_s):
            needs_s = grace_s(needed_s, endpoint_lag_s=lag_s)
            yield f"{title(workload.object)} has {has_s} s to end, and needs {needs_s:g} s"


def _can_hand_over(workload: Workload, objects: Sequence[Object]) -> bool:
    """Whether others take over what it has: prompts, always; answers, where its pool's only track has more workers."""
    if workload.component == "gateway":
        return False
    pool = _pool(objects, workload)
    decode = [one for one in workloads(objects) if one.component == "decode" and _pool(objects, one) == pool]
    tracks = {one.labels.get(TRACK) for one in decode}
    # The last one of a track, when the track is ended, has none beside it.
    return workload.component == "prefill" or (workload.replicas != 1 and len(tracks) == 1)


def _pool(objects: Sequence[Object], workload: Workload) -> str:
    return variables(objects, workload.main).get("TANDEM_POOL", "")


def probes_mean_one_thing(objects: Sequence[Object]) -> Iterator[str]:
    """Liveness never depends on peers, readiness says whether work should come, a start has the weights' time."""
    for workload in workloads(objects):
        if workload.component not in SERVING:
            continue
        name, container = title(workload.object), workload.main
        asked = {probe: _asked(container.get(f"{probe}Probe", {})) for probe in ("startup", "liveness", "readiness")}
        alive, ready = ("/health", "/ready") if workload.component == "gateway" else ("live", "ready")
        if asked != {"startup": alive, "liveness": alive, "readiness": ready}:
            yield f"{name} is asked {asked}"
        if workload.component == "gateway":
            continue
        probe = container.get("startupProbe", {})
        budget_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        weights = workload.template["metadata"].get("annotations", {}).get("tandem/weights")
        if weights is None:
            yield f"{name} does not say how large its weights are"
        elif budget_s < (needed_s := start_budget_s(size_bytes().parse(weights))):
            yield f"{name} has {budget_s} s to start, and {weights} need {needed_s:.0f} s"


def _asked(probe: Object) -> str:
    """What a probe asks: a path, or whether a worker is live or ready."""
    if "httpGet" in probe:
        return str(probe["httpGet"]["path"])
    if "grpc" in probe:
        return {"": "live", "readiness": "ready"}.get(probe["grpc"].get("service", ""), "something else")
    if "exec" in probe:
        return str(next((word for word in probe["exec"]["command"] if word in ("live", "ready")), "something else"))
    return "nothing"


def images_have_versions(objects: Sequence[Object]) -> Iterator[str]:
    """Every image has a version for its tag, and Tandem's own the project's."""
    for workload in workloads(objects):
        images = [container["image"] for container in workload.containers]
        images += [volume["image"]["reference"] for volume in workload.pod.get("volumes", ()) if "image" in volume]
        for image in images:
            name, _, tag = image.rpartition("/")[2].partition(":")
            if not re.match(r"\d+\.\d+\.\d+", tag):
                yield f"{title(workload.object)}: {image} has no version for its tag"
            elif name.startswith("tandem-") and tag.partition("-")[0] != VERSION:
                yield f"{title(workload.object)}: {image} is not of version {VERSION}"


def pods_are_restricted(objects: Sequence[Object]) -> Iterator[str]:
    """Pods keep to the profile "restricted", read-only roots and no token; the namespace enforces it."""
    for namespace in of_kind(objects, "Namespace"):
        if namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"{title(namespace)} does not enforce restricted"
    for account in of_kind(objects, "ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"{title(account)} has a token"
    for workload in workloads(objects):
        yield from (f"{title(workload.object)}: {what}" for what in _unrestricted(workload))


def _unrestricted(workload: Workload) -> Iterator[str]:
    pod = workload.pod
    if pod.get("automountServiceAccountToken") is not False:
        yield "its pods have a token"
    if pod.get("enableServiceLinks") is not False:
        yield "its pods get variables made of the names of Services, which would be taken for settings"
    yield from (f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC", "hostUsers") if pod.get(key))
    for volume in pod.get("volumes", ()):
        if not set(volume) - {"name"} <= VOLUME_TYPES:
            yield f"volume {volume['name']} is of a kind that restricted refuses"
    shared = pod.get("securityContext", {})
    for container in workload.containers:
        own = container.get("securityContext", {})
        both = shared | own
        if both.get("runAsNonRoot") is not True or not both.get("runAsUser"):
            yield f"{container['name']} may run as root"
        if both.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{container['name']} has no seccomp profile"
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{container['name']} may gain privileges"
        if own.get("capabilities", {}) != {"drop": ["ALL"]}:
            yield f"{container['name']} has capabilities"
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']} may write to its root"
        yield from (
            f"{container['name']} takes port {one['hostPort']} of its node"
            for one in container.get("ports", ())
            if "hostPort" in one
        )


def rights_are_those_of_the_autoscaler(objects: Sequence[Object]) -> Iterator[str]:
    """Nobody but an autoscaler has a token, and its rights are to scale what it scales."""
    for workload in workloads(objects):
        sources = [
            one for volume in workload.pod.get("volumes", ()) for one in volume.get("projected", {}).get("sources", ())
        ]
        if any("serviceAccountToken" in source for source in sources) and workload.component != AUTOSCALER:
            yield f"{title(workload.object)} has a token"
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        named = [one["name"] for one in binding["subjects"]]
        if named != ["tandem-autoscaler"] or binding["kind"] == "ClusterRoleBinding":
            yield f"{title(binding)} gives rights to {named}"
    for role in of_kind(objects, "Role", "ClusterRole"):
        for rule in role["rules"]:
            if rule["resources"] != ["statefulsets/scale"] or set(rule["verbs"]) != {"get", "patch"}:
                yield f"{title(role)} may {rule['verbs']} {rule['resources']}"


def settings_exist(objects: Sequence[Object]) -> Iterator[str]:
    """Each program accepts its environment: every variable exists and keeps its rule, and none names one after it."""
    for workload in workloads(objects):
        for container in workload.containers:
            for name, value in variables(objects, container).items():
                if "$(" in value:
                    yield f"{title(workload.object)}: {name} is {value}, which names a variable not set before it"
        program = PROGRAMS.get(workload.component)
        if program is None:
            continue
        environment = variables(objects, workload.main)
        known = {setting.variable for setting in config.all_settings_of(program)}
        for name in environment:
            if name.startswith("TANDEM_") and name not in known:
                yield f"{title(workload.object)}: {name} is no setting of its program"
        yield from _refused(workload, environment, program)


def _refused(workload: Workload, environment: dict[str, str], program: type[object]) -> Iterator[str]:
    model = Path(environment.get("TANDEM_MODEL", ""))
    has_model = any(setting.variable == "TANDEM_MODEL" for setting in config.all_settings_of(program))
    mounts = [mount["mountPath"] for mount in workload.main.get("volumeMounts", ())]
    if has_model and not str(model).startswith(
        ("/opt/tandem/models/", *(f"{mount}/" for mount in mounts if mount != "/tmp"))
    ):
        yield f"{title(workload.object)}: TANDEM_MODEL is {model}, where neither its image nor a volume has anything"
    # The model's folder is not on this machine.
    at_hand = environment | {"TANDEM_MODEL": str(ROOT / "demo" / "model")}
    at_hand |= {
        name: "" for name in ("TANDEM_TLS_CERT", "TANDEM_TLS_KEY", "TANDEM_TLS_CA", "TANDEM_CLUSTER_SECRET_FILE")
    }
    if environment.get("TANDEM_TLS_CERT"):
        if environment.get("TANDEM_INSECURE") == "true":
            yield f"{title(workload.object)}: TANDEM_INSECURE leaves pages unencrypted beside TLS"
        at_hand["TANDEM_INSECURE"] = "true" if workload.component in WORKERS else ""
    try:
        config.read(program, {}, environ={name: value for name, value in at_hand.items() if name.startswith("TANDEM_")})
    except ConfigError as error:
        yield f"{title(workload.object)}: {error.message}"


def preflight_sees_what_the_worker_gets(objects: Sequence[Object]) -> Iterator[str]:
    """A container that judges a worker's start has the worker's image, variables, mounts and limits, and its ports."""
    for workload in workloads(objects):
        for judge in workload.pod.get("initContainers", ()):
            asked = next((word for word in judge.get("args", ()) if word.startswith("--ports=")), "no ports")
            if asked != f"--ports={','.join(map(str, workload.ports.values()))}":
                yield f"{title(workload.object)}: {judge['name']} looks at {asked}"
            for member in ("image", "env", "envFrom", "volumeMounts", "resources"):
                if judge.get(member) != workload.main.get(member):
                    yield f"{title(workload.object)}: {judge['name']} has another {member} than {workload.main['name']}"


def references_exist(objects: Sequence[Object]) -> Iterator[str]:
    """Whatever an object names exists: ConfigMaps, Secrets, claims, accounts, priorities, volumes, targets, issuers."""
    there = {title(one) for one in objects}
    made = {one["spec"]["secretName"] for one in of_kind(objects, "Certificate")}
    given = GIVEN_SECRETS | made | (set() if made else GIVEN_TLS)
    for workload in workloads(objects):
        name = title(workload.object)
        yield from (
            f"{name} names {what}, which does not exist"
            for what in _named(workload)
            if what not in there | {f"Secret {one}" for one in given}
        )
        volumes = {volume["name"] for volume in workload.pod.get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in workload.object["spec"].get("volumeClaimTemplates", ())}
        mounted = {mount["name"] for container in workload.containers for mount in container.get("volumeMounts", ())}
        yield from (f"{name} mounts {one}, which is no volume of it" for one in sorted(mounted - volumes))
        yield from (f"{name} has a volume {one} that nothing mounts" for one in sorted(volumes - mounted))
        for container in workload.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            yield from (
                f"{name} mounts two volumes at {path}"
                for path in sorted({one for one in paths if paths.count(one) > 1})
            )
    for scaler in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        if f"{target['kind']} {target['name']}" not in there:
            yield f"{title(scaler)} scales {target['kind']} {target['name']}, which does not exist"
    for certificate in of_kind(objects, "Certificate"):
        issuer = certificate["spec"]["issuerRef"]
        if f"{issuer['kind']} {issuer['name']}" not in there:
            yield f"{title(certificate)} is issued by {issuer['name']}, which does not exist"


def _named(workload: Workload) -> Iterator[str]:
    pod = workload.pod
    if "serviceAccountName" in pod:
        yield f"ServiceAccount {pod['serviceAccountName']}"
    if "priorityClassName" in pod:
        yield f"PriorityClass {pod['priorityClassName']}"
    if workload.kind == "StatefulSet":
        yield f"Service {workload.object['spec']['serviceName']}"
    for volume in pod.get("volumes", ()):
        if "configMap" in volume:
            yield f"ConfigMap {volume['configMap']['name']}"
        if "secret" in volume:
            yield f"Secret {volume['secret']['secretName']}"
        if "persistentVolumeClaim" in volume:
            yield f"PersistentVolumeClaim {volume['persistentVolumeClaim']['claimName']}"
    for container in workload.containers:
        for source in container.get("envFrom", ()):
            yield f"ConfigMap {source['configMapRef']['name']}"
        for variable in container.get("env", ()):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                yield f"Secret {variable['valueFrom']['secretKeyRef']['name']}"


def autoscalers_own_the_number(objects: Sequence[Object]) -> Iterator[str]:
    """What an autoscaler scales names no number itself, which each apply would set back; everything else does."""
    scaled = [
        f"{one['spec']['scaleTargetRef']['kind']} {one['spec']['scaleTargetRef']['name']}"
        for one in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
    ]
    kinds = {"statefulsets": "StatefulSet", "deployments": "Deployment"}
    for own in (one for one in workloads(objects) if one.component == AUTOSCALER):
        settings = config.read(AutoscalerConfig, {}, environ=variables(objects, own.main))
        targets = [name.split("/") for name in (settings.prefill_workload, settings.decode_workload)]
        scaled += [f"{kinds[kind]} {name}" for kind, name in targets]
        if min(settings.min_prefill, settings.min_decode) < 2:
            yield f"{title(own.object)} may leave a single pod, which nobody takes over from"
    yield from (f"{name} is scaled twice" for name in sorted({one for one in scaled if scaled.count(one) > 1}))
    for workload in workloads(objects):
        if workload.kind == "Job":
            continue
        name = title(workload.object)
        if (workload.replicas is None) != (name in scaled):
            yield f"{name} has {workload.replicas} replicas, and {scaled.count(name)} autoscalers"
    for one in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        least = one["spec"].get("minReplicas", one["spec"].get("minReplicaCount", 1))
        if least < 2:
            yield f"{title(one)} may leave a single pod, which nobody takes over from"


def resources_are_named(objects: Sequence[Object]) -> Iterator[str]:
    """Every container asks for processor time and memory, and has a limit of memory."""
    for workload in workloads(objects):
        for container in workload.containers:
            asked = container.get("resources", {})
            if not {"cpu", "memory"} <= set(asked.get("requests", {})) or "memory" not in asked.get("limits", {}):
                yield f"{title(workload.object)}: {container['name']} does not say what it needs"
            if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
                yield f"{title(workload.object)}: {container['name']} may end without last words"


def tls_is_spoken(objects: Sequence[Object]) -> Iterator[str]:
    """Whatever asks a program that has a certificate speaks TLS: probes, monitors, routes; and only then."""
    for workload in (one for one in workloads(objects) if one.component in SERVING):
        has_tls = bool(variables(objects, workload.main).get("TANDEM_TLS_CERT"))
        for probe_name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = workload.main.get(probe_name, {})
            speaks = probe.get("httpGet", {}).get("scheme") == "HTTPS" or "exec" in probe
            if probe and speaks != has_tls:
                yield f"{title(workload.object)}: {probe_name} {'speaks' if speaks else 'does not speak'} TLS"
        if workload.component != "gateway":
            continue
        for monitor in of_kind(objects, "ServiceMonitor"):
            if any((one.get("scheme") == "https") != has_tls for one in monitor["spec"]["endpoints"]):
                yield f"{title(monitor)} does not speak as {workload.name} does"
        has_routes = any(of_kind(objects, "HTTPRoute", "GRPCRoute"))
        if has_routes and has_tls != any(of_kind(objects, "BackendTLSPolicy")):
            yield f"the routes do not speak as {workload.name} does"
        for service in (one for one in of_kind(objects, "Service") if title(one) == "Service tandem-gateway"):
            if any((port["appProtocol"] == "https") != has_tls for port in service["spec"]["ports"]):
                yield f"{title(service)} does not say what its ports speak"


def names_are_let_in(objects: Sequence[Object]) -> Iterator[str]:
    """A gateway lets in every name under which the manifests have clients dial it, and certificates are for it."""
    for gateway in (one for one in workloads(objects) if one.component == "gateway"):
        allowed = variables(objects, gateway.main).get("TANDEM_ALLOWED_HOSTS", "").split(",")
        space = gateway.object["metadata"]["namespace"]
        dialled = [
            f"tandem-gateway{rest}" for rest in ("", *(f".{space}{end}" for end in ("", ".svc", ".svc.cluster.local")))
        ]
        for route in of_kind(objects, "HTTPRoute", "GRPCRoute"):
            dialled += route["spec"]["hostnames"]
        yield from (f"{title(gateway.object)} refuses requests for {name}" for name in dialled if name not in allowed)
    for certificate in of_kind(objects, "Certificate"):
        role = certificate["metadata"]["name"].removeprefix("tandem-")
        if role in SERVING and certificate["spec"].get("uris") != [f"spiffe://tandem/{role}"]:
            yield f"{title(certificate)} does not name the role {role}"
        for workload in (one for one in workloads(objects) if one.component == role and role in WORKERS):
            advertised = variables(objects, workload.main)["TANDEM_ADVERTISE_HOST"]
            wildcard = f"*.{advertised.partition('.')[2]}"
            if not {wildcard, "localhost"} <= set(certificate["spec"]["dnsNames"]):
                yield f"{title(certificate)} is not for {advertised}, which {workload.name} advertises"


def namespaces_agree(objects: Sequence[Object]) -> Iterator[str]:
    """Everything is in the one namespace that is made, and labelled as Tandem's where pods are."""
    names = [one["metadata"]["name"] for one in of_kind(objects, "Namespace")]
    if len(names) != 1:
        yield f"there are the namespaces {names}"
    for one in objects:
        has = one["metadata"].get("namespace")
        if one["kind"] not in CLUSTER_WIDE and has not in names:
            yield f"{title(one)} is in the namespace {has}"
    for workload in workloads(objects):
        if workload.labels.get(NAME) != "tandem" or not workload.component:
            yield f"{title(workload.object)} lacks the labels {NAME} and {COMPONENT}"
    titles = [title(one) for one in objects]
    yield from (f"{one} exists twice" for one in sorted({one for one in titles if titles.count(one) > 1}))


def queries_name_metrics(objects: Sequence[Object]) -> Iterator[str]:
    """Every metric that an autoscaler or an alert asks for is one that docs/metrics.md lists."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    queries = [
        trigger["metadata"]["query"] for one in of_kind(objects, "ScaledObject") for trigger in one["spec"]["triggers"]
    ]
    for query in queries:
        for metric in sorted(set(re.findall(r"\btandem_[a-z0-9_]+", query))):
            if f"`{metric}`" not in page and f"`{re.sub('_(bucket|sum|count)$', '', metric)}`" not in page:
                yield f"a query asks for {metric}, which no program has"


RULES: tuple[Rule, ...] = (
    selectors_mean_their_pods,
    budgets_protect_what_serves,
    ports_agree,
    policies_let_pass_what_is_dialled,
    graces_suffice,
    probes_mean_one_thing,
    images_have_versions,
    pods_are_restricted,
    rights_are_those_of_the_autoscaler,
    settings_exist,
    preflight_sees_what_the_worker_gets,
    references_exist,
    autoscalers_own_the_number,
    resources_are_named,
    tls_is_spoken,
    names_are_let_in,
    namespaces_agree,
    queries_name_metrics,
)


def violations(objects: Sequence[Object]) -> list[str]:
    """Everything that breaks any rule."""
    return [f"{rule.__name__}: {what}" for rule in RULES for what in rule(objects)]
