"""How each of other people's programs is installed, in an environment of its own, and run against the server."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(__file__).parent / "clients"
ENVIRONMENTS = ROOT / "build" / "compat"
MODEL, LONG_MODEL = "tandem-demo", "tandem-demo-long"
LIMIT_S = 900


class Findings(NamedTuple):
    """What one program found: its version, and each check with what was wrong, or an empty text."""

    version: str
    checks: Mapping[str, str]


Run = Callable[[Path, Mapping[str, str]], Findings]
"""Runs a program in a folder with these environment variables."""


@dataclass(frozen=True)
class Program:
    """A client or a suite: what it is called, what is set besides address, key and model, and how it runs."""

    title: str
    settings: str
    run: Run
    model: str = MODEL
    """The model that it asks, by name."""


def python_client(script: str, *packages: str) -> Run:
    """Returns what runs a script with packages of PyPI in a virtual environment."""

    def run(folder: Path, environment: Mapping[str, str]) -> Findings:
        return _findings([python_with(folder, *packages), CLIENTS / script], folder, environment)

    return run


def node_client(script: str, *packages: str) -> Run:
    """Returns what runs a script with packages of npm, by Node or, where it is one of Python, beside them."""

    def run(folder: Path, environment: Mapping[str, str]) -> Findings:
        if not (folder / "node_modules").exists():
            _do(["npm", "install", "--no-fund", "--no-audit", "--prefix", folder, *packages], folder)
        if script.endswith(".py"):
            return _findings([sys.executable, CLIENTS / script], folder, environment)
        for name in ("checks.mjs", script):
            (folder / name).write_text((CLIENTS / name).read_text())
        return _findings(["node", script], folder, environment)

    return run


def pytest_client(script: str, package: str, *packages: str) -> Run:
    """Returns what runs a suite of tests that packages of PyPI have; the version is that of the first package."""

    def run(folder: Path, environment: Mapping[str, str]) -> Findings:
        python = python_with(folder, package, *packages)
        for name in ("checks.py", script):
            (folder / name).write_text((CLIENTS / name).read_text())
        (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_test_loop_scope = session\n")
        checks = _tested(python, folder, [script, "-c", "pytest.ini"], environment)
        version = _do([python, "-c", f"import importlib.metadata as m; print(m.version('{package}'))"], folder)
        return Findings(version.strip(), checks)

    return run


def llama_cpp(folder: Path, environment: Mapping[str, str]) -> Findings:
    """Runs those tests of llama.cpp's server that ask the API, from the source package of llama-cpp-python."""
    python = python_with(
        folder,
        "scikit-build-core",
        "aiohttp",
        "pytest",
        "filelock",
        "numpy",
        "openai",
        "requests",
        "wget",
        "prometheus-client",
        "anthropic",
    )
    if not [*folder.glob("*.tar.gz")]:
        flags = ["-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        _do([python, "-m", "pip", "download", *flags, "llama-cpp-python"], folder)
    archive_path = next(folder.glob("*.tar.gz"))
    name = archive_path.name.removesuffix(".tar.gz")
    tests = folder / name / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    if not tests.exists():
        with tarfile.open(archive_path) as archive:
            archive.extractall(folder, filter="data")
    files = [
        f"unit/test_{one}.py" for one in ("compat_anthropic", "compat_oai_responses", "chat_completion", "tokenize")
    ]
    port = environment["COMPAT_URL"].rpartition(":")[2]
    return Findings(name.rpartition("-")[2], _tested(python, tests, files, {"DEBUG_EXTERNAL": "1", "PORT": port}))


def go_client(folder: Path, environment: Mapping[str, str]) -> Findings:
    """Runs the checks of gRPC for Go, and the example, with stubs and libraries of Debian's packages."""
    _need("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    sources = {"check": CLIENTS / "grpc_go.go", "example": ROOT / "examples" / "chat_grpc.go"}
    for name, source in sources.items():
        (package := folder / "src" / name).mkdir(parents=True, exist_ok=True)
        for file in (source, CLIENTS / "grpc_go_codec.go"):
            shutil.copy(file, package)
    _do(["protoc", *_PROTOS, f"--go_out={folder}/src", f"--go-grpc_out={folder}/src", "inference.proto"], folder)
    paths = {"GO111MODULE": "off", "GOPATH": f"{folder}:/usr/share/gocode", "GOFLAGS": "-p=1"}
    found = _findings(["go", "run", "check"], folder, {**environment, **paths})
    return _with_example(found, _do(["go", "run", "example", environment["COMPAT_GRPC"]], folder, paths))


def java_client(folder: Path, environment: Mapping[str, str]) -> Findings:
    """Runs the checks of gRPC for Java, and the example, with stubs and libraries of Debian's packages."""
    _need("javac", "protoc", "grpc_java_plugin", "/usr/share/java/grpc-netty.jar", "/usr/share/java/perfmark-api.jar")
    plugin = f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}"
    (folder / "stubs").mkdir(exist_ok=True)
    outputs = [f"--java_out={folder}/stubs", f"--grpc-java_out={folder}/stubs"]
    _do(["protoc", *_PROTOS, plugin, *outputs, "inference.proto"], folder)
    paths = f"{folder}/classes:/usr/share/java/*"
    sources = [*(folder / "stubs").rglob("*.java"), CLIENTS / "GrpcJava.java", ROOT / "examples" / "ChatGrpc.java"]
    _do(["javac", "-nowarn", "-cp", paths, "-d", folder / "classes", *sources], folder)
    found = _findings(["java", "-cp", paths, "GrpcJava"], folder, environment)
    return _with_example(found, _do(["java", "-cp", paths, "ChatGrpc", environment["COMPAT_GRPC"]], folder))


_PROTOS = ("-I", str(ROOT / "protos"))


class Missing(Exception):
    """A tool that the system's own packages have is not installed."""


def _need(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None and not Path(tool).exists()]
    if missing:
        raise Missing(f"not installed: {', '.join(missing)}")


def _with_example(found: Findings, told: str) -> Findings:
    return Findings(found.version, {**found.checks, "the example": "" if told.strip() else "it says nothing"})


def open_webui(folder: Path, environment: Mapping[str, str]) -> Findings:
    """Runs Open WebUI without torch, which it needs for models of its own only and which would bring CUDA along."""
    python = python_with(folder, "uv")
    if not (folder / "env" / "bin" / "open-webui").exists():
        (folder / "left-out.txt").write_text("torch ; sys_platform == 'never'\n")
        _do([python, "-m", "uv", "pip", "install", "-q", "--override", folder / "left-out.txt", "open-webui"], folder)
    return _findings([python, CLIENTS / "open_webui_chat.py"], folder, environment)


def buf(folder: Path, environment: Mapping[str, str]) -> Findings:
    """Runs buf's checks on the contracts, without a server."""
    program = folder / "node_modules" / ".bin" / "buf"
    if not program.exists():
        _do(["npm", "install", "--no-fund", "--no-audit", "--prefix", folder, "@bufbuild/buf"], folder)
    done = subprocess.run([program, "lint"], cwd=ROOT, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True, check=False)
    told = done.stdout[:300] or f"exit status {done.returncode}" if done.returncode else ""
    return Findings(_do([program, "--version"], folder).strip(), {"lint": told})


def _tested(python: Path, folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns what pytest finds: the message of each failure, or an empty text."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        timeout=LIMIT_S,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    return dict(_in_report(report))


def _in_report(report: Path) -> Iterator[tuple[str, str]]:
    for case in ET.parse(report).iter("testcase"):
        outcomes = {child.tag: child.get("message") or "" for child in case}
        if "skipped" not in outcomes:
            found = [message for tag, message in outcomes.items() if tag in ("failure", "error")]
            module = (case.get("classname") or "").rpartition(".")[2]
            yield f"{module}::{case.get('name')}", " ".join(found)[:300]


def python_with(folder: Path, *packages: str) -> Path:
    """Returns the Python of an environment in this folder that has these packages."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "env" / "bin" / "python"
    installed = folder / "env" / "installed"
    if not installed.exists():
        venv.create(folder / "env", with_pip=True)
        _do([python, "-m", "pip", "install", "-q", *packages], folder)
        installed.touch()
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


PROGRAMS: Mapping[str, Program] = {
    "openai-python": Program("OpenAI's client, Python", "base_url", python_client("openai_python.py", "openai")),
    "openai-js": Program("OpenAI's client, JavaScript", "baseURL", node_client("openai_js.mjs", "openai")),
    "anthropic-python": Program(
        "Anthropic's client, Python", "base_url", python_client("anthropic_python.py", "anthropic")
    ),
    "anthropic-js": Program(
        "Anthropic's client, JavaScript", "baseURL", node_client("anthropic_js.mjs", "@anthropic-ai/sdk")
    ),
    "grpc-js": Program(
        "gRPC, JavaScript",
        "the address; the key as metadata",
        node_client("grpc_js.mjs", "@grpc/grpc-js", "@grpc/proto-loader"),
    ),
    "grpc-go": Program("gRPC, Go", "the address; the key as metadata", go_client),
    "grpc-java": Program("gRPC, Java", "the address; the key as metadata", java_client),
    "agents-python": Program(
        "OpenAI's Agents SDK, Python", "OPENAI_BASE_URL", python_client("agents_python.py", "openai-agents")
    ),
    "agents-js": Program(
        "OpenAI's Agents SDK, JavaScript", "OPENAI_BASE_URL", node_client("agents_js.mjs", "@openai/agents", "zod")
    ),
    "codex": Program("OpenAI's Codex CLI", "openai_base_url", node_client("codex_cli.py", "@openai/codex"), LONG_MODEL),
    "langchain": Program(
        "LangChain's standard tests, with ChatOpenAI",
        "base_url; stream_usage for usage in streams",
        pytest_client("langchain_standard.py", "langchain-tests", "langchain-openai"),
    ),
    "litellm": Program(
        "LiteLLM",
        "api_base, and `openai/`, `hosted_vllm/`, `anthropic/` or the like before the model",
        python_client("litellm_python.py", "litellm"),
    ),
    "smolagents": Program(
        "smolagents' two agents", "api_base", python_client("smolagents_agents.py", "smolagents[openai]"), LONG_MODEL
    ),
    "open-webui": Program("Open WebUI", "OPENAI_API_BASE_URL", open_webui, LONG_MODEL),
    "lm-eval": Program("lm-eval", "base_url", python_client("lm_eval_tasks.py", "lm-eval[api]")),
    "outlines": Program(
        "outlines: from_vllm, from_sglang, from_openai",
        "base_url",
        python_client("outlines_python.py", "outlines", "openai"),
    ),
    "guidance": Program(
        "guidance: VLLMModel, SglangModel, OpenAI",
        "base_url",
        python_client("guidance_python.py", "guidance", "openai"),
    ),
    "http2": Program("HTTP/2 by the sections of RFC 9113, curl, h2load", "", python_client("http2_cases.py", "hpack")),
    "buf": Program("buf lint, of protos/", "", buf),
    "llama-cpp": Program("llama.cpp's server tests (of chats, messages, responses, tokens)", "", llama_cpp),
}
