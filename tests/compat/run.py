"""Other people's clients and suites against one `tandem up`: each in an environment of its own, from its package.

usage: python -m tests.compat.run [NAMES…] [--write]      (--write: the matrix of docs/clients.md)

A check that fails though `tests/compat/expected.toml` does not say so, or that passes though it does, is an error.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.cluster import Cluster, running_cluster
from demo import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
CLIENTS = HERE / "clients"
PAGE = ROOT / "docs" / "clients.md"
ENVIRONMENTS = ROOT / "build" / "compat"
MODEL = "tandem-demo"
ALIASES = ["test", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1"]
"""Names that suites have in their requests."""
LIMIT_S = 900
BEGIN, END = "<!-- matrix -->\n", "<!-- end -->"


class Findings(NamedTuple):
    """What one program found: its version, and each check with what was wrong, or an empty text."""

    version: str
    checks: Mapping[str, str]


@dataclass(frozen=True)
class Program:
    """A client or a suite: what it is called, what is set besides address, key and model, and how it runs."""

    title: str
    settings: str
    run: Callable[[Path, Mapping[str, str]], Findings]


def python_client(package: str, script: str) -> Callable[[Path, Mapping[str, str]], Findings]:
    """Returns what runs a script with a package of PyPI in a virtual environment."""

    def run(folder: Path, environment: Mapping[str, str]) -> Findings:
        python = _python(folder, package)
        return _findings([python, CLIENTS / script], folder, environment)

    return run


def node_client(packages: list[str], script: str) -> Callable[[Path, Mapping[str, str]], Findings]:
    """Returns what runs a script with packages of npm."""

    def run(folder: Path, environment: Mapping[str, str]) -> Findings:
        if not (folder / "node_modules").exists():
            _do(["npm", "install", "--no-fund", "--no-audit", "--prefix", folder, *packages], folder)
        for name in ("checks.mjs", script):
            (folder / name).write_text((CLIENTS / name).read_text())
        return _findings(["node", script], folder, environment)

    return run


def llama_cpp(folder: Path, environment: Mapping[str, str]) -> Findings:
    """Runs those tests of llama.cpp's server that ask the API, from the source package of llama-cpp-python."""
    python = _python(
        folder, "aiohttp", "pytest", "filelock", "numpy", "openai", "requests", "wget", "prometheus-client", "anthropic"
    )
    archives = [*folder.glob("*.tar.gz")]
    if not archives:
        _do(
            [
                python,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--no-binary",
                ":all:",
                "--no-build-isolation",
                "llama-cpp-python",
            ],
            folder,
        )
        archives = [*folder.glob("*.tar.gz")]
    name = archives[0].name.removesuffix(".tar.gz")
    tests = folder / name / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    if not tests.exists():
        with tarfile.open(archives[0]) as archive:
            archive.extractall(folder, filter="data")
    report = folder / "report.xml"
    port = environment["COMPAT_URL"].rpartition(":")[2]
    files = [
        f"unit/test_{one}.py" for one in ("compat_anthropic", "compat_oai_responses", "chat_completion", "tokenize")
    ]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    subprocess.run(
        command,
        cwd=tests,
        env={**os.environ, "DEBUG_EXTERNAL": "1", "PORT": port},
        timeout=LIMIT_S,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    return Findings(name.rpartition("-")[2], dict(_in_report(report)))


def _in_report(report: Path) -> Iterator[tuple[str, str]]:
    for case in ET.parse(report).iter("testcase"):
        found = [child.get("message") or "" for child in case if child.tag in ("failure", "error")]
        if not any(child.tag == "skipped" for child in case):
            module = (case.get("classname") or "").rpartition(".")[2]
            yield f"{module}::{case.get('name')}", " ".join(found)[:300]


PROGRAMS: Mapping[str, Program] = {
    "openai-python": Program("OpenAI's client, Python", "base_url", python_client("openai", "openai_python.py")),
    "openai-js": Program("OpenAI's client, JavaScript", "baseURL", node_client(["openai"], "openai_js.mjs")),
    "anthropic-python": Program(
        "Anthropic's client, Python", "base_url", python_client("anthropic", "anthropic_python.py")
    ),
    "anthropic-js": Program(
        "Anthropic's client, JavaScript", "baseURL", node_client(["@anthropic-ai/sdk"], "anthropic_js.mjs")
    ),
    "grpc-js": Program(
        "gRPC, JavaScript",
        "the address; the key as metadata",
        node_client(["@grpc/grpc-js", "@grpc/proto-loader"], "grpc_js.mjs"),
    ),
    "llama-cpp": Program("llama.cpp's server tests (of chats, messages, responses, tokens)", "", llama_cpp),
}


def main() -> int:
    """Runs the programs and compares what they find with what is expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; none: all")
    parser.add_argument("--write", action="store_true", help="write the matrix of docs/clients.md")
    arguments = parser.parse_args()
    names = arguments.names or [*PROGRAMS]
    expected = tomllib.loads((HERE / "expected.toml").read_text())
    models = ENVIRONMENTS / "models.toml"
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    members = {"name": MODEL, "path": str(DEMO_MODEL), "aliases": ALIASES}
    models.write_text(
        "\n".join(["[[model]]", *(f"{name} = {json.dumps(value)}" for name, value in members.items()), ""])
    )
    with running_cluster("--models", str(models), "--threads", "1") as cluster:
        found = {name: _run(name, cluster) for name in names}
    mistakes = [mistake for name in names for mistake in _compared(name, found[name], expected.get(name, {}))]
    for name in names:
        num_good = sum(not wrong for wrong in found[name].checks.values())
        sys.stdout.write(f"{name} {found[name].version}: {num_good} of {len(found[name].checks)}\n")
    sys.stdout.writelines(f"{mistake}\n" for mistake in mistakes)
    if arguments.write:
        text = PAGE.read_text()
        PAGE.write_text(
            re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + _matrix(found, expected) + END, text, flags=re.DOTALL)
        )
    return bool(mistakes)


def _run(name: str, cluster: Cluster) -> Findings:
    folder = ENVIRONMENTS / name
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "COMPAT_URL": cluster.http,
        "COMPAT_GRPC": cluster.grpc,
        "COMPAT_KEY": "not-asked-for",
        "COMPAT_MODEL": MODEL,
        "COMPAT_PROTO": str(ROOT / "protos" / "inference.proto"),
    }
    return PROGRAMS[name].run(folder, told)


def _compared(name: str, found: Findings, expected: Mapping[str, str]) -> Iterator[str]:
    for check, wrong in found.checks.items():
        if wrong and check not in expected:
            yield f"{name}: {check} fails: {wrong}"
        elif not wrong and check in expected:
            yield f"{name}: {check} passes, though it is expected to fail"
    for check in expected.keys() - found.checks.keys():
        yield f"{name}: {check} is expected to fail, and is not there"


def _matrix(found: Mapping[str, Findings], expected: Mapping[str, Mapping[str, str]]) -> str:
    rows = [
        "| client | version | checks | what to set | what does not work, and why |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, program in PROGRAMS.items():
        if name in found:
            good = sum(not wrong for wrong in found[name].checks.values())
            reasons = "; ".join(dict.fromkeys(expected.get(name, {}).values())) or "–"
            cells = (
                program.title,
                found[name].version,
                f"{good} of {len(found[name].checks)}",
                program.settings,
                reasons,
            )
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _python(folder: Path, *packages: str) -> Path:
    python = folder / "env" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "env", with_pip=True)
        _do([python, "-m", "pip", "install", "-q", *packages], folder)
    return python


def _findings(command: list[str | Path], folder: Path, environment: Mapping[str, str]) -> Findings:
    told = _do(command, folder, environment)
    return Findings(**json.loads(told.splitlines()[-1]))


def _do(command: list[str | Path], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        timeout=LIMIT_S,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
