"""Rendered manifests, and what the assertions about them ask: pods, selectors, ports, variables, policies."""

import functools
import json
import math
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Object: TypeAlias = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools" / "deploy"
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
NAME, COMPONENT, TRACK = "app.kubernetes.io/name", "app.kubernetes.io/component", "tandem/track"
WORKLOADS = ("Deployment", "StatefulSet", "Job")
EXCLUSIVE = (
    {"model-volume/claim", "model-volume/image"},
    {"model-volume/fetch", "model-volume/image"},
    {"external-redis", "redis-volume"},
    {"ingress", "tls"},
    {"ingress", "ingress-tls"},
    {"own number of workers", "keda", "hpa", "autoscaler"},
    {"tls", "autoscaler"},
    {"own tracks", "blue-green", "pools"},
    {"own tracks", "preflight"},
    {"pools", "preflight"},
    {"another namespace", "tls-certificates"},
)
"""Components of which one at most makes sense, and facts of overlays that some would contradict."""
REQUIRES = {
    "external-redis": "credentials",
    "ingress-tls": "tls",
    "model-volume/fetch": "model-volume/claim",
    "tls-certificates": "tls",
    "vllm": "gpu",
}
"""What is listed before a component."""
FIRST = ("autoscaler", "blue-green", "monitoring", "pools")
"""Components whose objects others change, so that they stand before them."""
FACTS = {
    "several-regions": {"own tracks", "own number of workers"},
    "one-gpu-node": {"own number of workers"},
    "confined-region": {"another namespace"},
}
CLUSTER_WIDE = ("Namespace", "PriorityClass")


def overlays() -> list[str]:
    """The names of all overlays."""
    return sorted(file.parent.name for file in (KUBERNETES / "overlays").glob("*/kustomization.yaml"))


def components() -> list[str]:
    """The names of all components, as paths below `components`."""
    root = KUBERNETES / "components"
    files = sorted(root.rglob("kustomization.yaml"))
    found = [file.parent for file in files if yaml.safe_load(file.read_text())["kind"] == "Component"]
    return [folder.relative_to(root).as_posix() for folder in found]


def included(folder: Path) -> set[str]:
    """The components that a kustomization has, by itself or by what it builds on."""
    document = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found: set[str] = set()
    for other in document.get("components", ()):
        target = (folder / other).resolve()
        found |= {target.relative_to(KUBERNETES / "components").as_posix()} | included(target)
    for other in document.get("resources", ()):
        target = (folder / other).resolve()
        found |= included(target) if target.is_dir() else set()
    return found


def combinations() -> list[tuple[str, str]]:
    """Every overlay alone (""), and with each component that it lacks and that excludes none of its own."""
    pairs = []
    for overlay in overlays():
        has = included(KUBERNETES / "overlays" / overlay) | FACTS.get(overlay, set())
        pairs.append((overlay, ""))
        for component in components():
            if component not in has and not any(len(one & (has | {component})) > 1 for one in EXCLUSIVE):
                pairs.append((overlay, component))
    return pairs


