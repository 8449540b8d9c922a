"""Checks of manifests against the schemas of Kubernetes and of custom resources; no member may be unknown."""

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.deploy.manifests import TOOLS, Object

CUSTOM_GROUPS = ("cert-manager.io", "gateway.networking.k8s.io", "keda.sh", "monitoring.coreos.com")
OLDEST, NEWEST = "1.31", "1.37"
"""Versions of Kubernetes: the first with everything that the base uses, and the newest that schemas exist for."""
CHECK_CUSTOM = Path(__file__).with_name("check_custom_resources.mjs")


def is_custom(one: Object) -> bool:
    """Whether an object is of a custom resource."""
    return one["apiVersion"].partition("/")[0] in CUSTOM_GROUPS


def distinct(objects: Iterable[Object]) -> list[Object]:
    """Each object once: overlays share most of them."""
    return list({json.dumps(one, sort_keys=True): one for one in objects}.values())


def mistakes(objects: Iterable[Object], folder: Path, *, version: str) -> list[str]:
    """What Kubernetes' own schemas say is wrong with built-in objects."""
    path = folder / f"objects-{version}.yaml"
    path.write_text("".join(f"---\n{json.dumps(one)}\n" for one in objects if not is_custom(one)))
    command = [str(TOOLS / "bin" / "kubernetes-validate"), "--strict", "--quiet", "-k", version, str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in (ran.stdout + ran.stderr).splitlines() if line]
    assert bool(ran.returncode) == bool(said), f"exit status {ran.returncode}: {said}"
    return said


def custom_mistakes(objects: Iterable[Object]) -> list[str]:
    """What the schemas of custom resources say is wrong."""
    node = shutil.which("node")
    assert node is not None
    command = [node, str(CHECK_CUSTOM), str(TOOLS / "crds")]
    given = json.dumps([one for one in objects if is_custom(one)])
    ran = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert ran.stderr == "", ran.stderr
    said = ran.stdout.splitlines()
    assert bool(ran.returncode) == bool(said), f"exit status {ran.returncode}: {said}"
    return said
