"""Every overlay, alone and with every component that it may have, renders, is valid, and keeps the rules."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from gateway.config import GatewayConfig
from gateway.operator_choices import pools
from tests.deploy.manifests import (
    DEPLOY,
    KUBERNETES,
    ROOT,
    TOOLS,
    Object,
    combinations,
    components,
    config_maps,
    copied,
    included,
    of_kind,
    overlays,
    render,
    render_with,
    variables,
    workloads,
)
from tests.deploy.rules import VERSION, violations
from tests.deploy.schemas import NEWEST, OLDEST, custom_mistakes, distinct, is_custom, mistakes

Rendered: TypeAlias = Mapping[tuple[str, str], Sequence[Object]]

pytestmark = pytest.mark.deploy
needs_npm = pytest.mark.skipif(not (TOOLS / "crds").exists(), reason="schemas of custom resources come from npm")


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    tree = tmp_path_factory.mktemp("kubernetes") / "deploy"
    shutil.copytree(DEPLOY, tree)
    pairs = combinations()
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(pairs, pool.map(lambda pair: render_with(*pair, tree), pairs), strict=True))


@pytest.fixture(scope="session")
def everything(rendered: Rendered) -> list[Object]:
    return distinct(one for objects in rendered.values() for one in objects)


def test_every_component_is_in_some_combination() -> None:
    tried = {component for _, component in combinations()}
    for overlay in overlays():
        tried |= included(KUBERNETES / "overlays" / overlay)
    assert set(components()) - tried == set()
    assert len(overlays()) >= 5
    assert len(combinations()) > 35


def test_the_page_names_everything() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    names = re.findall(r"^\| `([a-z/-]+)` \|", page, re.MULTILINE)
    assert sorted(names) == sorted([*overlays(), *components()])


def test_the_overlay_on_the_page_renders(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    example, runbook = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    shutil.copytree(DEPLOY, tmp_path / "tandem" / "deploy")
    own = tmp_path / "clusters" / "mine"
    own.mkdir(parents=True)
    whole = yaml.safe_load(example)
    for name, added in yaml.safe_load(runbook).items():
        whole.setdefault(name, []).extend(added)
    (own / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    objects = render(own)
    (rules,) = of_kind(objects, "PrometheusRule")
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    for alert in alerts:
        url = f"https://wiki.example.com/tandem/runbook#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == url
    assert not [one for one in of_kind(objects, "ConfigMap") if one["metadata"]["name"].startswith("runbook")]
    images = {one.main["image"] for one in workloads(objects) if one.component != "redis"}
    assert images == {f"registry.example.com/{name}:{VERSION}" for name in ("tandem-gateway", "tandem-worker-cuda")}
    assert violations(objects) == []


def test_the_metrics_of_plain_autoscalers_exist(rendered: Rendered) -> None:
    adapter = yaml.safe_load((KUBERNETES / "components" / "hpa" / "prometheus-adapter.yaml").read_text())["rules"]
    made = {rule["name"]["as"] for kind in ("custom", "external") for rule in adapter[kind]}
    asked = set()
    for one in of_kind(rendered["cpu-demo", "hpa"], "HorizontalPodAutoscaler"):
        for metric in one["spec"]["metrics"]:
            asked |= {metric[kind]["metric"]["name"] for kind in ("pods", "external") if kind in metric}
    assert asked == made
    page = (ROOT / "docs" / "metrics.md").read_text()
    for kind in ("custom", "external"):
        for rule in adapter[kind]:
            series = re.sub("(_bucket)?[{].*", "", rule["seriesQuery"])
            assert f"`{series}`" in page


def test_the_rules_hold_everywhere(rendered: Rendered) -> None:
    broken = {pair: found for pair, objects in rendered.items() if (found := violations(objects))}
    assert broken == {}


def test_an_autoscaler_has_the_secrets_of_a_cluster_that_has_some(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    own = tmp_path / "deploy" / "kubernetes" / "overlays" / "own"
    own.mkdir()
    names = ["autoscaler", "credentials", "external-redis"]
    components = [f"../../components/{name}" for name in names]
    whole = {"resources": ["../../base"], "namespace": "tandem", "components": components}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    objects = render(own)
    assert violations(objects) == []
    (autoscaler,) = [one for one in workloads(objects) if one.component == "autoscaler"]
    given = {one["name"]: one for one in autoscaler.main["env"]}
    assert given["TANDEM_REDIS"]["valueFrom"]["secretKeyRef"] == {"name": "tandem-credentials", "key": "redis"}
    workers = [one for one in workloads(objects) if one.component in ("prefill", "decode")]
    assert [one.replicas for one in workers] == [None, None]


def test_gateways_read_which_requests_the_workers_of_a_pool_are_for(rendered: Rendered, tmp_path: Path) -> None:
    objects = rendered["several-nodes", "pools"]
    (text,) = [one["pools.toml"] for one in config_maps(objects).values() if "pools.toml" in one]
    (tmp_path / "pools.toml").write_text(text)
    known = {pool.name for pool in pools(GatewayConfig(model=ROOT / "demo" / "model", pools=tmp_path / "pools.toml"))}
    labels = {
        one.name: variables(objects, one.main).get("TANDEM_POOL")
        for one in workloads(objects)
        if one.component in ("prefill", "decode")
    }
    assert labels == {
        "tandem-prefill": None,
        "tandem-prefill-batch": "batch",
        "tandem-decode": None,
        "tandem-decode-batch": "batch",
    }
    assert known == {"batch"}


def test_the_base_needs_no_custom_resource() -> None:
    assert [one for one in render(KUBERNETES / "overlays" / "cpu-demo") if is_custom(one)] == []


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_schemas_hold(everything: list[Object], tmp_path: Path, version: str) -> None:
    assert len(everything) > 150
    assert mistakes(everything, tmp_path, version=version) == []


@needs_npm
def test_schemas_of_custom_resources_hold(everything: list[Object]) -> None:
    kinds = {one["kind"] for one in everything if is_custom(one)}
    assert {"ScaledObject", "PodMonitor", "ServiceMonitor", "Certificate", "Issuer", "HTTPRoute", "GRPCRoute"} <= kinds
    assert custom_mistakes(everything) == []


def test_schemas_find_mistakes(tmp_path: Path) -> None:
    objects = render(KUBERNETES / "base")
    unknown, wrong, missing = (copied(list(of_kind(objects, "StatefulSet"))) for _ in range(3))
    unknown[0]["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    wrong[0]["spec"]["replicas"] = "two"
    del missing[0]["spec"]["selector"]
    for number, broken in enumerate((unknown, wrong, missing)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert len(mistakes(broken, folder, version=NEWEST)) == 1


@needs_npm
@pytest.mark.parametrize(
    ("kind", "member", "value", "said"),
    [
        ("ScaledObject", "maxReplicas", 4, "maxReplicas"),
        ("ScaledObject", "minReplicaCount", "2", "integer"),
        ("PodMonitor", "selectors", {}, "selectors"),
        ("Certificate", "secretName", None, "secretName"),
        ("HTTPRoute", "hostnames", ["not a name"], "hostnames"),
        ("GRPCRoute", "timeouts", {}, "timeouts"),
    ],
)
def test_schemas_of_custom_resources_find_mistakes(
    everything: list[Object], kind: str, member: str, value: Any, said: str
) -> None:
    broken = copied([next(of_kind(everything, kind))])
    assert custom_mistakes(broken) == []
    broken[0]["spec"][member] = value
    if value is None:
        del broken[0]["spec"][member]
    found = custom_mistakes(broken)
    assert len(found) == 1
    assert said in found[0]


def test_a_changed_setting_rolls_the_pods(tmp_path: Path) -> None:
    tree = tmp_path / "deploy"
    shutil.copytree(DEPLOY, tree)
    before = {one.name: one.template for one in workloads(render(tree / "kubernetes" / "base"))}
    with (tree / "kubernetes" / "base" / "shared" / "decode.env").open("a") as file:
        file.write("TANDEM_MAX_BATCH=32\n")
    after = {one.name: one.template for one in workloads(render(tree / "kubernetes" / "base"))}
    assert [name for name in before if before[name] != after[name]] == ["tandem-decode"]


def test_workers_of_one_cluster_have_different_ids(rendered: Rendered) -> None:
    for objects in rendered.values():
        names = [one.name for one in workloads(objects)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("folder", ["base", *(f"overlays/{name}" for name in overlays())])
def test_the_kubectl_of_the_machine_renders_the_same(folder: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("this machine has no kubectl of its own")
    ran = subprocess.run([kubectl, "kustomize", str(KUBERNETES / folder)], capture_output=True, text=True, check=True)
    own = subprocess.run(
        [str(TOOLS / "bin" / "kubectl"), "kustomize", str(KUBERNETES / folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == own.stdout