def render(folder: Path) -> list[Object]:
    """What `kubectl apply -k` would send. Raises AssertionError with kubectl's words."""
    command = [str(TOOLS / "bin" / "kubectl"), "kustomize", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    # What is deprecated is said there too.
    assert ran.stderr == "", ran.stderr
    return [one for one in yaml.load_all(ran.stdout, Loader=yaml.CSafeLoader) if one]


def render_with(overlay: str, component: str, tree: Path) -> list[Object]:
    """Renders an overlay of a user's own: a copy of one of ours, with a component more. `tree` is a copy of deploy/."""
    ours = KUBERNETES / "overlays" / overlay
    if not component:
        return render(ours)
    own = tree / "kubernetes" / "overlays" / f"{overlay}-with-{component.replace('/', '-')}"
    shutil.copytree(ours, own)
    document = yaml.safe_load((own / "kustomization.yaml").read_text())
    listed: list[str] = document.setdefault("components", [])
    for one in (REQUIRES.get(component), component):
        path = f"../../components/{one}"
        if one is not None and path not in listed:
            listed.insert(0 if one in FIRST else len(listed), path)
    (own / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return render(own)


@dataclass(frozen=True)
class Workload:
    """An object that makes pods."""

    object: Object

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.object["metadata"]["name"])

    @property
    def kind(self) -> str:
        """Deployment, StatefulSet or Job."""
        return str(self.object["kind"])

    @property
    def template(self) -> Object:
        """The template of its pods."""
        template: Object = self.object["spec"]["template"]
        return template

    @property
    def pod(self) -> Object:
        """The spec of its pods."""
        spec: Object = self.template["spec"]
        return spec

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels of its pods."""
        labels: Mapping[str, str] = self.template["metadata"].get("labels", {})
        return labels

    @property
    def component(self) -> str:
        """What its pods are: gateway, prefill, decode, redis, fetch, autoscaler."""
        return self.labels.get(COMPONENT, "")

    @property
    def replicas(self) -> int | None:
        """How many pods it has; None where an autoscaler says so."""
        return self.object["spec"].get("replicas")

    @property
    def containers(self) -> list[Object]:
        """All containers, those that run first included."""
        return [*self.pod.get("initContainers", ()), *self.pod["containers"]]

    @property
    def main(self) -> Object:
        """The container that does the work."""
        container: Object = self.pod["containers"][0]
        return container

    @functools.cached_property
    def ports(self) -> dict[str, int]:
        """The ports of its pods by name."""
        return {
            port["name"]: port["containerPort"] for container in self.containers for port in container.get("ports", ())
        }


def workloads(objects: Sequence[Object]) -> list[Workload]:
    """Everything that makes pods."""
    return [Workload(one) for one in objects if one["kind"] in WORKLOADS]


def of_kind(objects: Sequence[Object], *kinds: str) -> Iterator[Object]:
    """The objects of these kinds."""
    return (one for one in objects if one["kind"] in kinds)


def title(one: Object) -> str:
    """How messages call an object."""
    return f"{one['kind']} {one['metadata']['name']}"


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes a pod with these labels."""
    if not all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", ()):
        key, values = rule["key"], rule.get("values", ())
        is_met = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[rule["operator"]]
        if not is_met:
            return False
    return True


def selected(objects: Sequence[Object], selector: Mapping[str, Any]) -> list[Workload]:
    """The workloads whose pods a selector takes."""
    return [workload for workload in workloads(objects) if selects(selector, workload.labels)]


def config_maps(objects: Sequence[Object]) -> dict[str, dict[str, str]]:
    """The data of all ConfigMaps by name."""
    return {one["metadata"]["name"]: one.get("data", {}) for one in of_kind(objects, "ConfigMap")}


STAND_INS = {
    "metadata.name": "decode-0",
    "status.podIP": "10.1.2.3",
    "redis": "redis://tandem:password@redis.example.com:6379",
}
"""What fields of a pod and keys of Secrets are taken to hold."""


def variables(objects: Sequence[Object], container: Object, known: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment of a container as the kubelet makes it: later sources win, $(NAME) is what was set before.

    `known` has what a pod's fields and Secrets' keys hold; of others something is made up.
    """
    environment: dict[str, str] = {}
    maps = config_maps(objects)
    stand_ins = STAND_INS | {"metadata.namespace": next(of_kind(objects, "Namespace"))["metadata"]["name"]}
    stand_ins |= {"requests.cpu": str(math.ceil(float(container["resources"]["requests"]["cpu"].removesuffix("m"))))}
    stand_ins |= known
    for source in container.get("envFrom", ()):
        environment |= maps.get(source.get("configMapRef", {}).get("name"), {})
    for variable in container.get("env", ()):
        environment[variable["name"]] = _expanded(_value(variable, stand_ins), environment)
    return environment


def _value(variable: Object, stand_ins: Mapping[str, str]) -> str:
    source = variable.get("valueFrom")
    if source is None:
        return str(variable.get("value", ""))
    if "fieldRef" in source:
        return stand_ins[source["fieldRef"]["fieldPath"]]
    if "resourceFieldRef" in source:
        return stand_ins[source["resourceFieldRef"]["resource"]]
    return stand_ins.get(source["secretKeyRef"]["key"], "of a Secret")


def _expanded(value: str, environment: Mapping[str, str]) -> str:
    for name, known in environment.items():
        value = value.replace(f"$({name})", known)
    return value


def copied(objects: Sequence[Object]) -> list[Object]:
    """A copy that may be changed."""
    copy: list[Object] = json.loads(json.dumps(objects))
    return copy
